"""Systems on fault-free grids: checkpoint-restart, hot spares, live migration and sample dropping."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle.ir.check import check
from recycle.job import Job
from recycle.job.layers import Layer
from recycle.systems.checkpoint_restart import CheckpointRestart
from recycle.systems.cluster import run
from recycle.systems.failures import FailureTrace, NodeChange
from recycle.systems.grids import GridRunning
from recycle.systems.hot_spare import HotSpare, LiveMigration
from recycle.systems.sample_dropping import SampleDropping
from recycle.systems.setting import Setting
from recycle.systems.system import Change, DoesNotFit, Loss, Stopped

GRID_SYSTEMS = (CheckpointRestart, HotSpare, LiveMigration, SampleDropping)


def setting(pipelines: int = 4, memory: float = 30.0, failure_rate: float = 1e-6) -> Setting:
    """Pipelines of four stages of one layer; two layers on one worker do not fit."""
    job = Job.from_toml(f"[shape]\npipelines = {pipelines}\nranks = 4\nmicro_batches = 6\n")
    layers = tuple(Layer(1.0, 1.0, 1.0, static=20.0, state=16.0) for _ in range(4))
    return replace(Setting.of(job), layers=layers, memory=(memory,) * 4, bandwidth=8.0, failure_rate=failure_rate)


def grid(change: Change) -> GridRunning:
    assert isinstance(change.state, GridRunning)
    return change.state


def test_checkpoint_restart_takes_the_best_grid_that_is_left() -> None:
    system = CheckpointRestart(setting())
    begun = system.begin(system.setting.all_nodes)
    assert isinstance(begun, GridRunning)
    assert (begun.layout, begun.idle, begun.period) == ("4 x 4", 0, (6 + 3) * 3)
    struck = system.change(begun, frozenset({5}), frozenset())
    assert (struck.loss, struck.event) == (Loss.CHECKPOINT, "restart")
    assert (grid(struck).layout, grid(struck).idle, grid(struck).period) == ("3 x 4", 3, (8 + 3) * 3)
    assert struck.pause.restart == 60 + 16 / 1e9
    spare = system.change(struck.state, frozenset({15}), frozenset())
    assert (spare.event, spare.pause.seconds, grid(spare).idle) == ("wait", 0, 2)
    back = system.change(spare.state, frozenset(), frozenset({5, 15}))
    assert (back.loss, back.event, grid(back).layout) == (Loss.NOTHING, "restart", "4 x 4")


def test_newcomers_wait_until_a_restart_pays() -> None:
    system = CheckpointRestart(setting(failure_rate=1e-3))
    struck = system.change(system.begin(system.setting.all_nodes), frozenset({5}), frozenset())  # type: ignore[arg-type]
    assert system.change(struck.state, frozenset(), frozenset({5})).event == "wait"


def test_too_few_nodes_stop_it_and_too_little_memory_is_a_result() -> None:
    system = CheckpointRestart(setting())
    assert isinstance(system.begin(frozenset({0, 1, 2})), Stopped)
    small = CheckpointRestart(setting(memory=20.5))
    refused = small.begin(small.setting.all_nodes)
    assert isinstance(refused, DoesNotFit)
    assert (refused.needed, refused.cap) == (24.0, 20.5)


@pytest.mark.parametrize("kind", [HotSpare, LiveMigration])
def test_a_spare_takes_the_place_and_copies_from_a_peer(kind: type[HotSpare]) -> None:
    system = kind(setting(), spares=4)
    begun = system.begin(system.setting.all_nodes)
    assert isinstance(begun, GridRunning)
    assert (begun.layout, begun.idle) == ("3 x 4", 4)
    change = system.change(begun, frozenset({5}), frozenset())
    assert (change.event, change.bytes, change.pause.copy) == ("replace", 16.0, 2.0)
    assert change.loss is (Loss.NOTHING if kind is LiveMigration else Loss.ITERATION)
    assert (grid(change).period, grid(change).idle) == (begun.period, 3)
    assert 5 not in grid(change).used
    back = system.change(change.state, frozenset(), frozenset({5}))
    assert (back.event, grid(back).idle) == ("wait", 4)


def test_without_spares_everybody_restarts() -> None:
    system = HotSpare(setting(), spares=4)
    begun = system.begin(system.setting.all_nodes)
    change = system.change(begun, frozenset({0, 1, 2, 3, 4}), frozenset())  # type: ignore[arg-type]
    assert (change.event, change.loss, grid(change).layout) == ("restart", Loss.CHECKPOINT, "2 x 4")


def test_a_stage_without_hosts_comes_from_a_checkpoint() -> None:
    system = HotSpare(setting(), spares=4)
    begun = system.begin(system.setting.all_nodes)
    change = system.change(begun, frozenset({1, 5, 9}), frozenset())  # type: ignore[arg-type]
    assert (change.event, change.loss, grid(change).layout) == ("restart", Loss.CHECKPOINT, "3 x 4")


def test_sample_dropping_trains_the_healthy_share_of_the_groups() -> None:
    system = SampleDropping(setting())
    begun = system.begin(system.setting.all_nodes)
    assert isinstance(begun, GridRunning)
    for dead in (1, 2, 3):
        change = system.change(begun, frozenset(range(0, 4 * dead, 4)), frozenset())
        state = change.state
        assert isinstance(state, GridRunning)
        assert (change.event, change.loss) == ("drop", Loss.ITERATION)
        assert state.period == begun.period
        assert state.samples == 24 * (4 - dead) / 4
        assert state.dropped == 24 * dead / 4
    lost = system.change(begun, frozenset({0, 4, 8, 12}), frozenset())
    assert (lost.event, lost.loss) == ("restart", Loss.CHECKPOINT)


def test_workers_of_broken_groups_form_a_new_one() -> None:
    system = SampleDropping(setting())
    begun = system.begin(system.setting.all_nodes)
    struck = system.change(begun, frozenset({0, 4}), frozenset()).state  # type: ignore[arg-type]
    assert isinstance(struck, GridRunning)
    assert struck.reconsider
    formed = system.change(struck, frozenset(), frozenset())
    assert isinstance(formed.state, GridRunning)
    assert (formed.event, formed.bytes, len(formed.state.used)) == ("join", 64.0, 12)
    assert not formed.state.reconsider
    assert formed.pause.detect == 0


def test_the_dropping_ratio_holds_in_the_event_simulation() -> None:
    """Throughput is that of the healthy groups over all groups."""
    shared = setting()
    moments = (
        NodeChange(27.0 * 400, frozenset({0}), frozenset()),
        NodeChange(27.0 * 1200, frozenset({1, 2, 5, 6}), frozenset()),
    )
    trace = FailureTrace("test", 16, shared.all_nodes, moments, 27.0 * 2000)
    outcome = run(SampleDropping(shared), shared, trace)
    expected = (400 * 1 + 800 * 3 / 4 + 800 * 2 / 4) / 2000
    assert outcome.ettr == pytest.approx(expected, abs=0.002)
    assert outcome.dropped == pytest.approx(24 * 2000 * (1 - expected), rel=0.01)
    assert outcome.lost["dropped"] == pytest.approx(outcome.seconds * (1 - expected), rel=0.01)


@pytest.mark.parametrize("kind", GRID_SYSTEMS)
def test_what_runs_passes_the_check(kind: type[CheckpointRestart]) -> None:
    system = kind(setting())
    state = system.begin(system.setting.all_nodes)
    assert not isinstance(state, Stopped | DoesNotFit)
    for schedule, profile in state.schedules():
        assert check(schedule, profile=profile, byte_limit=30.0) == []
