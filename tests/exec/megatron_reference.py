"""megatron-core's own pipeline schedule, DDP and 1F1B as the reference for ours, on CPU and gloo.

`MegatronReference` spawns D * P processes once; each builds its GPTModel part the way Megatron jobs do, takes the
weights that our initialisation gives to the same global names, and runs `get_forward_backward_func` on the
micro-batches of our corpus. Megatron's schedules make tensors on "cuda" unconditionally, so each process runs under
`shims`, which belong to tests and benchmarks only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from examples.megatron_loop.without_gpu import without_gpu
from recycle.exec.data.batches import load_corpus
from recycle.exec.leader.commit import clip_factor
from recycle.job import Job
from tests.exec.megatron_data import MegatronBatches
from tests.warm import end_processes, warm_context

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


class MegatronReference:
    """Megatron's processes for a job, started once; use as a context manager.

    Args:
        job: D, P and m from its shape (V = 1), model, data and threads.
        processes: how many to start, for `use` of jobs with more workers; as many as the job has when left out.
    """

    def __init__(self, job: Job, processes: int | None = None) -> None:
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        warm = warm_context()
        self._processes, self._pipes = [], []
        for rank in range(processes if processes is not None else job.shape.worker_count):
            ours, theirs = warm.Pipe()
            process = warm.Process(target=_serve, args=(rank, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._used = 0
        self.use(job)

    def use(self, job: Job) -> None:
        """Go over to another job of at most as many workers: new process groups, new model."""
        self._members = self._pipes[: job.shape.worker_count]
        assert len(self._members) == job.shape.worker_count, "too few processes were started"
        self._used += 1
        for pipe in self._members:
            pipe.send((self._used, job.to_toml()))
        for pipe in self._members:
            _receive(pipe)

    def iteration(self, step: int) -> Iteration:
        """One iteration's gradients and losses; no optimizer step is taken."""
        answers = self._ask(("iteration", step))
        gradients: dict[str, torch.Tensor] = {}
        losses: dict[int, float] = {}
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
        return self._ask(("train", steps))

    def shim_cost(self, repeats: int) -> float:
        """Seconds of F and B of a stage under the shims over the seconds without them: median of paired runs.

        Taken on one process while the others are idle.
        """
        self._members[0].send(("shim_cost", repeats))
        return float(_receive(self._members[0]))

    def _ask(self, what: tuple[str, int]) -> list[Any]:
        for pipe in self._members:
            pipe.send(what)
        return [_receive(pipe) for pipe in self._members]

    def __enter__(self) -> MegatronReference:
        return self

    def __exit__(self, *failure: object) -> None:
        end_processes(zip(self._processes, self._pipes, strict=True))


def _receive(pipe: Any) -> Any:
    assert pipe.poll(DEADLINE_SECONDS), "a reference process gives no answer"
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


@contextlib.contextmanager
def shims() -> Iterator[None]:
    """Let Megatron's schedules and DDP run without a GPU. For test processes only."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    with without_gpu():
        yield


def _serve(rank: int, port: int, pipe: Any) -> None:
    faulthandler.dump_traceback_later(10 * DEADLINE_SECONDS, exit=True)
    worker = None
    try:
        with shims():
            while (order := pipe.recv()) is not None:
                name, argument = order
                if isinstance(name, int):
                    worker = _Worker(Job.from_toml(argument), rank, port, name)
                    pipe.send(())
                else:
                    pipe.send(getattr(worker, name)(argument))
    except EOFError:
        return
    except BaseException as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")
        raise


class _Worker:
    """One process of a Megatron job."""

    def __init__(self, job: Job, rank: int, port: int, use: int) -> None:
        torch.set_num_threads(job.train.threads)
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        from recycle.exec.model.config import transformer_config
        from recycle.exec.model.gpt import layer_spec
        from recycle.exec.model.weights import global_names, initialise
        from recycle.job.architecture import is_rotary

        if torch.distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
        store = torch.distributed.PrefixStore(
            f"use{use}", torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
        )
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=job.shape.worker_count,
            timeout=timedelta(seconds=DEADLINE_SECONDS),
        )  # fmt: skip
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=job.shape.ranks)
        config = transformer_config(
            job,
            pipeline_model_parallel_size=job.shape.ranks,
            finalize_model_grads_func=finalize_model_grads,
            batch_p2p_comm=False,
        )
        pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
        model = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(config),
            vocab_size=job.model.vocabulary,
            max_sequence_length=job.model.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope" if is_rotary(job.model) else "learned_absolute",
            rotary_base=job.model.rotary_base,
        )
        first_layer = get_transformer_layer_offset(config, pp_rank=pipeline_rank)
        initialise(model, job.model, first_layer)
        self._named = global_names(model, first_layer)
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

    def _gradients(self, step: int) -> Any:
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

        def seconds(without: contextlib.AbstractContextManager[Any]) -> float:
            with without:
                start = time.perf_counter()
                output = self._model.module(
                    input_ids=tokens, position_ids=self._positions, attention_mask=None, labels=None
                )
                output.backward(torch.ones_like(output))
                return time.perf_counter() - start

        ratios = []
        for repeat in range(repeats + 1):
            found = {}
            for shimmed in (True, False) if repeat % 2 else (False, True):
                found[shimmed] = seconds(contextlib.nullcontext() if shimmed else torch._C.DisableTorchFunction())
            ratios.append(found[True] / found[False])
        return statistics.median(ratios[1:])  # the first pair warms up

    def _forward_step(self, batches: Iterator[Any], model: torch.nn.Module) -> Any:
        number, tokens, labels = next(batches)
        output = model(input_ids=tokens, position_ids=self._positions, attention_mask=None, labels=labels)

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            mean = losses.mean()
            return mean, {"id": number, "loss": mean.detach().clone()}

        return output, loss
