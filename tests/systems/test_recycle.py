"""ReCycle's periods belong to valid plans and beat no bound; layers move at the next boundary if that pays."""

from dataclasses import replace
from math import ceil

import pytest

from recycle import Job, check, simulate
from recycle.systems.recycle import ReCycle
from recycle.systems.recycle_elastic import ElasticReCycle
from recycle.systems.scenario import Scenario
from recycle.systems.system import Loss
from tests.systems.scenarios import Play


def scenario(pipelines=3, ranks=4, micro_batches=6, limit: int | str = 6, more="") -> Scenario:
    return Scenario.of(
        Job.from_toml(
            f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\n"
            f"[memory]\nlimit = {limit}\n{more}"
        )
    )


@pytest.mark.search
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("staggered", [True, False])
def test_no_period_beats_the_load_of_the_most_loaded_survivor(decoupled, staggered):
    """L_s = ceil(N M / (N - f_s)) c; the first technique alone T >= s F + L_s + s B, with I and W split s F + L_s."""
    system = ReCycle(scenario(limit=12), decoupled=decoupled, staggered=staggered, move=False)
    for nodes in ("6", "6 9", "0", "3 11"):
        state = Play(system).change(nodes).state
        dead = [sum(int(node) % 4 == rank for node in nodes.split()) for rank in range(4)]
        for rank, k in enumerate(dead):
            load = ceil(3 * 6 / (3 - k)) * 3
            fill = 0 if staggered else rank if decoupled else rank + 2 * rank
            assert state.period >= load + fill
        for schedule, profile in state.schedules():
            assert check(schedule, profile=profile, limits=[12] * 4) == []
            assert simulate(schedule, profile).period <= state.period
            assert schedule.failure_vector() == state.vector


def test_slow_workers_give_micro_batches_to_their_peers():
    system = ReCycle(scenario(ranks=2, micro_batches=32, limit=64))
    state = Play(system).state
    assert system.pace(state, {0: 2.0}) == pytest.approx(max(1.0, ceil(96 / 2.5) * 3 / state.period))
    assert system.pace(state, {0: 2.0, 2: 2.0}) == pytest.approx(ceil(96 / 2) * 3 / state.period)
    assert system.pace(state, {0: 2.0, 3: 2.0}) == system.pace(state, {0: 2.0})


def test_each_technique_shortens_the_worked_example():
    """The paper's example: 1.2 of three pipelines of four stages dies; 27 slots without failure (1F1B)."""
    periods = []
    for techniques in ({"decoupled": False, "staggered": False}, {"staggered": False}, {}):
        system = ReCycle(scenario(limit=6), move=False, **techniques)
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
def test_optimizer_mode_is_the_fastest_that_fits(limit, way, undo):
    """At 24 GB the state from before a step leaves no room for activations, and its copy over PCIe takes 0.3 s of an
    iteration of 0.55 s; whatever the job says."""
    system = ReCycle(Scenario.of(Job.from_toml(ANALYTIC.format(limit=limit, undo=undo))))
    assert (system.job.planner.staggered, system.job.train.undo) == way
    state = Play(system).state
    assert state.period == pytest.approx(0.5211 if way[0] else 0.5575, rel=1e-3)
    ((schedule, profile),) = state.schedules()
    timeline = simulate(schedule, profile)
    assert timeline.period == pytest.approx(state.period, rel=1e-3)
    assert max(filter(None, timeline.peak_bytes)) <= float(limit.removesuffix(" GB")) * 1e9


def elastic_scenario(bandwidth=1e3, chunks=1) -> Scenario:
    """Three pipelines of four workers with four layers each, whose bubbles hold no second worker's load."""
    text = f"[shape]\npipelines = 3\nranks = 4\nmicro_batches = 24\nchunks = {chunks}\n[model]\nlayers = 16\n"
    base = Scenario.of(Job.from_toml(f"{text}[memory]\nlimit = {8 * chunks}\n"))
    layers = tuple(replace(layer, state=100.0) for layer in base.layers)
    return replace(base, layers=layers, bandwidth=bandwidth)


@pytest.mark.search
@pytest.mark.parametrize("chunks", [1, 2])
def test_elastic_runs_the_faster_of_both_layouts(chunks):
    elastic, plain = ElasticReCycle(elastic_scenario(chunks=chunks)), ReCycle(elastic_scenario(chunks=chunks))
    assert Play(elastic).period <= Play(plain).period
    assert Play(plain, "0-4 6-11").period >= 72 / 2 * 3 * chunks
    moved = Play(elastic, "0-4 6-11").state
    assert moved.period <= 1.06 * 72 * 4 * 3 * chunks / 11
    for schedule, profile in moved.schedules():
        assert check(schedule, profile=profile, limits=[8.0 * chunks] * 4) == []
        assert simulate(schedule, profile).period == moved.period


@pytest.mark.search
def test_failure_is_rerouted_then_layers_move_at_the_boundary():
    played, plain = Play(ElasticReCycle(elastic_scenario())), Play(ReCycle(elastic_scenario()))
    struck, alike = played.change("5"), plain.change("5")
    assert (struck.loss, struck.event, struck.pause) == (Loss.ITERATION, "re-route", alike.pause)
    rerouted = played.state
    assert (rerouted.period, rerouted.reconsider) == (plain.state.period, True)
    moved = played.change()
    assert (moved.loss, moved.event, played.state.reconsider) == (Loss.NOTHING, "move layers", False)
    assert played.state.period < rerouted.period
    assert moved.bytes > 0
    assert moved.bytes % 100 == 0
    assert moved.pause.detect == 0
    assert 0 < moved.pause.copy <= moved.bytes / 1e3


@pytest.mark.search
def test_layers_stay_if_copying_does_not_pay():
    Play(ElasticReCycle(elastic_scenario(bandwidth=1e-4))).play("-5: event=re-route, reconsider=False")
