"""Megatron jobs in processes over gloo: each iteration by megatron-core's own loop and by recycle's, side by side.

`Jobs` starts its processes once; a `Case` says what one comparison trains. Each process builds its chunks the way
Megatron jobs do, with the weights that recycle's initialisation gives to the same names, so that the gradients of
different placements compare by name.
"""

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from recycle import Job, Schedule
from tests.exec.drive import small_job
from tests.exec.megatron_reference import gpt_model, join, leave, shims
from tests.warm import WarmPool

SEQUENCE, ROWS = 32, 2


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        schedule: what recycle's loop gets; None for megatron-core's own.
        model: further keys of `[model]`; it has as many layers as stages when left out.
        config: further fields of TransformerConfig, set after it was made, as training scripts do.
        ddp: further fields of DistributedDataParallelConfig.
        mode: "train", "evaluate" (forward only) or "tokens" (`calculate_per_token_loss`).
        own: the module is `OwnModule`, which megatron-core has no layer in, and not a GPTModel.
        iterations: with weights that a plain gradient step changes after each.
    """

    schedule: Schedule | str | None
    ranks: int = 2
    replicas: int = 1
    chunks: int = 1
    micro_batches: int = 4
    tensor_parallel: int = 1
    sequence: int = SEQUENCE
    model: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "train"
    own: bool = False
    iterations: int = 1

    @property
    def processes(self) -> int:
        return self.ranks * self.replicas * self.tensor_parallel


@dataclass(frozen=True)
class Result:
    """What a case gave.

    Attributes:
        gradients: of each data-parallel replica, by name in the whole model (and tensor rank, if there are several), of
            the last iteration.
        kept: what the loss function kept, of each replica's last stage, of all iterations.
        split: per rank, how many layers still have recycle's backward afterwards.
    """

    gradients: list[dict[str, torch.Tensor]]
    kept: list[list[Any]]
    split: list[int]


class Jobs(WarmPool):
    """Processes for cases of at most `count` workers; use as a context manager."""

    def __init__(self, count=4):
        super().__init__(count, _make_process)
        self._runs = 0

    def run(self, case: Case) -> Result:
        """Run a case. Raises RuntimeError with the text of the first error of a process."""
        answers = self.call(run_case, case)
        gradients = [{} for _ in range(case.replicas)]
        kept = [[] for _ in range(case.replicas)]
        for replica, named, rank_kept, _ in answers:
            gradients[replica] |= {name: torch.from_numpy(values) for name, values in named.items()}
            kept[replica] += rank_kept
        return Result(gradients, kept, [answer[3] for answer in answers])

    def call(self, function, case: Case):
        """`function(case)` in the case's processes, with torch.distributed up; its results by rank."""
        self._runs += 1
        return self.ask(case.processes, self._runs, function, case)


def _make_process(store, rank: int):
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    from recycle.megatron_versions import share_random_generator

    # Megatron's own recomputation stores the random state of the GPU too; here there is no GPU.
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(0)
    random._set_cuda_rng_state = lambda *_, **__: None
    moe_utils.te_general_gemm = None  # the name is missing where Transformer Engine is
    share_random_generator()  # Megatron's generators are on a GPU

    def answer(run, function, case):
        try:
            with shims():
                prefixed = torch.distributed.PrefixStore(f"run{run}", store)
                experts = case.config.get("expert_model_parallel_size", 1)
                join(prefixed, rank, case.processes, case.ranks, case.chunks, case.tensor_parallel, experts)
                return function(case)
        except Exception:
            traceback.print_exc()
            leave()  # which wakes the others
            raise

    return answer


def build(case: Case) -> tuple[list[Any], dict[str, torch.nn.Parameter]]:
    """The chunks of this process in DDP, and their parameters by name in the whole model."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from recycle.exec.model.config import transformer_config
    from recycle.megatron import as_stage

    model = {"layers": case.ranks * case.chunks, "sequence": case.sequence, **case.model}
    job = small_job(model=model, tensor_parallel=case.tensor_parallel)
    config = transformer_config(
        job,
        pipeline_model_parallel_size=case.ranks,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        batch_p2p_comm=False,
        calculate_per_token_loss=case.mode == "tokens",
    )
    config.finalize_model_grads_func = finalize_model_grads
    for name, value in case.config.items():
        setattr(config, name, value)
    chunks, named = [], {}
    for chunk in range(case.chunks):
        number = chunk if case.chunks > 1 else None
        with as_stage(case.schedule, number) if case.schedule is not None else contextlib.nullcontext():
            ends = [
                is_end(ignore_virtual=False, vp_stage=number)
                for is_end in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
            ]
            module, of_module = (own_module if case.own else gpt_model)(config, job, ends, number)
        named |= of_module
        ddp = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **case.ddp})
        chunks.append(DistributedDataParallel(config, ddp, module))
    if ddp.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks] if ddp.align_param_gather else None
        if case.chunks == 1:
            config.no_sync_func = chunks[0].no_sync
            config.grad_sync_func = config.grad_sync_func and config.grad_sync_func[0]
    if case.tensor_parallel > 1:
        rank = parallel_state.get_tensor_model_parallel_rank()
        named = {f"{name} of tensor rank {rank}": parameter for name, parameter in named.items()}
    return chunks, named


class OwnModule(torch.nn.Module):
    """A script's own module: plain torch layers, one of which is used twice."""

    def __init__(self, config, first: bool, last: bool):
        super().__init__()
        self.config, self.model_type = config, None
        self.pre_process, self.post_process = first, last
        self.share_embeddings_and_output_weights = False
        self.table = torch.nn.Embedding(256, config.hidden_size) if first else None
        self.up = torch.nn.Linear(config.hidden_size, 96)
        self.norm = torch.nn.LayerNorm(96)
        self.down = torch.nn.Linear(96, config.hidden_size)
        self.twice = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.head = torch.nn.Linear(config.hidden_size, 256) if last else None
        self._entry = None

    def set_input_tensor(self, entry: list[torch.Tensor]):
        self._entry = entry[0]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_) -> torch.Tensor:
        entry = self._entry if self.table is None else self.table(input_ids.t().contiguous())
        output = entry + self.down(torch.nn.functional.gelu(self.norm(self.up(entry))))
        output = output + self.twice(torch.tanh(self.twice(output)))
        if self.head is None:
            return output
        logits = self.head(output).transpose(0, 1)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(
            labels
        )


