"""Hosts that replay each other's work: who computes wrong is found and fenced, and the bits are the calm run's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from recycle.exec.launch.launcher import RunResult
from recycle.ir.families import one_f_one_b
from recycle.job import PricedJob
from recycle.job.sections import ShapeSection
from tests.exec.runs import Run, calm_run, figures, job, kinds, only

STEPS = 9


def replayed(
    pipelines: int, kind: str = "emulated", every: int | str = 1, digests: int = 0, **sections: Any
) -> PricedJob:
    train = {"clip": 1e9, "checkpoint_every": 0} | sections.pop("train", {})
    integrity = {"every": every, "digests": digests}
    return job(pipelines, 2, 2, kind=kind, integrity=integrity, train=train, planner={"seconds": 0.2}, **sections)


def two_processes(pipelines: int, ranks: int) -> ShapeSection:
    """The shape of workers of two processes each."""
    return ShapeSection(pipelines=pipelines, ranks=ranks, micro_batches=2, tensor_parallel=2)


def calm_of(of: PricedJob, launch: Run) -> RunResult:
    """A run without faults that replays in every iteration, to whose bits all others come."""
    integrity = msgspec.structs.replace(of.integrity, every=1, digests=0)
    train = msgspec.structs.replace(of.train, checkpoint_every=0)
    return calm_run(of.with_sections(integrity=integrity, train=train), launch, STEPS)


def assert_calm(run: RunResult, calm: RunResult) -> None:
    """Losses of all iterations, and final states of all who are there, have the calm run's bits."""
    assert figures(run) == figures(calm)
    assert all(run.digests[worker] == calm.digests[worker] for worker in run.digests)


@pytest.mark.parametrize(
    ("pipelines", "kind", "fault", "tensor"),
    [
        (3, "emulated", "flip=activation:1.0@4", "activation"),
        (2, "emulated", "flip=input:1.1@4", "activation"),
        (3, "gpt", "flip=activation,22:1.1@4", "activation"),
        pytest.param(2, "gpt", "flip=input:0.0@4", "activation", marks=pytest.mark.soak),
        pytest.param(2, "llama", "flip=activation:1.0@4", "activation", marks=pytest.mark.soak),
        pytest.param(3, "gpt", "flip=input,12:2.1@4", "activation", marks=pytest.mark.soak),
    ],
)
def test_who_made_something_else_once_is_fenced_before_it_is_committed(
    pipelines: int, kind: str, fault: str, tensor: str, launch: Run
) -> None:
    """The iteration is repeated; now all agree, and the struck one differs from that in what it had reported."""
    of, worker = replayed(pipelines, kind), fault.split(":")[1].split("@")[0]
    run, calm = launch(of, STEPS, fault), calm_of(of, launch)
    assert_calm(run, calm)
    corrupt = only(run, "corrupt")
    assert (corrupt["step"], corrupt["workers"]) == (4, [worker])
    assert {part["worker"] for part in corrupt["bits"]} == {worker}
    assert corrupt["bits"][0]["tensor"] == tensor
    assert corrupt["bits"][0]["stage"] == int(worker[-1])
    assert only(run, "detected")["worker"] == worker
    assert worker not in run.digests
    assert kinds(calm) == ["generation"]


@pytest.mark.parametrize(
    ("kind", "every"), [("emulated", 3), pytest.param("gpt", 3, marks=pytest.mark.soak), ("emulated", 2)]
)
def test_a_stuck_unit_is_found_within_the_interval_and_what_it_spoilt_is_taken_back(
    kind: str, every: int, launch: Run
) -> None:
    """Two of three hosts agree; training goes back to the state before the last round in which nothing differed."""
    of = replayed(3, kind, every)
    run = launch(of, STEPS, "flip=kernel:1.1@4")
    assert_calm(run, calm_of(of, launch))
    corrupt = only(run, "corrupt")
    assert corrupt["workers"] == ["1.1"]
    assert 4 <= corrupt["step"] < 4 + every
    causes = [event["cause"] for event in run.events if event["kind"] == "undone"]
    assert "it is seen who is wrong when they do it again" in causes[0]
    assert "all are back behind step" in causes[-1]
    assert [line["live_workers"] for line in run.metrics][-1] == 5


