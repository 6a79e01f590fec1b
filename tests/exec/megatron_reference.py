"""megatron-core's own pipeline schedule, DDP and 1F1B as the reference for ours, on CPU and gloo.

`MegatronReference` spawns D * P processes once; each builds its GPTModel part the way Megatron jobs do, takes the
weights that our initialisation gives to the same global names, and runs `get_forward_backward_func` on the
micro-batches of our corpus. Megatron's schedules make tensors on "cuda" unconditionally, so each process runs under
`shims`, which belong to tests and benchmarks only.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from recycle.exec.data.batches import load_corpus
from recycle.exec.leader.commit import clip_factor
from recycle.job import Job
from recycle.megatron.without_gpu import without_gpu
from tests.exec.megatron_data import MegatronBatches
from tests.warm import WarmPool

DEADLINE_SECONDS = 120


@dataclass(frozen=True)
class Iteration:
    """What one iteration gave.

    Attributes:
        gradients: mean gradient by global parameter name, fp32, of data-parallel rank 0.
        replicas_equal: whether every data-parallel rank has the same bits.
        losses: micro-batch loss by global micro-batch id.
        seconds: of `forward_backward_func` with gradient reduction, of the slowest process.
    """

    gradients: dict[str, torch.Tensor]
    replicas_equal: bool
    losses: dict[int, float]
    seconds: float


class MegatronReference(WarmPool):
    """Megatron's processes for a job, started once.

    Args:
        job: D, P and m from its shape (V = 1), model, data and threads.
        processes: how many to start, for `use` of jobs with more workers; as many as the job has when left out.
    """

    def __init__(self, job: Job, processes: int | None = None):
        super().__init__(processes or job.shape.worker_count, _make_worker)
        self._used = 0
        self.use(job)

    def use(self, job: Job):
        """Go over to another job of at most as many workers: new process groups, new model."""
        self._count = job.shape.worker_count
        self._used += 1
        self.ask(self._count, "use", job.to_toml(), self._used)

    def iteration(self, step: int) -> Iteration:
        """One iteration's gradients and losses; no optimizer step is taken."""
        answers = self.ask(self._count, "iteration", step)
        gradients = {}
        losses = {}
        equal = True
        for replica, named, part_losses, _ in answers:
            losses |= part_losses
            for name, values in named.items():
                if replica == 0:
                    gradients[name] = torch.from_numpy(values)
        for replica, named, _, _ in answers:
            if replica:
                equal &= all(np.array_equal(values, gradients[name].numpy()) for name, values in named.items())
        return Iteration(gradients, equal, losses, max(answer[3] for answer in answers))

    def train(self, steps: int) -> list[list[float]]:
        """Train for `steps` iterations, optimizer steps included; per process, when each iteration started.

        Monotonic seconds, which all processes of a machine share.
        """
        return self.ask(self._count, "train", steps)

    def shim_cost(self, repeats: int) -> float:
        """Seconds of F and B of a stage under the shims over the seconds without them: median of paired runs.

        Taken on one process while the others are idle.
        """
        return float(self.ask(1, "shim_cost", repeats)[0])


@contextlib.contextmanager
def shims() -> Iterator[None]:
    """Let Megatron's schedules and DDP run without a GPU. For test processes only."""
    torch.Tensor.cuda = lambda self, *_, **__: self
    with without_gpu():
        yield


def leave():
    """Leave the process groups of this process, if it has any."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def join(
    store,
    rank: int,
    processes: int,
    ranks: int,
    chunks=1,
    tensor_parallel=1,
    expert_parallel=1,
):
    """Form the process groups of a Megatron job, in place of those before."""
    from megatron.core import parallel_state

    leave()
    timeout = timedelta(seconds=DEADLINE_SECONDS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=tensor_parallel // expert_parallel,
    )


def gpt_model(
    config, job: Job, ends: Sequence[bool], number: int | None = None
) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """megatron-core's own model, with weights that depend on their names alone, and its parameters by name.

    Args:
        ends: whether this is the first stage, and the last.
        number: of the chunk, where there are several.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from recycle.exec.model.gpt import layer_spec
    from recycle.exec.model.weights import global_names, initialise
    from recycle.job.architecture import is_rotary

    module = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=job.model.vocabulary,
        max_sequence_length=job.model.sequence,
        pre_process=ends[0],
        post_process=ends[1],
        share_embeddings_and_output_weights=job.model.tied,
        position_embedding_type="rope" if is_rotary(job.model) else "learned_absolute",
        rotary_base=job.model.rotary_base,
        vp_stage=number,
    )
    first_layer = get_transformer_layer_offset(config, number)
    rank = parallel_state.get_tensor_model_parallel_rank()
    initialise(module, job.model, first_layer, rank, job.grid.tensor_parallel)
    return module, global_names(module, first_layer)


