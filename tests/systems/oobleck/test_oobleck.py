"""Oobleck as a system: throughput on any number of nodes, and whatever dies and joins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import check, lower, simulate
from recycle.systems.oobleck.oobleck import Oobleck
from tests.systems.settings import Play, setting

quick = settings(derandomize=True, max_examples=12, deadline=None, database=None)


@pytest.mark.search
def test_throughput_goes_with_the_nodes() -> None:
    """30 nodes, 26 layers, n0 = 5: tput(n) / tput(30) * 30 / n within 0.95 .. 1.10 for 20 to 30 nodes."""
    made = setting(5, 6, 64, layers=26, layer={"static": 1.0, "activation": 0.0}, memory=(6.0,) * 6)
    system = Oobleck(made)
    assert min(system.templates) == 5
    periods = {nodes: Play(system, f"0-{nodes - 1}").state.period for nodes in range(20, 31)}
    shares = [periods[30] / period * 30 / nodes for nodes, period in periods.items()]
    assert 0.95 <= min(shares) <= max(shares) <= 1.10


@pytest.mark.search
@quick
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(1, 2)), max_size=12))
def test_whatever_dies_and_joins_its_schedules_pass_check(events: list[tuple[bool, int, int]]) -> None:
    layer = {"static": 1.0, "state": 1.0, "activation": 0.0}
    of = setting(3, 4, 8, layers=12, layer=layer, memory=(4.0,) * 4, node_of=tuple(range(13)))
    played = Play(Oobleck(of))
    for is_failure, first, count in events:
        live = played.state.live
        pool = sorted(live if is_failure else of.all_nodes - live)
        chosen = pool[first % max(1, len(pool)) :][:count]
        text = " ".join(map(str, chosen))
        state: Any = (played.change(text) if is_failure else played.change(joined=text)).state
        assert state.live == (live.difference(chosen) if is_failure else live.union(chosen))
        if hasattr(state, "shares"):
            used = [node for members in state.pipelines for node in members]
            assert len(used) == len(set(used))
            assert set(used) <= state.live
            assert sum(state.shares) == of.micro_batches
            ((schedule, profile),) = state.schedules()
            assert check(schedule) == []
            assert simulate(lower(schedule), profile).period == pytest.approx(state.period)
