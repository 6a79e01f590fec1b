"""Histories of the leader: random ones, and such in which it ends before each of its actions."""

from __future__ import annotations

import random
from itertools import count

import pytest

from recycle.exec.leader.state import PlannedFault
from recycle.job.shape import Worker
from tests.exec.leader.seeds import job_of, run_seed
from tests.exec.leader.world import Figures, Scenario, World

SECTIONS = {
    "shape": {"pipelines": 2, "ranks": 2, "micro_batches": 2},
    "train": {"checkpoint_every": 2},
    "eval": {"every": 3},
}
HOSTS = Worker(0, 1), Worker(1, 1)


def _lived(scenario: Scenario) -> Figures:
    return World(scenario, random.Random(0)).run()


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_seed_violates_a_rule(first: int) -> None:
    for seed in range(first, first + 50):
        run_seed(seed)


@pytest.mark.parametrize("nodes", [1, 2])
def test_another_leader_continues_after_any_action(nodes: int) -> None:
    """A fault strikes a worker, which comes back, and a connection breaks."""
    for action in count(1):
        scenario = Scenario(
            job=job_of(SECTIONS),
            steps=4,
            faults=(PlannedFault("compute", HOSTS[0], 1), PlannedFault("rejoin", HOSTS[0], 2, strikes=False)),
            strikes=((9.0, "trouble", HOSTS[1]),),
            crashes=frozenset({action}),
            nodes=nodes,
        )
        figures = _lived(scenario)
        assert figures.outcome == "finished", action
        if figures.leaders == 1:  # it has fewer actions
            break
    assert action > 50


def test_a_run_that_ends_early_is_over_for_another_leader() -> None:
    for action in range(12, 40):
        scenario = Scenario(
            job=job_of(SECTIONS), steps=60, strikes=((6.0, "notice all", None),), crashes=frozenset({action})
        )
        assert _lived(scenario).outcome == "early", action


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6])
def test_leaving_worker_stays_if_it_became_the_last_host(seconds: float) -> None:
    scenario = Scenario(
        job=job_of(SECTIONS),
        steps=8,
        strikes=((8.0, "kill", HOSTS[0]), (8.0 + seconds, "notice", HOSTS[1])),
        is_struck=True,
    )
    assert _lived(scenario).outcome == "finished"


@pytest.mark.parametrize("kind", ["away", "node", "node leaves"])
def test_run_continues_while_a_node_is_absent(kind: str) -> None:
    for draw in range(5):
        scenario = Scenario(
            job=job_of(SECTIONS), steps=8, nodes=2, strikes=((8.0, kind, HOSTS[0]),), restarts=1, is_struck=True
        )
        assert World(scenario, random.Random(draw)).run().outcome == "finished", draw


def test_death_after_the_last_commit_lets_peers_end() -> None:
    sections = {**SECTIONS, "train": {"sharded_optimizer": True}}
    scenario = Scenario(job=job_of(sections), steps=3, faults=(PlannedFault("gather", HOSTS[0], 2),))
    figures = _lived(scenario)
    assert (figures.outcome, figures.generations) == ("finished", 2)
