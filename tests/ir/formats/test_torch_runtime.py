"""torch's own pipeline runtime as a referee: it runs exported schedules with the gradients of the unpipelined model.

Gloo processes start once; each runs one step of one schedule file after another on a small model whose stages differ,
and compares the loss of every micro-batch and the gradient of every parameter with the unpipelined model. torch runs
wrong schedules happily, so that one finishes proves nothing.

A file with communication is run with torch's default `scale_grads=True`, where each stage's REDUCE_GRAD divides by the
number of micro-batches, so a reduce left out or doubled shows; a compute-only file with `scale_grads=False`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from recycle import Schedule, Shape, check, lower
from recycle.ir.families import FAMILIES
from recycle.ir.formats import torch_csv
from tests.ir.families import chunks_of
from tests.ir.formats.test_torch_csv import VALID
from tests.ir.test_check import DEFECTS
from tests.warm import warm_context

pytestmark = pytest.mark.process
TOLERANCE = 1e-5
START_SECONDS, STEP_SECONDS, ABANDONED_SECONDS = 120, 30, 600
WIDTH, ROWS, PROCESSES = 8, 2, 4


@dataclass(frozen=True)
class Case:
    """One file to run.

    Attributes:
        text: the CSV.
        stages: of each rank.
        micro_batches: per step.
        communicates: the file has its sends and receives, so torch adds none.
    """

    text: str
    stages: Sequence[Sequence[int]]
    micro_batches: int
    communicates: bool


Referee = Callable[[Case], dict[str, float]]
"""Relative error of each gradient, by `stage.parameter`, and of each loss, by `loss micro-batch`."""


@pytest.fixture(scope="module")
def referee(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Referee]:
    folder, numbers, context = tmp_path_factory.mktemp("torch"), count(), warm_context()
    pairs = [context.Pipe() for _ in range(PROCESSES)]
    members = [
        context.Process(target=_serve, args=(rank, theirs), daemon=True) for rank, (_, theirs) in enumerate(pairs)
    ]
    for process in members:
        process.start()

    def run(case: Case) -> dict[str, float]:
        file = folder / f"{next(numbers)}.csv"
        file.write_bytes(case.text.encode())
        used = [ours for ours, _ in pairs[: len(case.stages)]]
        for pipe in used:
            pipe.send((str(file), case))
        errors: dict[str, float] = {}
        for rank, pipe in enumerate(used):
            assert pipe.poll(START_SECONDS), f"rank {rank} gives no answer"
            answer = pipe.recv()
            assert isinstance(answer, dict), f"rank {rank}: {answer}"
            errors |= answer
        return errors

    yield run
    for process in members:  # some may wait in torch for one that failed
        process.kill()
        process.join()


def case(schedule: Schedule, communicates: bool) -> Case:
    return Case(torch_csv.dumps(schedule), schedule.placement, schedule.shape.micro_batches, communicates)


RUNS = [(family, Shape(1, ranks, m, chunks_of(family))) for family in FAMILIES for ranks, m in ((4, 8), (2, 6))]


@pytest.mark.parametrize(("family", "shape"), RUNS, ids=str)
def test_torch_computes_the_unpipelined_gradients_from_our_file(referee: Referee, family: str, shape: Shape) -> None:
    judge(referee, FAMILIES[family](shape), communicates=True)


@pytest.mark.parametrize("communicates", [False, True], ids=["compute-only", "lowered"])
@pytest.mark.parametrize("name", ["v", "arbitrary", "overlapped", "split"])
def test_torch_runs_any_placement_split_backwards_and_overlapped_pairs(
    referee: Referee, name: str, communicates: bool
) -> None:
    judge(referee, VALID[name], communicates)


def judge(referee: Referee, schedule: Schedule, communicates: bool) -> None:
    """Run it and look at the loss of every micro-batch and the six parameters of every stage."""
    shape = schedule.shape
    errors = referee(case(lower(schedule) if communicates else schedule, communicates))
    assert {f"loss {j}" for j in range(shape.micro_batches)} < set(errors)
    assert len(errors) == shape.micro_batches + 6 * shape.stages
    assert max(errors.values()) <= TOLERANCE, max(errors, key=errors.__getitem__)


def test_the_referee_finds_swapped_micro_batches_and_a_missing_reduce(referee: Referee) -> None:
    first, second, _, _ = DEFECTS["7 receives out of order"]
    swapped = torch_csv.loads(f"{first}\r\n{second}\r\n")
    assert [finding.rule for finding in check(swapped)] == ["fifo"]
    assert max(referee(case(swapped, communicates=True)).values()) > 0.1
    lowered = case(lower(FAMILIES["1f1b"](Shape(1, 2, 5))), communicates=True)
    without = Case(lowered.text.replace(",1REDUCE_GRAD", ""), lowered.stages, lowered.micro_batches, True)
    wrong = {name.split(".")[0]: round(error, 3) for name, error in referee(without).items() if error > TOLERANCE}
    assert wrong == {"1": 4.0}  # five times the gradient is off by four times


def _serve(rank: int, pipe: Connection) -> None:
    """One process, which answers one case after another."""
    faulthandler.dump_traceback_later(ABANDONED_SECONDS, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            order = pipe.recv()
            try:
                pipe.send(_errors(rank, *order))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")


def _errors(rank: int, file: str, case: Case) -> dict[str, float]:
    """Run the file in new process groups and compare the results of this rank."""
    ranks = len(case.stages)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{file}.store", ranks), rank=rank, world_size=ranks,
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
    own_stages = [PipelineStage(parts[stage], stage, count, torch.device("cpu")) for stage in sorted(case.stages[rank])]
    runtime = schedules._PipelineScheduleRuntime(
        own_stages, case.micro_batches, loss_fn=_loss, scale_grads=case.communicates
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


def _relative(actual: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """Largest difference over the largest entry; infinite when there is nothing, or not a number."""
    if actual is None:
        return float("inf")
    error = float((actual - wanted).abs().max() / wanted.abs().max())
    return error if error == error else float("inf")