def test_of_two_hosts_a_stuck_unit_is_nobodys_until_new_processes_go_on_from_a_checkpoint(launch: Run) -> None:
    of = replayed(2, every=2, train={"checkpoint_every": 2})
    run = launch(of, STEPS, "flip=kernel:1.1@5")
    assert figures(run) == figures(calm_of(of, launch))
    corrupt = [event for event in run.events if event["kind"] == "corrupt"]
    assert [event["workers"] for event in corrupt] == [[], []]
    assert only(run, "restored")["step"] == 2
    assert "detected" not in kinds(run)


@pytest.mark.soak
def test_a_flip_in_a_worker_of_two_processes_is_found_though_it_spreads_to_the_tensor_ranks_of_all(launch: Run) -> None:
    """What one tensor rank makes wrong, the sums of that rank have on all hosts; the replays say where it came from."""
    of, steps = replayed(3, "gpt", model={"layers": 2}).with_sections(grid=two_processes(3, 1)), 6
    run, calm = launch(of, steps, "flip=activation:1.0@2", "rejoin:1.0@4"), calm_run(of, launch, steps)
    assert_calm(run, calm)
    assert only(run, "corrupt")["workers"] == ["1.0"]
    assert {part["worker"] for part in only(run, "corrupt")["bits"]} <= {"1.0", "1.0t1"}
    assert only(run, "detected")["worker"] == "1.0"
    assert kinds(calm) == ["generation"]


@pytest.mark.soak
@pytest.mark.parametrize(("fault", "every"), [("activation", 1), ("input", 1), ("kernel", 3), ("weight", 3)])
def test_who_computes_wrong_in_two_processes_is_fenced(fault: str, every: int, launch: Run) -> None:
    of = replayed(3, "gpt", every).with_sections(grid=two_processes(3, 2))
    run, calm = launch(of, STEPS, f"flip={fault}:1.1@4"), calm_run(of, launch, STEPS)
    assert_calm(run, calm)
    assert only(run, "detected")["worker"] == "1.1"


def test_a_plan_without_room_for_replays_is_told_of_and_states_are_compared(launch: Run) -> None:
    of = replayed(3, every="gaps", train={"checkpoint_every": 2})
    run = launch(of, STEPS, "flip=weight,40:1.1@4")
    assert_calm(run, calm_of(of, launch))
    warnings = [event["message"] for event in run.events if event["kind"] == "warning"]
    assert warnings
    assert all("states are compared every 2 iterations" in text for text in warnings)
    assert only(run, "corrupt")["workers"] == ["1.1"]


def test_states_are_compared_more_often_than_all_is_replayed(launch: Run) -> None:
    """The flip at step 7 shows where step 8 begins; all go back to the state since which everything was replayed."""
    of = replayed(3, every=4, digests=2)
    run = launch(of, STEPS, "flip=weight,40:1.1@7")
    assert_calm(run, calm_of(of, launch))
    assert (only(run, "corrupt")["workers"], only(run, "corrupt")["step"]) == (["1.1"], 8)
    assert only(run, "undone")["step"] == 4


def test_a_stuck_unit_is_found_in_the_gaps_of_a_schedule(launch: Run) -> None:
    of = replayed(3, every="gaps")
    own = one_f_one_b(of.shape)
    run = launch(of, STEPS, "flip=kernel:1.1@4", schedule=own)
    assert_calm(run, calm_of(of, launch))
    assert only(run, "corrupt")["workers"] == ["1.1"]


def test_nobody_is_suspected_where_workers_die_and_come_back(launch: Run) -> None:
    of = replayed(3, every=2)
    faults = ("kill:1.1@1", "nan:0.0@3", "rejoin:1.1@4", "kill:0.0@5.step", "kill:2.1@6.reduce", "rejoin:0.0@7")
    run = launch(of, STEPS, *faults)
    assert_calm(run, calm_of(of, launch))
    assert "corrupt" not in kinds(run)


def test_a_wrong_weight_is_found_by_states_or_by_what_is_made_of_it(launch: Run) -> None:
    of = replayed(3, "gpt", every=2)
    run = launch(of, STEPS, "flip=weight,20:1.0@5")
    assert_calm(run, calm_of(of, launch))
    assert only(run, "corrupt")["workers"] == ["1.0"]
