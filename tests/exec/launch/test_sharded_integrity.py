"""Hosts of shards compare them, and replay work: what was wrong is taken back, to the bits of the calm run."""

from __future__ import annotations

from typing import Any

import pytest

from recycle import Job
from recycle.exec.launch.launcher import RunResult
from tests.exec import runs
from tests.exec.runs import Run, calm_run, figures, kinds, only
from tests.exec.sharded import sharded

STEPS = 10
GAPS = {"every": "gaps"}
ELASTIC = {"planner": {"layout": "elastic", "move_when": "always", "seconds": 0.2}, "model": {"layers": 6}}
TWO_PROCESSES = {"shape": {"tensor_parallel": 2}}


def compared(pipelines: int, copies: int, integrity: dict[str, Any], kind: str = "emulated", **sections: Any) -> Job:
    train = {"clip": 1e9, "checkpoint_every": 0} | sections.pop("train", {})
    sections = {"planner": {"seconds": 0.2}, "train": train} | sections
    return sharded(runs.job(pipelines, 2, 2, kind=kind, integrity=integrity, **sections), copies)


def assert_calm(run: RunResult, job: Job, launch: Run) -> None:
    """Losses, norms and the final shards have the bits of the run without faults, in which nobody is suspected."""
    calm = calm_run(job, launch, STEPS)
    assert "corrupt" not in kinds(calm)
    assert figures(run) == figures(calm)
    wanted = {number: text for shards in calm.digests.values() for number, text in shards.items()}
    found = [item for shards in run.digests.values() for item in shards.items()]
    assert {number for number, _ in found} == wanted.keys()
    assert set(found) <= wanted.items()


@pytest.mark.parametrize(
    ("copies", "integrity", "fault", "fenced"),
    [
        (2, {"digests": 3}, "flip=moment,40:1.1@4", False),
        (3, {"digests": 3}, "flip=moment,40:1.1@4", True),
        (2, {"digests": 2, "every": 5}, "flip=moment,40:1.1@4", False),
        (2, {"every": 1}, "flip=activation:1.1@4", True),
        pytest.param(3, {"digests": 3, "every": 2}, "flip=kernel:1.1@4", True, marks=pytest.mark.soak),
        pytest.param(2, {"every": 1}, "flip=gradient:1.1@4", False, marks=pytest.mark.soak),
        pytest.param(3, {"every": 1}, "flip=gradient:1.1@4", True, marks=pytest.mark.soak),
    ],
)
def test_what_is_wrong_in_a_shard_or_in_its_holders_work_is_taken_back(
    copies: int, integrity: dict[str, Any], fault: str, fenced: bool, launch: Run
) -> None:
    """Of two holders of a shard nobody can say who is wrong; of three the odd one is fenced."""
    job = compared(3, copies, integrity)
    run = launch(job, STEPS, fault)
    assert_calm(run, job, launch)
    corrupt = only(run, "corrupt")
    assert corrupt["workers"] == (["1.1"] if fenced else [])
    assert ("detected" in kinds(run)) == fenced
    if "moment" in fault:
        assert {(bit["stage"], bit["tensor"]) for bit in corrupt["bits"]} <= {(1, "layers.3.count")}


@pytest.mark.parametrize(
    ("kind", "integrity", "sections", "fault"),
    [
        ("gpt", {"digests": 3}, {"train": {"precision": "bf16"}}, "flip=moment,20:1.1@4"),
        pytest.param("gpt", {"digests": 3}, {}, "flip=moment,20:1.1@4", marks=pytest.mark.soak),
        pytest.param("gpt", {"every": 3}, {}, "flip=kernel,22:1.1@4", marks=pytest.mark.soak),
        pytest.param("gpt", {"digests": 2, "every": 3}, TWO_PROCESSES, "flip=kernel,22:1.1@4", marks=pytest.mark.soak),
        pytest.param("gpt", {"digests": 2}, TWO_PROCESSES, "flip=moment,20:1.1@5", marks=pytest.mark.soak),
        pytest.param("emulated", {"digests": 1, "every": 4}, ELASTIC, "flip=moment,40:1.1@5", marks=pytest.mark.soak),
    ],
)
def test_models_and_layers_that_move_come_to_the_same_bits(
    kind: str, integrity: dict[str, Any], sections: dict[str, Any], fault: str, launch: Run
) -> None:
    job = compared(3, 2, integrity, kind, **sections)
    run = launch(job, STEPS, "kill:0.0@1", "rejoin:0.0@3", fault)
    assert_calm(run, job, launch)
    assert "corrupt" in kinds(run)


