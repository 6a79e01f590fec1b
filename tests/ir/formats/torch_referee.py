"""torch's own pipeline runtime as an independent referee of the schedules that we export.

`Referee` starts gloo processes once; each then runs one step of one schedule file after another on a small model whose
stages differ, and compares the loss of every micro-batch and the gradient of every parameter with the unpipelined
model. torch runs wrong schedules happily, so that one finishes proves nothing.

A file with communication is run with torch's default `scale_grads=True`, where each stage's REDUCE_GRAD divides by the
number of micro-batches, so a reduce left out or doubled shows; a compute-only file with `scale_grads=False`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from tests.warm import warm_context

PRIVATE_NAMES = ("_load_csv",)
START_SECONDS, STEP_SECONDS, ABANDONED_SECONDS = 120, 30, 600
WIDTH, ROWS = 8, 2


@dataclass(frozen=True)
class Case:
    """One file to run.

    Attributes:
        text: the CSV.
        stages: those of each rank.
        micro_batches: per step.
        communicates: the file has its sends and receives, so torch adds none.
    """

    text: str
    stages: Sequence[Sequence[int]]
    micro_batches: int
    communicates: bool


class Referee:
    """The processes; use as a context manager.

    Args:
        folder: for schedule files and for the files over which processes find each other.
        processes: the most ranks that a case may have.
    """

    def __init__(self, folder: Path, processes: int) -> None:
        self._folder, self._count, self._cases = folder, processes, 0
        self._members: list[tuple[Any, Connection]] = []
        self.missing: list[str] = []
        self._start()

    def _start(self) -> None:
        context = warm_context()
        for rank in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self.missing = self._answers(self._count, START_SECONDS)[0]

    def errors(self, case: Case) -> dict[str, float]:
        """Relative error of each gradient, by `stage.parameter`, and of each loss, by `loss micro-batch`.

        Raises:
            RuntimeError: torch refuses the file or fails in the step, or a process gives no answer in time. The
                processes are replaced, as the others may still wait for the one that failed.
        """
        if not self._members:
            self._start()
        self._cases += 1
        file = self._folder / f"{self._cases}.csv"
        file.write_bytes(case.text.encode())
        ranks = len(case.stages)
        for _, pipe in self._members[:ranks]:
            pipe.send((str(file), str(self._folder / f"{self._cases}.store"), case))
        try:
            answers = self._answers(ranks, STEP_SECONDS)
        except RuntimeError:
            self.stop()
            raise
        return {name: error for answer in answers for name, error in answer.items()}

    def _answers(self, count: int, seconds: float) -> list[Any]:
        """One answer from each of the first `count` processes; the first failure ends the wait."""
        awaited = {pipe: rank for rank, (_, pipe) in enumerate(self._members[:count])}
        answers: dict[int, Any] = {}
        while len(answers) < count:
            ready = wait([pipe for pipe, rank in awaited.items() if rank not in answers], seconds)
            if not ready:
                raise RuntimeError(f"ranks {sorted(set(range(count)) - set(answers))} give no answer")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = awaited[pipe]
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} died") from None
                if isinstance(answers[rank], str):
                    raise RuntimeError(f"rank {rank}: {answers[rank]}")
        return [answers[rank] for rank in range(count)]

    def stop(self) -> None:
        """Kill the processes; some may wait in torch for one that failed."""
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members = []

    def __enter__(self) -> Referee:
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()


def _serve(rank: int, pipe: Connection) -> None:
    """One process: tell which private names of torch are missing, then answer one case after another."""
    faulthandler.dump_traceback_later(ABANDONED_SECONDS, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    runtime = getattr(schedules, "_PipelineScheduleRuntime", None)
    pipe.send([name for name in PRIVATE_NAMES if not hasattr(runtime, name)])
    with contextlib.suppress(EOFError):
        while True:
            order = pipe.recv()
            try:
                pipe.send(_errors(rank, *order))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")


def _errors(rank: int, file: str, store: str, case: Case) -> dict[str, float]:
    """Run the file and compare what this rank has. Every case has process groups of its own."""
    ranks = len(case.stages)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=STEP_SECONDS),
    )  # fmt: skip
    try:
        return _compare(rank, file, case)
    finally:
        dist.destroy_process_group()


def _compare(rank: int, file: str, case: Case) -> dict[str, float]:
    count = sum(map(len, case.stages))
    inputs, targets = _rows(case.micro_batches, 1), _rows(case.micro_batches, 2)
    whole, parts = _model(count), _model(count)
    wanted_losses = []
    for batch, target in zip(inputs.chunk(case.micro_batches), targets.chunk(case.micro_batches), strict=True):
        loss = _loss(nn.Sequential(*whole)(batch), target)
        loss.backward()
        wanted_losses.append(loss.detach())
    mine = [PipelineStage(parts[stage], stage, count, torch.device("cpu")) for stage in sorted(case.stages[rank])]
    runtime = schedules._PipelineScheduleRuntime(
        mine, case.micro_batches, loss_fn=_loss, scale_grads=case.communicates
    )  # fmt: skip
    runtime._load_csv(file, format="compute_comms" if case.communicates else "compute_only")
    losses: list[torch.Tensor] = []
    has_first, has_last = 0 in case.stages[rank], count - 1 in case.stages[rank]
    runtime.step(
        *((inputs,) if has_first else ()),
        target=targets if has_last else None,
        losses=losses if has_last else None,
        return_outputs=False,
    )
    divisor = case.micro_batches if case.communicates else 1
    errors = {
        f"{stage}.{name}": _relative(parameter.grad, wanted.grad / divisor)
        for stage in case.stages[rank]
        for (name, parameter), wanted in zip(
            parts[stage].named_parameters(), whole[stage].parameters(), strict=True
        )
    }  # fmt: skip
    if has_last:
        for j, (loss, wanted) in enumerate(zip(losses, wanted_losses, strict=True)):
            errors[f"loss {j}"] = _relative(loss.detach(), wanted)
    return errors


def _model(stages: int) -> list[nn.Module]:
    """The same stages in every process; no two are alike."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(stages)
    ]


def _rows(micro_batches: int, seed: int) -> torch.Tensor:
    return torch.randn(ROWS * micro_batches, WIDTH, generator=torch.Generator().manual_seed(seed))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


def _relative(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """Largest difference over the largest entry; infinite when there is nothing, or not a number."""
    if found is None:
        return float("inf")
    error = float((found - wanted).abs().max() / wanted.abs().max())
    return error if error == error else float("inf")
