"""Runs of every family: killed, brought back, stopped, cut into tensor ranks, to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recycle import Job
from recycle.exec import run
from recycle.exec.launch.launcher import RunResult
from recycle.ir.families import one_f_one_b
from tests.exec.drive import build_pipeline, gradients_by_name, run_pipelines
from tests.exec.model.test_families import MODELS, family_job
from tests.exec.runs import Run, assert_same_training, job, kinds
from tests.exec.tensor_workers import TensorWorkers, in_halves, whole_gradients

pytestmark = pytest.mark.process

STEPS = 7
FAMILIES: dict[str, dict[str, Any]] = {"gpt": {"kind": "gpt", "config": {}}, **MODELS}
STRUCK_IN = ("forward", "backward", "reduce", "commit", "step", "stepped", "evaluation", "acknowledge", "form")
TOLERANCE = 3e-7
"""Of gradients against those without tensor parallelism, whose sums have another order."""


def run_job(model: dict[str, Any], tensor_parallel: int = 1, shared: str = "") -> Job:
    """A job whose tensor ranks share sequences or experts, if `shared` is "sequence" or "expert"."""
    small = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "ffn": 48}
    keys = {key: value for key, value in (small | model).items() if key != "config"}
    of = job(
        2,
        2,
        2,
        kind=model["kind"],
        shape={"tensor_parallel": tensor_parallel} | ({f"{shared}_parallel": True} if shared else {}),
        model=keys,
        train={"clip": 1e9},
        eval={"every": 3, "batches": 1},
    )
    return msgspec.structs.replace(of, model=msgspec.structs.replace(of.model, config=model["config"]))


def cases(quick: dict[str, str]) -> list[Any]:
    """Every family struck in every phase; `quick` has the phase that is on every change, if one is; the others are
    soaks."""
    return [
        pytest.param(name, phase, marks=() if quick[name] == phase else pytest.mark.soak)
        for name in quick
        for phase in STRUCK_IN
    ]


def struck_by(phase: str, killed: str) -> list[str]:
    """A death, a return, and a worker that stops in this phase: a generation begins with step 3, and an evaluation
    follows step 5."""
    step = {"evaluation": 5, "acknowledge": 3, "form": 3}.get(phase, 4)
    return [f"kill:{killed}@1", "rejoin:1.1@3", f"stop:0.0@{step}.{phase}"]


def assert_same(struck: RunResult, calm: RunResult) -> None:
    assert kinds(struck).count("detected") == 2
    assert kinds(struck).count("rejoined") == 1
    assert sorted(calm.evaluations) == [2, 5, 6]
    assert_same_training(struck, calm)


@pytest.mark.parametrize(
    ("name", "phase"),
    cases({"gpt": "", "llama 3.1": "backward", "qwen 3": "", "mixtral": "step", "qwen 3 moe": "reduce"}),
)
def test_a_killed_rejoined_and_stopped_run_has_the_bits_of_the_calm_one(launch: Run, name: str, phase: str) -> None:
    of = run_job(FAMILIES[name])
    struck = launch(of, STEPS, *struck_by(phase, "1.1"))
    assert_same(struck, run(one_f_one_b(of.shape), of, steps=STEPS))


@pytest.fixture(scope="module")
def calm_runs() -> dict[str, RunResult]:
    return {}


@pytest.mark.parametrize(
    ("name", "phase"),
    cases({"gpt": "", "llama": "", "qwen 3": "", "mixtral": "", "mixtral, experts shared": ""}),
)
def test_with_two_tensor_ranks_too(launch: Run, calm_runs: dict[str, RunResult], name: str, phase: str) -> None:
    family, _, is_shared = name.partition(", ")
    of = run_job(FAMILIES[family], 2, "expert" if is_shared else "")
    if name not in calm_runs:
        calm_runs[name] = launch(of, STEPS)
    assert_same(launch(of, STEPS, *struck_by(phase, "1.1t1")), calm_runs[name])


@pytest.fixture(scope="module")
def pair() -> Iterator[TensorWorkers]:
    with TensorWorkers(2) as workers:
        yield workers


@pytest.mark.parametrize(
    ("name", "keys", "shared"),
    [
        ("llama", {}, ""),
        ("qwen 3", {}, ""),
        ("mixtral", {}, ""),
        ("mixtral", {}, "expert"),
        ("mixtral", {"recompute": "layers"}, "expert"),
        ("gpt", {"tied": True}, "sequence"),
        ("llama", {}, "sequence"),
        ("qwen 3", {}, "sequence"),
        ("qwen 2", {"recompute": "full"}, "sequence"),
        ("llama", {"recompute": "layers"}, "sequence"),
    ],
)
def test_two_tensor_ranks_have_the_gradients_of_one_and_the_same_bits_split_up(
    pair: TensorWorkers, name: str, keys: dict[str, Any], shared: str
) -> None:
    of = family_job(FAMILIES[name] | keys)
    stages = build_pipeline(of)
    loss = run_pipelines([stages], 0, of.shape.micro_batches)
    gradients = in_halves(gradients_by_name(stages), stages)
    sharing = {f"{shared}_parallel": True} if shared else {}
    parted = msgspec.structs.replace(of, grid=msgspec.structs.replace(of.grid, tensor_parallel=2, **sharing))
    parts = pair.iterate(parted)
    assert parts[0].report.loss == parts[1].report.loss == pytest.approx(loss, rel=1e-6)
    whole = whole_gradients(parts)
    assert {key: tuple(g.shape) for key, g in whole.items()} == {key: tuple(g.shape) for key, g in gradients.items()}
    assert max(float((whole[key] - gradients[key]).abs().max()) for key in gradients) < TOLERANCE
    apart = pair.iterate(parted, weights_last=True)
    assert [part.digests for part in parts] == [part.digests for part in apart]
    assert [part.report.norms for part in parts] == [part.report.norms for part in apart]


def test_a_run_whose_experts_are_shared_goes_on_without_and_back(launch: Run, tmp_path: Path) -> None:
    """Checkpoints are the same however experts were dealt out, moments and step counts included."""
    model, directory = FAMILIES["mixtral"], tmp_path / "run"
    for steps, of in ((2, run_job(model, 2, "expert")), (4, run_job(model)), (5, run_job(model, 2, "expert"))):
        keeping = msgspec.structs.replace(of.train, checkpoint_every=1)
        result = launch(msgspec.structs.replace(of, train=keeping), steps, directory=directory, resume=steps > 2)
    calm = run(one_f_one_b(of.shape), run_job(model), steps=5)
    for key, tolerance in (("loss", 1e-6), ("grad_norm", 1e-5)):
        assert [line[key] for line in result.metrics] == pytest.approx([line[key] for line in calm.metrics], tolerance)