def test_where_nothing_is_replayed_states_are_compared_all_the_same(launch: Run) -> None:
    job = compared(3, 2, GAPS, train={"checkpoint_every": 2})
    run = launch(job, STEPS, "flip=moment,40:1.1@4")
    assert_calm(run, job, launch)
    assert "states are compared every 2 iterations" in only(run, "warning")["message"]
    assert only(run, "corrupt")["workers"] == []
    assert only(run, "undone")["step"] >= 2


def test_live_parameters_are_compared_between_all_hosts_of_a_stage(launch: Run) -> None:
    """What is struck lies in a shard that others hold, whose gather has not come yet."""
    job = compared(4, 2, {"digests": 2})
    run = launch(job, STEPS, "flip=weight:1.1@0")
    assert_calm(run, job, launch)
    assert only(run, "corrupt")["workers"] == ["1.1"]
    assert only(run, "detected")["worker"] == "1.1"


@pytest.mark.parametrize(
    "integrity", [{"digests": 1}, pytest.param({"digests": 1, "every": 3}, marks=pytest.mark.soak)]
)
def test_nobody_is_suspected_where_workers_die_and_come_back(integrity: dict[str, Any], launch: Run) -> None:
    job = compared(3, 2, integrity)
    faults = ("kill:1.1@1", "nan:0.0@3", "rejoin:1.1@4", "kill:0.0@6.step", "kill:2.1@7.reduce", "rejoin:0.0@8")
    run = launch(job, STEPS, *faults)
    assert_calm(run, job, launch)
    assert "corrupt" not in kinds(run)


@pytest.mark.parametrize(
    ("integrity", "faults", "back"),
    [
        # Only first iterations of generations compare. All go back to where the joiner had its copies.
        ({"digests": 100}, ("kill:0.1@2", "rejoin:0.1@5", "flip=moment,40:1.1@6", "kill:2.0@8", "rejoin:2.0@9"), 5),
        # The joiner was not there when the state was kept, and copies its shards from the holders that have kept them.
        ({"digests": 1, "every": 6}, ("kill:0.1@2", "rejoin:0.1@3", "flip=moment,40:1.1@5"), 0),
        # A holder of the kept state is dead: its copies are made anew from the other holder's.
        ({"digests": 2, "every": 6}, ("kill:0.1@3", "flip=moment,40:1.1@5"), 0),
    ],
)
def test_shards_are_gone_back_to_with_whoever_has_kept_them(
    integrity: dict[str, Any], faults: tuple[str, ...], back: int, launch: Run
) -> None:
    job = compared(3, 2, integrity)
    run = launch(job, STEPS, *faults)
    assert_calm(run, job, launch)
    assert only(run, "corrupt")["workers"] == []
    assert [event["step"] for event in run.events if event["kind"] == "undone"][-1] == back
    assert "restored" not in kinds(run)


def test_where_all_that_kept_a_shard_are_dead_a_checkpoint_is_gone_back_to(launch: Run) -> None:
    """0.1 and 1.1 hold shard 0 in the state that counts; others have copied it since, and it is wrong by now."""
    job = compared(4, 2, {"digests": 2, "every": 2}, train={"checkpoint_every": 2})
    run = launch(job, STEPS, "kill:0.1@4", "kill:1.1@6", "flip=moment,40:2.1@6")
    assert figures(run) == figures(calm_run(job, launch, STEPS))
    assert only(run, "corrupt")["step"] == 6
    assert only(run, "restored")["step"] in (2, 4)


def test_with_one_copy_only_parameters_have_something_to_be_compared_with(launch: Run) -> None:
    """A worker that is stuck is known, and cannot go, as its shards would be lost: new processes begin again."""
    job = compared(3, 1, {"every": 2}, train={"checkpoint_every": 2})
    run = launch(job, STEPS, "flip=kernel:1.1@5")
    assert figures(run) == figures(calm_run(job, launch, STEPS))
    warnings = [event["message"] for event in run.events if event["kind"] == "warning"]
    assert sum("only parameters are compared" in text for text in warnings) == 1
    assert {tuple(event["workers"]) for event in run.events if event["kind"] == "corrupt"} == {("1.1",)}
    assert "restored" in kinds(run)
