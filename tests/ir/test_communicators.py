"""Lanes that share communicators: number of communicators, order and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from recycle.ir.check import check
from recycle.ir.columns import columns_of
from recycle.ir.communicators import LANES, Lane, lanes_of, share_communicators
from recycle.ir.event_graph import event_graph
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import RecvGradient, SendActivation
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from tests.exec.sharing import shared_plan


def lanes_after(pipelines: int, ranks: int, dead: Collection[Worker]) -> set[Lane]:
    """Both directions between neighbours, and between the neighbours of the dead and all of their peers."""
    peers = [[Worker(k, rank) for k in range(pipelines) if Worker(k, rank) not in dead] for rank in range(ranks)]
    lanes = set[Lane]()
    for rank, following in pairwise(range(ranks)):
        for k in range(pipelines):
            ends = [[Worker(k, each)] if Worker(k, each) not in dead else peers[each] for each in (rank, following)]
            lanes |= {(a, b) for a in ends[0] for b in ends[1]} | {(b, a) for a in ends[0] for b in ends[1]}
    return lanes


@pytest.mark.parametrize(
    ("pipelines", "ranks", "deaths"), [(8, 8, 0), (8, 8, 1), (16, 16, 1), (24, 64, 1), (24, 64, 12), (8, 4, 9)]
)
def test_no_worker_has_more_communicators_than_allowed(pipelines: int, ranks: int, deaths: int) -> None:
    every = [Worker(k, rank) for k in range(pipelines - 1) for rank in range(ranks)]
    lanes = lanes_after(pipelines, ranks, Random(deaths).sample(every, deaths))
    shared = share_communicators(lanes)
    assert sorted(lane for of_lanes in shared for lane in of_lanes) == sorted(lanes)
    own = Counter(worker for of_lanes in shared for worker in {end for lane in of_lanes for end in lane})
    assert max(own.values()) <= LANES
    assert share_communicators(sorted(lanes, reverse=True)) == shared
    most = max(Counter(worker for lane in lanes for worker in lane).values())
    assert (max(map(len, shared)) > 1) == (most > LANES)
    if deaths <= 1:  # lanes within a pipeline keep theirs
        assert all(a.pipeline != b.pipeline for of_lanes in shared if len(of_lanes) > 1 for a, b in of_lanes)


def test_check_and_simulator_know_the_order_of_shared_transfers() -> None:
    plan, profile = shared_plan(), Profile(latency=0.3)
    assert max(map(len, share_communicators(lanes_of(plan)))) > 1
    assert event_graph(plan, shared=True).is_acyclic
    lanes, shared, serial = (
        simulate(plan, profile, **options) for options in ({}, {"shared": True}, {"serialised": True})
    )
    assert lanes.makespan <= shared.makespan < serial.makespan
    assert shared.period >= lanes.period
    healthy = lower(one_f_one_b(Shape(2, 4, 8)))
    assert simulate(healthy, profile, shared=True).makespan == simulate(healthy, profile).makespan


def test_transfers_that_deadlock_on_a_shared_communicator_must_not_run() -> None:
    plan = shared_plan()
    assert not check(plan, about_to_run=True)
    broken = next(each for each in with_swapped_transfers(plan) if not event_graph(each, shared=True).is_acyclic)
    assert event_graph(broken).is_acyclic
    assert {finding.rule for finding in check(broken)} == {"serialised-transport"}
    assert "shared-communicators" in {finding.rule for finding in check(broken, about_to_run=True)}


def with_swapped_transfers(plan: Schedule) -> Iterator[Schedule]:
    """The plan with one send and the receive next to it in the other order."""
    programs = {worker: list(plan.program(worker)) for worker in plan.live}
    for worker, program in programs.items():
        for place, (first, second) in enumerate(pairwise(program)):
            if {type(first), type(second)} == {SendActivation, RecvGradient}:
                swapped = [*program[:place], second, first, *program[place + 2 :]]
                yield replace(plan, columns=columns_of(plan.shape, {**programs, worker: swapped}))
