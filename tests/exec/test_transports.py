"""Transports between processes: what is sent arrives, sums are right, and nobody waits for the dead.

Each test runs on gloo's own transport and on the one that NCCL uses, a communicator per lane, over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recycle.exec.lanes import lanes_of
from recycle.ir.families import interleaved, one_f_one_b, zb_h1
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.plans import Plan
from recycle.shape import Shape, Worker
from recycle.solve.planner import plan_for_training
from tests.exec.transport_workers import TransportWorkers

pytestmark = pytest.mark.xdist_group("transports")


@pytest.fixture(scope="module")
def workers() -> Iterator[TransportWorkers]:
    with TransportWorkers(5) as started:
        yield started


def adaptive() -> Schedule:
    """3 x 2 workers, 1.1 dead: lanes that cross pipelines."""
    job = Job.from_toml(
        "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 3\n[memory]\nlimit = 4\n[planner]\nsteps = 1"
    )
    vector = (0, 1)
    plan = Plan.from_text(plan_for_training(job, vector, True), "plan")
    return plan.for_processes(frozenset([Worker(1, 1)])).schedule


SCHEDULES = {
    "1f1b": lambda: one_f_one_b(Shape(2, 2, 3)),
    "zb-h1": lambda: zb_h1(Shape(1, 4, 6)),
    "interleaved": lambda: interleaved(Shape(1, 2, 4, 2)),
    "adaptive": adaptive,
}


@pytest.mark.parametrize("kind", ["gloo", "lanes"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_message_and_sum_is_the_right_one_in_every_iteration(
    kind: str, name: str, workers: TransportWorkers
) -> None:
    schedule = SCHEDULES[name]()
    assert workers.run(kind, schedule, "") == ["done"] * len(schedule.live)


@pytest.mark.parametrize("kind", ["gloo", "lanes"])
@pytest.mark.parametrize("when", ["before a send", "before a sum"])
@pytest.mark.parametrize("victim", [0, 4])
def test_nobody_waits_for_a_dead_peer_once_the_generation_is_over(
    kind: str, when: str, victim: int, workers: TransportWorkers
) -> None:
    answers = workers.run(kind, adaptive(), when, victim=victim)
    assert answers.pop(victim) == ""
    assert all(answer.startswith("TransportError: ") for answer in answers), answers


def test_both_ends_of_a_lane_know_it_and_nobody_else() -> None:
    schedule = lower(adaptive())
    joins = [(Worker(0, 1), Worker(2, 1))]
    lanes = {role: lanes_of(role, schedule.program(role), joins) for role in schedule.live}
    assert (Worker(0, 1), Worker(2, 1)) in lanes[Worker(0, 1)]
    for role, found in lanes.items():
        assert found == sorted(set(found))
        for sender, receiver in found:
            assert role in (sender, receiver)
            assert (sender, receiver) in lanes[sender]
            assert (sender, receiver) in lanes[receiver]
