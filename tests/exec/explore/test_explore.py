"""Whole runs under a virtual clock: random ones, and stories that violated a rule."""

from __future__ import annotations

import pytest

from tests.exec.explore.__main__ import draw_scenario, violation_of
from tests.exec.explore.cluster import Fault, Scenario

SPARED = frozenset({0, 1})


@pytest.mark.parametrize("first", range(0, 30, 15))
def test_no_seed_violates_a_rule(first: int) -> None:
    for seed in range(first, first + 15):
        assert violation_of(draw_scenario(seed)) is None, seed


def test_a_seed_repeats_a_run_to_the_message() -> None:
    stories = [list[str](), list[str]()]
    for story in stories:
        assert violation_of(draw_scenario(7), story.append) is None
    assert len(stories[0]) > 20
    assert stories[0] == stories[1]


@pytest.mark.parametrize("seed", range(4))
def test_agent_that_is_away_at_the_end_does_not_start_the_run_again(seed: int) -> None:
    """Its node was lost, and the leader waits for the old connection to break while the other node finishes the run."""
    faults = Fault(4.4, "lose node", 1), Fault(5.5 + seed / 2, "isolate", 1, 8.0)
    scenario = Scenario(ranks=1, steps=4, faults=faults, spared=frozenset({0}), seed=seed)
    assert violation_of(scenario) is None


@pytest.mark.parametrize("seed", range(4))
def test_late_write_of_the_register_changes_nothing(seed: int) -> None:
    """etcd carries out some requests after their repetition."""
    faults = (Fault(2.0, "slow store", seconds=60.0),)
    assert violation_of(Scenario(ranks=1, steps=8, faults=faults, seed=seed)) is None


@pytest.mark.parametrize("seed", [1, 2, 3, 5])
def test_agents_pass_heartbeats_on_while_etcd_does_not_answer(seed: int) -> None:
    """The leader waits for etcd as well, and continues before some of the agents that ask whether it still leads."""
    faults = Fault(4.0, "lose answers", seconds=20.0), Fault(5.0, "stall store", seconds=4.0)
    assert violation_of(Scenario(steps=6, faults=faults, seed=seed)) is None