def _make_worker(store, rank: int):
    worker = None

    def answer(what, *arguments):
        nonlocal worker
        with shims():
            if what == "use":
                text, use = arguments
                worker = _Worker(Job.from_toml(text), rank, torch.distributed.PrefixStore(f"use{use}", store))
                return None
            return getattr(worker, what)(*arguments)

    return answer


class _Worker:
    """One process of a Megatron job."""

    def __init__(self, job: Job, rank: int, store):
        torch.set_num_threads(job.train.threads)
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from recycle.exec.model.config import transformer_config

        join(store, rank, job.shape.worker_count, job.shape.ranks)
        config = transformer_config(
            job,
            pipeline_model_parallel_size=job.shape.ranks,
            finalize_model_grads_func=finalize_model_grads,
            batch_p2p_comm=False,
        )
        ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        model, self._named = gpt_model(config, job, ends)
        self._model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            model,
        )
        self._replica = parallel_state.get_data_parallel_rank()
        self._forward_backward = get_forward_backward_func()
        self._job = job
        self._corpus = MegatronBatches(job) if job.data.kind == "gpt-dataset" else load_corpus(job)
        self._positions = torch.arange(job.model.sequence).expand(job.data.micro_batch_size, -1)

    def iteration(self, step: int) -> tuple[int, dict[str, np.ndarray], dict[int, float], float]:
        torch.distributed.barrier()
        start = time.perf_counter()
        kept = self._gradients(step)
        seconds = time.perf_counter() - start
        gradients = {name: parameter.main_grad.numpy().copy() for name, parameter in self._named.items()}
        return self._replica, gradients, {entry["id"]: float(entry["loss"]) for entry in kept}, seconds

    def _gradients(self, step: int):
        """1F1B and the reduction: `main_grad` of every parameter; what the loss function kept."""
        count = self._job.shape.micro_batches
        ids = [self._replica * count + index for index in range(count)]
        self._model.zero_grad_buffer()
        return self._forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=iter([(number, *self._corpus.batch(step, number).values()) for number in ids]),
            model=[self._model],
            num_microbatches=count,
            seq_length=self._job.model.sequence,
            micro_batch_size=self._job.data.micro_batch_size,
            forward_only=False,
        )

    def train(self, steps: int) -> list[float]:
        """What a Megatron job does per iteration, with torch's fused AdamW: its own refuses CPU tensors."""
        train = self._job.train
        optimizer = torch.optim.AdamW(
            list(self._named.values()), lr=train.learning_rate, betas=(train.beta1, train.beta2), fused=True
        )
        starts = []
        torch.distributed.barrier()
        for step in range(steps):
            starts.append(time.monotonic())
            self._gradients(step)
            for parameter in self._named.values():
                parameter.grad = parameter.main_grad
            squared = torch.stack([p.main_grad.square().sum() for p in self._named.values()]).sum()
            torch.distributed.all_reduce(squared)
            factor = clip_factor(train.clip, float(squared) / self._job.shape.pipelines)
            if factor < 1.0:
                for parameter in self._named.values():
                    parameter.main_grad.mul_(factor)
            optimizer.step()
            for parameter in self._named.values():
                parameter.grad = None
        starts.append(time.monotonic())
        return starts

    def shim_cost(self, repeats: int) -> float:
        """See `MegatronReference.shim_cost`."""
        tokens, _ = self._corpus.batch(0, 0).values()

        def seconds(without):
            with without:
                start = time.perf_counter()
                output = self._model.module(
                    input_ids=tokens, position_ids=self._positions, attention_mask=None, labels=None
                )
                output.backward(torch.ones_like(output))
                return time.perf_counter() - start

        ratios = []
        for repeat in range(repeats + 1):
            result = {}
            for shimmed in (True, False) if repeat % 2 else (False, True):
                result[shimmed] = seconds(contextlib.nullcontext() if shimmed else torch._C.DisableTorchFunction())
            ratios.append(result[True] / result[False])
        return statistics.median(ratios[1:])  # the first pair warms up

    def _forward_step(self, batches, model: torch.nn.Module):
        number, tokens, labels = next(batches)
        output = model(input_ids=tokens, position_ids=self._positions, attention_mask=None, labels=labels)

        def loss(losses):
            mean = losses.mean()
            return mean, {"id": number, "loss": mean.detach().clone()}

        return output, loss
