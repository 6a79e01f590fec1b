"""torch's own pipeline runtime as a referee: it runs exported schedules with the gradients of the unpipelined model.

Gloo processes run one step of one schedule file after another on a small model whose stages differ, and compare the
loss of every micro-batch and the gradient of every parameter with the unpipelined model. torch runs wrong schedules
happily, so that one finishes proves nothing.

A file with communication is run with torch's default `scale_grads=True`, where each stage's REDUCE_GRAD divides by the
number of micro-batches, so a reduce left out or doubled shows; a compute-only file with `scale_grads=False`.
"""

import faulthandler
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

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
STEP_SECONDS, ABANDONED_SECONDS = 30, 270
WIDTH, ROWS, PROCESSES = 8, 2, 4


@dataclass(frozen=True)
class Case:
    """One file to run: the CSV, the stages of each rank, and whether it has its sends and receives."""

    text: str
    stages: Sequence[Sequence[int]]
    micro_batches: int
    communicates: bool


def case(schedule: Schedule, communicates: bool) -> Case:
    return Case(torch_csv.dumps(schedule), schedule.placement, schedule.shape.micro_batches, communicates)


def right_cases() -> dict[str, Case]:
    """Every family, and schedules with any placement, split backwards and overlapped pairs."""
    cases = {}
    for family in FAMILIES:
        for ranks, m in ((4, 8), (2, 6)):
            cases[f"{family} {ranks} {m}"] = case(lower(FAMILIES[family](Shape(1, ranks, m, chunks_of(family)))), True)
    for name in ("v", "arbitrary", "overlapped", "split"):
        cases[name], cases[f"{name} lowered"] = case(VALID[name], False), case(lower(VALID[name]), True)
    return cases


def wrong_cases() -> dict[str, Case]:
    first, second, _, _ = DEFECTS["7 receives out of order"]
    swapped = torch_csv.loads(f"{first}\r\n{second}\r\n")
    assert [finding.rule for finding in check(swapped)] == ["fifo"]
    lowered = case(lower(FAMILIES["1f1b"](Shape(1, 2, 5))), True)
    without = Case(lowered.text.replace(",1REDUCE_GRAD", ""), lowered.stages, lowered.micro_batches, True)
    return {"swapped": case(swapped, True), "without a reduce": without}


def test_torch_computes_the_unpipelined_gradients_from_exported_schedules(tmp_path):
    processes = [warm_context().Process(target=_run, args=(rank, tmp_path), daemon=True) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    errors = {name: {key: e for part in results for key, e in part.get(name, {}).items()} for name in results[0]}
    for name, right in right_cases().items():
        assert len(errors[name]) == right.micro_batches + 6 * sum(map(len, right.stages)), errors[name]
        assert max(errors[name].values()) <= TOLERANCE, (name, errors[name])
    assert max(errors["swapped"].values()) > 0.1
    wrong = {key.split(".")[0]: round(e, 3) for key, e in errors["without a reduce"].items() if e > TOLERANCE}
    assert wrong == {"1": 4.0}  # five times the gradient is off by four times


def _run(rank: int, folder: Path):
    """Run all cases on this rank; write case -> relative error of each gradient (`stage.parameter`) and loss."""
    faulthandler.dump_traceback_later(ABANDONED_SECONDS, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    results = {}
    for number, (name, one_case) in enumerate((right_cases() | wrong_cases()).items()):
        if rank < len(one_case.stages):
            file = folder / f"{number}.{rank}.csv"
            file.write_bytes(one_case.text.encode())
            try:
                results[name] = _errors(rank, str(file), str(folder / f"{number}.store"), one_case)
            except Exception as error:
                results[name] = {f"rank {rank}: {type(error).__name__}: {error}": float("inf")}
    (folder / f"{rank}.json").write_text(json.dumps(results))


def _errors(rank: int, file: str, store: str, case: Case) -> dict[str, float]:
    """Run the file in new process groups and compare the results of this rank."""
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
    own_stages = [PipelineStage(parts[stage], stage, count, torch.device("cpu")) for stage in sorted(case.stages[rank])]
    runtime = schedules._PipelineScheduleRuntime(
        own_stages, case.micro_batches, loss_fn=_loss, scale_grads=case.communicates
    )  # fmt: skip
    runtime._load_csv(file, format="compute_comms" if case.communicates else "compute_only")
    losses = []
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
