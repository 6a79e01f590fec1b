"""Hosts that compare their states: who is wrong is found and fenced, and training ends with the calm run's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recycle import Job, RunError
from recycle.exec.checkpoint.checkpoint import folder_of, verify
from tests.exec.runs import Run, calm_run, figures, job, kinds, only

STEPS = 10
EVERY = 3


def compared(pipelines: int, kind: str = "emulated", every: int = EVERY, **sections: Any) -> Job:
    train = {"clip": 1e9, "checkpoint_every": 0} | sections.pop("train", {})
    return job(
        pipelines, 2, 2, kind=kind, integrity={"digests": every}, train=train, planner={"seconds": 0.2}, **sections
    )


@pytest.mark.parametrize(
    ("kind", "fault", "tensor", "bit"),
    [
        ("emulated", "flip=weight,40:1.1@4", "layers.3.parameters", 40),
        pytest.param("emulated", "flip=moment,0:1.1@4", "layers.3.count", 0, marks=pytest.mark.soak),
        pytest.param("gpt", "flip=weight,20:1.0@4", "decoder.layers.1", 20, marks=pytest.mark.soak),
        pytest.param("gpt", "flip=moment,3:1.1@4", "exp_avg.", None, marks=pytest.mark.soak),
        pytest.param("llama", "flip=weight,22:1.1@4", "", 22, marks=pytest.mark.soak),
    ],
)
def test_of_three_hosts_the_one_whose_state_is_wrong_is_fenced_and_all_go_back_to_where_they_agreed(
    kind: str, fault: str, tensor: str, bit: int | None, launch: Run
) -> None:
    """The flip at step 4 is in what iteration 6 begins with, whose commit compares that; iteration 3 did before. A
    moment has been through two steps by then, and one bit does not explain what has become of it."""
    of = compared(3, kind)
    worker = fault.split(":")[1].split("@")[0]
    run, calm = launch(of, STEPS, fault, f"rejoin:{worker}@8"), calm_run(of, launch, STEPS)
    assert figures(run) == figures(calm)
    assert run.digests == calm.digests
    corrupt = only(run, "corrupt")
    assert (corrupt["step"], corrupt["workers"]) == (6, [worker])
    assert corrupt.get("bits") or bit is None
    for found in corrupt["bits"] if bit is not None else ():
        assert (found["worker"], found["bit"]) == (worker, bit)
        assert tensor in found["tensor"]
    assert only(run, "detected")["worker"] == worker
    assert only(run, "undone")["step"] == 3
    assert [line["live_workers"] for line in run.metrics] == [6] * 3 + [5] * 5 + [6] * 2
    assert kinds(calm) == ["generation"]


def test_two_hosts_that_differ_both_go_back_and_nobody_is_fenced(launch: Run) -> None:
    of = compared(2, every=2)
    run, calm = launch(of, STEPS, "flip=weight:1.1@5"), calm_run(of, launch, STEPS)
    assert (figures(run), run.digests) == (figures(calm), calm.digests)
    assert kinds(run) == ["generation", "fault", "corrupt", "generation", "undone"]
    assert only(run, "corrupt")["what"] == "workers 0.1 and 1.1 hold different states of stage 1"
    assert only(run, "undone")["step"] == 4


@pytest.mark.soak
def test_a_weight_that_makes_all_gradients_infinite_is_found_when_the_iteration_is_repeated(launch: Run) -> None:
    of = compared(3, "gpt")
    run, calm = launch(of, STEPS, "flip=weight,30:1.0@4"), calm_run(of, launch, STEPS)
    assert figures(run) == figures(calm)
    assert all(run.digests[worker] == calm.digests[worker] for worker in run.digests)
    assert "1.0" not in run.digests
    assert next(event["cause"] for event in run.events if event["kind"] == "undone") == "a gradient is not finite"
    corrupt = only(run, "corrupt")
    assert (corrupt["step"], corrupt["workers"], corrupt["bits"][0]["bit"]) == (4, ["1.0"], 30)


def test_a_worker_that_joined_since_they_agreed_copies_the_state_that_the_others_go_back_to(launch: Run) -> None:
    """It joins at step 6; with 100 iterations between, only first iterations of generations compare: 0, 3 and 6. What
    is flipped at 6 shows when the death at 8 begins another generation."""
    of = compared(3, every=100)
    faults = ("kill:0.1@2", "rejoin:0.1@5", "flip=weight:1.1@6", "kill:2.0@8", "rejoin:2.0@9")
    run, calm = launch(of, STEPS, *faults), calm_run(of, launch, STEPS)
    assert figures(run) == figures(calm)
    assert all(run.digests[worker] == calm.digests[worker] for worker in run.digests)
    assert set(calm.digests) - set(run.digests) == {"1.1"}
    assert only(run, "corrupt")["workers"] == ["1.1"]


def test_kept_checkpoints_that_may_be_wrong_are_removed_and_written_anew(launch: Run, tmp_path: Path) -> None:
    """That after step 5 is written with what the flip has made of the others' gradients; iteration 6 finds it."""
    of = compared(3, train={"checkpoint_every": 6}, every=6)
    run, calm = (
        launch(of, STEPS, "flip=activation:0.0@1", "flip=weight:1.1@4", directory=tmp_path),
        calm_run(of, launch, STEPS),
    )
    assert figures(run)[0] == figures(calm)[0]
    assert only(run, "corrupt")["step"] == 6
    assert only(run, "undone")["step"] == 0
    assert figures(run) == figures(calm)
    assert verify(folder_of(tmp_path / "checkpoints", 9)).manifest.commit.loss == run.losses[9]


def test_states_that_differ_in_the_end_are_taken_back_and_the_run_says_so(launch: Run, tmp_path: Path) -> None:
    of = compared(3, train={"checkpoint_every": 3})
    says = "workers 0.1 and 1.1 and 2.1 end with different states of stage 1; what came after step 8"
    with pytest.raises(RunError, match=says):
        launch(of, STEPS + 1, "flip=weight:1.1@10", directory=tmp_path)
    run = launch(of, STEPS + 1, resume=True, directory=tmp_path)
    assert figures(run)[:STEPS] == figures(calm_run(compared(3, train={"checkpoint_every": 3}), launch, STEPS))
    assert len({tuple(sorted(stages.items())) for worker, stages in run.digests.items() if worker.endswith(".1")}) == 1


@pytest.mark.parametrize("kind", ["emulated", pytest.param("bf16", marks=pytest.mark.soak)])
def test_nobody_is_suspected_where_workers_die_and_come_back(kind: str, launch: Run) -> None:
    train = {"precision": "bf16"} if kind == "bf16" else {}
    of = compared(3, "gpt" if kind == "bf16" else kind, every=1, train=train)
    faults = ("kill:1.1@1", "nan:0.0@3", "rejoin:1.1@4", "kill:0.0@6.step", "kill:2.1@7.reduce", "rejoin:0.0@8")
    run, calm = launch(of, STEPS, *faults), calm_run(of, launch, STEPS)
    assert figures(run) == figures(calm)
    assert all(run.digests[worker] == calm.digests[worker] for worker in run.digests)
    assert "corrupt" not in kinds(run)
