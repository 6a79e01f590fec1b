"""ReCycle's periods are those of real plans and beat no bound; who is dead, moves, joins and is lost is booked."""

from __future__ import annotations

from math import ceil

import pytest

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job import Job
from recycle.systems.recycle import ReCycle
from recycle.systems.setting import Setting
from tests.systems.settings import Play


def setting(
    pipelines: int = 3, ranks: int = 4, micro_batches: int = 6, limit: int | str = 6, more: str = ""
) -> Setting:
    return Setting.of(
        Job.from_toml(
            f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\n"
            f"[memory]\nlimit = {limit}\n{more}"
        )
    )


@pytest.mark.search
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("staggered", [True, False])
def test_no_period_beats_the_load_of_the_most_loaded_survivor(decoupled: bool, staggered: bool) -> None:
    """L_s = ceil(N M / (N - f_s)) c; the first technique alone T >= s F + L_s + s B, with I and W split s F + L_s."""
    system = ReCycle(setting(limit=12), decoupled=decoupled, staggered=staggered, move=False)
    for nodes in ("6", "6 9", "0", "3 11"):
        here = Play(system).change(nodes).state
        dead = [sum(int(node) % 4 == rank for node in nodes.split()) for rank in range(4)]
        for rank, k in enumerate(dead):
            load = ceil(3 * 6 / (3 - k)) * 3
            fill = 0 if staggered else rank if decoupled else rank + 2 * rank
            assert here.period >= load + fill
        for schedule, profile in here.schedules():
            assert check(schedule, profile=profile, limits=[12] * 4) == []
            assert simulate(schedule, profile).period <= here.period
            assert schedule.failure_vector() == here.vector


def test_each_technique_shortens_the_worked_example() -> None:
    """The paper's example: 1.2 of three pipelines of four stages dies; 27 slots without failure (1F1B)."""
    periods = []
    for techniques in ({"decoupled": False, "staggered": False}, {"staggered": False}, {}):
        system = ReCycle(setting(limit=6), move=False, **techniques)
        periods.append(Play(system).change("6").state.period)
    assert periods == sorted(periods, reverse=True)
    assert periods[0] >= 33
    assert periods[1] >= 29
    assert 27 <= periods[2] <= 29


ANALYTIC = """
[shape]
pipelines = 2
ranks = 4
micro_batches = 8
[times]
profile = "analytic"
[memory]
limit = "{limit}"
[model]
layers = 8
hidden = 4096
heads = 32
sequence = 2048
vocabulary = 51200
[train]
precision = "bf16"
accumulation = "fast"
undo = "{undo}"
[analytic]
gpu = "A100-80GB"
"""


@pytest.mark.parametrize("undo", ["device", "host"])
@pytest.mark.parametrize(("limit", "way"), [("72 GB", (True, "device")), ("24 GB", (False, "device"))])
def test_what_is_kept_for_a_step_that_may_be_taken_back_is_chosen_by_what_fits(
    limit: str, way: tuple[bool, str], undo: str
) -> None:
    """At 24 GB the state from before a step leaves no room for activations, and its copy over PCIe takes 0.3 s of an
    iteration of 0.55 s; whatever the job says."""
    system = ReCycle(Setting.of(Job.from_toml(ANALYTIC.format(limit=limit, undo=undo))))
    assert (system.job.planner.staggered, system.job.train.undo) == way
    state = Play(system).state
    assert state.period == pytest.approx(0.5211 if way[0] else 0.5575, rel=1e-3)
    ((schedule, profile),) = state.schedules()
    timeline = simulate(schedule, profile)
    assert timeline.period == pytest.approx(state.period, rel=1e-3)
    assert max(filter(None, timeline.peak_bytes)) <= float(limit.removesuffix(" GB")) * 1e9
