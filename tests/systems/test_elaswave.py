"""ElasWave: the pipeline that lost a worker is cut anew, and sizes of micro-batches make all end together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job import Job
from recycle.job.layers import Layer
from recycle.systems.elaswave import ElasWave, ElasWaveRunning
from recycle.systems.setting import Setting
from recycle.systems.system import DoesNotFit, Loss, Stopped


def setting(memory: float = 400.0) -> Setting:
    """Two pipelines of four stages of three layers each, with 12 micro-batches; layers weigh 20 bytes."""
    job = Job.from_toml("[shape]\npipelines = 2\nranks = 4\nmicro_batches = 12\n")
    layers = tuple(Layer(1.0, 1.0, 1.0, static=20.0, state=16.0, activation=1.0) for _ in range(12))
    return replace(Setting.of(job), layers=layers, memory=(memory,) * 4, bandwidth=8.0)


def begun(system: ElasWave, dead: set[int] | None = None) -> ElasWaveRunning:
    state = system.begin(system.setting.all_nodes - (dead or set()))
    assert isinstance(state, ElasWaveRunning)
    return state


def four_deep(system: ElasWave) -> ElasWave:
    """The system on the grid of the job, whatever other grid is faster."""
    grid = system.grids.grid(2, 4)
    system.grids.best = lambda slots: grid  # type: ignore[assignment]
    return system


def test_without_failures_it_is_1f1b() -> None:
    system = four_deep(ElasWave(setting()))
    state = begun(system)
    assert (state.layout, state.period, state.idle) == ("2 x 4", (12 + 3) * 9, 0)


def test_sizes_follow_the_pace_and_the_batch_stays() -> None:
    """Four layers a worker in place of three: (12 + 2) * 12 seconds to (12 + 3) * 9 with equal sizes."""
    system = four_deep(ElasWave(setting()))
    state = begun(system, {5})
    sizes = system.sizes(state.grid, (4, 3))
    assert sum(sizes) == pytest.approx(2)
    assert sizes[0] / sizes[1] == pytest.approx(14 * 12 / (15 * 9))
    assert state.layout == "1 x 4 + 1 x 3"
    assert state.period == pytest.approx(15 * 9 * sizes[0])
    assert state.period == pytest.approx(14 * 12 * sizes[1])
    assert state.samples == system.setting.samples
    for schedule, profile in state.schedules():
        assert check(schedule, profile=profile) == []
        assert simulate(schedule, profile).period == pytest.approx(state.period)


def test_a_failure_costs_an_iteration_and_layers_are_copied() -> None:
    """Slot 5 is rank 1 of pipeline 1: its rank 0 takes on layer 3, rank 2 layers 4 and 5 and rank 3 layer 8."""
    system = four_deep(ElasWave(setting()))
    change = system.change(begun(system), frozenset({5}), frozenset())
    assert (change.event, change.loss, change.bytes) == ("re-cut", Loss.ITERATION, 4 * 16.0)
    assert (change.pause.rebuild, change.pause.copy) == (1.0, 0.0)
    back = system.change(change.state, frozenset(), frozenset({5}))
    assert (back.event, back.loss) == ("join", Loss.NOTHING)
    assert back.state == begun(system)


def test_with_all_hosts_of_a_layer_everybody_goes_back() -> None:
    system = four_deep(ElasWave(setting()))
    change = system.change(begun(system), frozenset({1, 5}), frozenset())
    assert (change.event, change.loss) == ("restart", Loss.CHECKPOINT)


def test_a_pipeline_that_cannot_hold_the_model_stands_idle() -> None:
    """Three layers and the activations of four micro-batches are 72 bytes; four layers do not fit into 80."""
    system = four_deep(ElasWave(setting(80.0)))
    state = begun(system, {5})
    assert (state.layout, state.idle) == ("1 x 4", 3)
    assert isinstance(system.begin(frozenset({0, 1, 2, 4, 5})), Stopped)
    assert isinstance(ElasWave(setting(15.0)).begin(system.setting.all_nodes), DoesNotFit)
