"""What the workers hold, what is lost, and what is copied from whom before a plan can run."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Worker
from recycle.exec.leader.holdings import Holdings
from recycle.exec.protocol import Copy
from recycle.plans.hosting import Hosts, UnitRange
from tests.exec.runs import job

JOB = job(3, 2, 2, model={"layers": 8})
EVERYBODY = set(JOB.shape.workers())
FIRST = Hosts.at_start(JOB, None)


def cut(stages: dict[str, tuple[int, ...]], of: tuple[int, ...]) -> Hosts:
    return Hosts.of(JOB, {Worker.parse(name): hosted for name, hosted in stages.items()}, of)


CHAINS = cut({"0.0": (0,), "1.0": (1, 2), "0.1": (3,), "2.0": (0, 1), "2.1": (2, 3)}, (2, 2, 1, 3))
"""One chain of three and one of two, without 1.1."""


def test_who_joins_copies_all_of_its_stage_from_one_peer() -> None:
    holdings = Holdings(FIRST)
    live = EVERYBODY
    assert holdings.copies(FIRST, live, live) == []
    assert holdings.copies(FIRST, live, live - {Worker(1, 1)}) == [Copy("1.1", "0.1", 5, 10)]


def test_only_what_a_worker_does_not_hold_is_copied_and_sources_take_turns() -> None:
    holdings = Holdings(FIRST)
    live = EVERYBODY - {Worker(1, 1)}
    # 1.0 had layers 0 to 3 (units 0 to 4), and gets 2 to 4; 0.0 keeps two of its four.
    assert holdings.copies(CHAINS, live, live) == [Copy("1.0", "0.1", 5, 6)]
    holdings.take_up("chains", CHAINS)
    back = holdings.copies(FIRST, EVERYBODY, live)
    assert sorted((copy.worker, copy.source, copy.first, copy.last) for copy in back) == [
        ("0.0", "1.0", 3, 5),
        ("0.1", "2.1", 5, 6),
        ("1.0", "0.0", 0, 3),
        ("1.1", "2.1", 5, 10),
    ]


def test_a_plan_by_which_each_hosts_what_it_started_with_has_no_name() -> None:
    holdings = Holdings(FIRST)
    assert holdings.wanted(None, EVERYBODY, EVERYBODY) == FIRST
    assert holdings.name_of("digest", FIRST) == ""
    assert holdings.name_of("digest", CHAINS) == "digest"
    holdings.take_up("digest", CHAINS)
    assert holdings.of(Worker(1, 0)) == ((3, 6),)
    holdings.start_over()
    assert (holdings.plan, holdings.of(Worker(1, 0))) == ("", ((0, 5),))


def test_units_without_a_holder_are_lost_whoever_else_of_the_rank_is_alive() -> None:
    holdings = Holdings(FIRST)
    assert holdings.lost(EVERYBODY) == ()
    assert holdings.lost({Worker(0, 0), Worker(1, 0)}) == ((5, 10),)
    assert holdings.described((5, 10)) == "stage 1 has"
    holdings.take_up("chains", CHAINS)
    assert holdings.lost({Worker(2, 0), Worker(2, 1)}) == ()
    assert holdings.lost({Worker(0, 0), Worker(0, 1), Worker(2, 0)}) == ((5, 6),)
    assert holdings.described((5, 6)) == "layer 4 has"
    assert holdings.described((0, 3)) == "the embedding to layer 1 have"
    assert holdings.fewest_hosts([Worker(1, 0), Worker(2, 0)], EVERYBODY) == {Worker(1, 0): 2, Worker(2, 0): 2}
    assert holdings.fewest_hosts([Worker(2, 0)], {Worker(2, 0), Worker(0, 0)}) == {Worker(2, 0): 1}


@st.composite
def layouts(draw: st.DrawFn) -> Hosts:
    """Some of the workers in chains, each of which hosts the whole model."""
    workers = draw(st.permutations(sorted(EVERYBODY)))
    stages: dict[str, tuple[int, ...]] = {}
    while len(workers) > 0 and (not stages or draw(st.booleans())):
        length = draw(st.integers(1, min(4, len(workers))))
        ends = sorted(draw(st.sets(st.integers(1, 7), min_size=length - 1, max_size=length - 1)))
        for worker, begin, end in zip(workers[:length], [0, *ends], [*ends, 8], strict=True):
            stages[str(worker)] = tuple(range(begin, end))
        workers = workers[length:]
    return cut(stages, (1,) * 8)


@settings(max_examples=200)
@given(layouts(), layouts())
def test_after_the_copies_each_holds_what_the_plan_says_and_a_round_has_nobody_twice(was: Hosts, to: Hosts) -> None:
    holdings = Holdings(FIRST)
    holdings.take_up("was", was)
    holders, live = set(was.stages), set(was.stages) | set(to.stages)
    copies = holdings.copies(to, live, holders)
    held = {worker: _units(was.units.get(worker, ())) for worker in live}
    for copy in copies:
        wanted = set(range(copy.first, copy.last))
        assert wanted <= _units(was.units[Worker.parse(copy.source)])
        assert not wanted & held[Worker.parse(copy.worker)]
        held[Worker.parse(copy.worker)] |= wanted
    assert all(held[worker] >= _units(units) for worker, units in to.units.items())
    assert sum(copy.last - copy.first for copy in copies) == sum(
        len(_units(units) - _units(was.units.get(worker, ()))) for worker, units in to.units.items()
    )


def _units(ranges: tuple[UnitRange, ...]) -> set[int]:
    return {unit for begin, end in ranges for unit in range(begin, end)}
