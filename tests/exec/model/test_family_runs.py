"""Runs of every family: killed, brought back, stopped, cut into tensor ranks, to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from recycle import Job
from recycle.exec import run
from recycle.ir.families import one_f_one_b
from tests.exec.drive import build_pipeline, gradients_by_name, run_pipelines
from tests.exec.model.test_families import MODELS, family_job
from tests.exec.runs import Run, job, kinds
from tests.exec.tensor_workers import TensorWorkers, in_halves, whole_gradients

pytestmark = pytest.mark.process

STEPS = 9
RUNS = {name: MODELS[name] for name in ("llama 3.1", "qwen 3", "mixtral")}
FAULTS = ("kill:1.1@2", "rejoin:1.1@4", "stop:0.0@6.{phase}")
TOLERANCE = 3e-7
"""Of gradients against those without tensor parallelism, whose sums have another order."""


def run_job(model: dict[str, Any]) -> Job:
    small = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "ffn": 48}
    keys = {key: value for key, value in (small | model).items() if key != "config"}
    of = job(2, 2, 2, kind=model["kind"], model=keys, train={"clip": 1e9})
    return msgspec.structs.replace(of, model=msgspec.structs.replace(of.model, config=model["config"]))


@pytest.mark.parametrize(("name", "phase"), list(zip(RUNS, ("backward", "reduce", "step"), strict=True)))
def test_a_killed_rejoined_and_stopped_run_has_the_bits_of_the_calm_one(launch: Run, name: str, phase: str) -> None:
    of = run_job(RUNS[name])
    struck = launch(of, STEPS, *(fault.format(phase=phase) for fault in FAULTS))
    assert kinds(struck).count("fault") == 2
    assert kinds(struck).count("rejoined") == 1
    calm = run(one_f_one_b(of.shape), of, steps=STEPS)
    assert struck.losses == calm.losses
    for worker, digests in struck.digests.items():
        assert digests == calm.digests[worker]


@pytest.fixture(scope="module")
def pair() -> Iterator[TensorWorkers]:
    with TensorWorkers(2) as workers:
        yield workers


@pytest.mark.parametrize("name", ["llama", "qwen 3", "mixtral"])
def test_two_tensor_ranks_have_the_gradients_of_one_and_the_same_bits_split_up(pair: TensorWorkers, name: str) -> None:
    of = family_job(MODELS[name])
    stages = build_pipeline(of)
    loss = run_pipelines([stages], 0, of.shape.micro_batches)
    gradients = in_halves(gradients_by_name(stages), stages)
    parted = msgspec.structs.replace(of, grid=msgspec.structs.replace(of.grid, tensor_parallel=2))
    parts = pair.iterate(parted)
    assert parts[0].report.loss == parts[1].report.loss == pytest.approx(loss, rel=1e-6)
    whole = whole_gradients(parts)
    assert {key: tuple(g.shape) for key, g in whole.items()} == {key: tuple(g.shape) for key, g in gradients.items()}
    assert max(float((whole[key] - gradients[key]).abs().max()) for key in gradients) < TOLERANCE
    apart = pair.iterate(parted, weights_last=True)
    assert [part.digests for part in parts] == [part.digests for part in apart]
    assert [part.report.norms for part in parts] == [part.report.norms for part in apart]