def own_module(config, job: Job, ends: Sequence[bool], number: int | None) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """`OwnModule`, its weights drawn by its stage."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank() + (number or 0) * config.pipeline_model_parallel_size
    torch.manual_seed(stage)
    module = OwnModule(config, *ends)
    return module, {f"{stage}.{name}": parameter for name, parameter in module.named_parameters()}


def half(loss: torch.Tensor) -> torch.Tensor:
    """A loss scale, as mixed precision has one."""
    return 0.5 * loss


class Timers:
    """Stands in for Megatron-LM's timers; every start needs a stop."""

    def __init__(self):
        self._running = set()

    def __call__(self, name: str, log_level=0):
        def start(barrier=False):
            assert name not in self._running
            self._running.add(name)

        return SimpleNamespace(start=start, stop=lambda: self._running.remove(name))


def batches(
    replica: int, iteration: int, count: int, sequence: int = SEQUENCE
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(number, tokens, mask) of each micro-batch; later positions of some are masked."""
    for index in range(count):
        generator = torch.Generator().manual_seed(1000 * iteration + 100 * replica + index)
        tokens = torch.randint(0, 256, (ROWS, sequence + 1), generator=generator)
        mask = torch.ones(ROWS, sequence)
        mask[:, sequence - 3 * index :] = 0.0
        yield index, tokens, mask


def forward_step(case: Case):
    """A script's forward step."""
    positions = torch.arange(case.sequence).expand(ROWS, -1)

    def step(data, model):
        number, tokens, mask = next(data)
        output = model(
            input_ids=tokens[:, :-1], position_ids=positions, attention_mask=None, labels=tokens[:, 1:].contiguous()
        )

        def loss(losses):
            total, count = (losses * mask).sum(), mask.sum().int()
            kept = {"number": number, "loss": float(total), "tokens": int(count)}
            return (total, count, kept) if case.mode == "tokens" else (total / count, kept)

        return output, loss

    return step


def run_case(case: Case) -> tuple[int, dict[str, np.ndarray], list[Any], int]:
    """One process's part of `Jobs.run`."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from recycle.megatron import forward_backward_func

    chunks, named = build(case)
    torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())  # for dropout
    loop = get_forward_backward_func() if case.schedule is None else forward_backward_func(case.schedule)
    replica = parallel_state.get_data_parallel_rank()
    kept = []
    for iteration in range(case.iterations):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        data = [batches(replica, iteration, case.micro_batches, case.sequence) for _ in chunks]
        with torch.set_grad_enabled(case.mode != "evaluate"):
            kept += loop(
                forward_step_func=forward_step(case),
                data_iterator=data if len(chunks) > 1 else data[0],
                model=chunks,
                num_microbatches=case.micro_batches,
                seq_length=case.sequence,
                micro_batch_size=ROWS,
                forward_only=case.mode == "evaluate",
            )
        if iteration < case.iterations - 1:
            with torch.no_grad():
                for parameter in named.values():
                    parameter -= 0.1 * parameter.main_grad
    replaced = sum("_forward_impl" in vars(module) for chunk in chunks for module in chunk.modules())
    return replica, {name: parameter.main_grad.numpy().copy() for name, parameter in named.items()}, kept, replaced


def differing(ours: Sequence[Mapping[str, torch.Tensor]], theirs: Sequence[Mapping[str, torch.Tensor]]) -> list[str]:
    """Names whose gradients are not the same bits, or that only one side has, on any replica."""
    names = set()
    for first, second in zip(ours, theirs, strict=True):
        names |= first.keys() ^ second.keys()
        names |= {name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])}
    return sorted(names)
