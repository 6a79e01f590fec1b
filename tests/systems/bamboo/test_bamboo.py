"""Bamboo as a system: what runs, what changes cost, when it restarts, what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle import check, lower, simulate
from recycle.job.layers import Layer
from recycle.systems import SYSTEMS, Change, DoesNotFit, Loss, Pause, Running, Setting, Stopped
from recycle.systems.bamboo.bamboo import Bamboo, BambooRunning
from tests.systems.closed_forms import healthy_seconds
from tests.systems.settings import setting

NOBODY: frozenset[int] = frozenset()


def begun(system: Bamboo, live: frozenset[int] | None = None) -> BambooRunning:
    state = system.begin(system.setting.all_nodes if live is None else live)
    assert isinstance(state, BambooRunning)
    return state


def overloaded(state: BambooRunning) -> int:
    return sum(pipeline.overloaded for pipeline in state.pipelines)


def lose(system: Bamboo, state: Running, *nodes: int) -> Change:
    return system.change(state, frozenset(nodes), NOBODY)


@pytest.fixture(scope="module")
def plain() -> Setting:
    return setting(4, 4, 6)


def test_it_is_registered(plain: Setting) -> None:
    assert SYSTEMS["bamboo"](plain).begin(plain.all_nodes) == begun(Bamboo(plain))


def test_the_healthy_period_is_the_closed_form(plain: Setting) -> None:
    state = begun(Bamboo(plain))
    assert state.period == healthy_seconds(4, 6, 1, 2) == 31
    assert (state.samples, state.idle, state.reconsider) == (24, 0, False)


def test_what_does_not_fill_a_pipeline_waits(plain: Setting) -> None:
    state = begun(Bamboo(plain), frozenset(range(14)))
    assert (len(state.pipelines), state.idle) == (3, 2)
    assert state.period == healthy_seconds(4, 8, 1, 2) == 39
    stopped = Bamboo(plain).begin(frozenset(range(3)))
    assert isinstance(stopped, Stopped)
    assert "3 worker(s), a pipeline needs 4" in stopped.reason


def test_the_predecessor_takes_over_and_the_iteration_goes_on(plain: Setting) -> None:
    system = Bamboo(plain)
    before = begun(system)
    change = lose(system, before, 2)
    state = change.state
    assert isinstance(state, BambooRunning)
    assert (change.event, change.loss, change.bytes) == ("take over", Loss.NOTHING, 0)
    assert state.pipelines[0].hosts == (0, 1, 1, 3)
    assert state.pipelines[1:] == before.pipelines[1:]
    assert (state.period, overloaded(state)) == (40, 1)
    # Of stage 2 at most S - 2 = 2 micro-batches were in flight: their backwards, and their stash over PCIe.
    assert change.pause == Pause(detect=5.0, rebuild=2.0, copy=2 * (2 + 1 / system.pcie))


@pytest.mark.parametrize("second", [1, 3])
def test_two_neighbours_are_fatal(plain: Setting, second: int) -> None:
    system = Bamboo(plain)
    for change in (lose(system, lose(system, begun(system), 2).state, second), lose(system, begun(system), 2, second)):  # type: ignore[arg-type]
        assert (change.event, change.loss) == ("fatal", Loss.CHECKPOINT)
        assert change.pause == plain.restart()
        assert isinstance(change.state, BambooRunning)
        assert (len(change.state.pipelines), change.state.idle, overloaded(change.state)) == (3, 2, 0)


def test_two_that_are_no_neighbours_are_not(plain: Setting) -> None:
    system = Bamboo(plain)
    change = lose(system, begun(system), 1, 3, 9)
    assert change.event == "take over"
    assert isinstance(change.state, BambooRunning)
    assert [p.hosts for p in change.state.pipelines][:3] == [(0, 0, 2, 2), (0, 1, 2, 3), (0, 0, 2, 3)]


def test_pipelines_are_arranged_anew_at_the_next_boundary(plain: Setting) -> None:
    """One of 15 is overloaded: 2 / 15 > 5 %. Three pipelines are left, of workers that hold what they need."""
    system = Bamboo(plain)
    hurt = lose(system, begun(system), 2).state
    assert isinstance(hurt, BambooRunning)
    assert hurt.reconsider
    change = system.change(hurt, NOBODY, NOBODY)
    assert (change.event, change.loss, change.bytes) == ("rearrange", Loss.NOTHING, 0)
    assert change.pause == Pause(plan=20.0, rebuild=2.0)
    state = change.state
    assert isinstance(state, BambooRunning)
    assert (len(state.pipelines), state.idle, overloaded(state), state.reconsider) == (3, 3, 0, False)
    back = system.change(state, NOBODY, frozenset({2}))
    assert isinstance(back.state, BambooRunning)
    assert (back.event, len(back.state.pipelines), back.state.idle) == ("rearrange", 4, 0)


def test_few_overloaded_workers_stay_until_others_wait() -> None:
    system = Bamboo(setting(12, 4, 6))
    hurt = lose(system, begun(system), 2).state
    assert isinstance(hurt, BambooRunning)
    assert not hurt.reconsider, "2 / 47 < 5 %"
    change = system.change(hurt, NOBODY, frozenset({2}))
    assert (change.event, change.state.live) == ("rearrange", system.setting.all_nodes)
    assert isinstance(change.state, BambooRunning)
    assert set(change.state.pipelines) == set(begun(system).pipelines)


def test_only_state_that_is_not_there_is_copied() -> None:
    """Worker 2 comes back with nothing: its stage and the copy of the next one."""
    system = Bamboo(setting(12, 4, 6, layer={"state": 7e9}, bandwidth=1e9))
    hurt = lose(system, begun(system), 2).state
    assert isinstance(hurt, BambooRunning)
    change = system.change(hurt, NOBODY, frozenset({2}))
    assert change.bytes == 14e9
    assert change.pause.copy == 14


def test_losing_somebody_who_waits_costs_nothing(plain: Setting) -> None:
    system = Bamboo(plain)
    state = begun(system, frozenset(range(14)))
    change = lose(system, state, 13)
    assert (change.pause, change.loss, change.state.live) == (Pause(), Loss.NOTHING, frozenset(range(13)))


def test_after_a_stop_it_restarts_with_enough_workers(plain: Setting) -> None:
    system = Bamboo(plain)
    stopped = system.begin(frozenset({0, 1}))
    assert isinstance(stopped, Stopped)
    assert isinstance(system.change(stopped, NOBODY, frozenset({2})).state, Stopped)
    change = system.change(stopped, NOBODY, frozenset({2, 3}))
    assert (change.event, change.pause) == ("restart", plain.restart(detected=False))
    assert isinstance(change.state, BambooRunning)


def test_neighbours_sit_on_different_nodes() -> None:
    """A node of two workers dies: two pipelines, or two distant ranks, and not two neighbours."""
    system = Bamboo(setting(4, 4, 6, node_of=tuple(slot // 2 for slot in range(16))))
    for node in range(8):
        assert lose(system, begun(system), node).event == "take over"


def test_memory_makes_it_deeper_or_does_not_fit() -> None:
    """Two stages of two layers and 6 buffers of both: 20 + 20 + 6 * (2 + 2) = 64. In one pipeline, 12 buffers."""
    of = setting(2, 4, 6, layers=8, layer={"static": 10.0, "activation": 1.0}, memory=(64.0,) * 4)
    assert Bamboo(of).depth == 4
    assert Bamboo(replace(of, memory=(63.0,) * 4)).depth == 8
    found = Bamboo(replace(of, memory=(43.0,) * 4)).begin(of.all_nodes)
    assert isinstance(found, DoesNotFit)
    assert (found.needed, found.cap) == (44, 43)
    assert "1 pipeline(s) of 8 stages" in found.reason


def test_a_worker_holds_two_states_and_the_activations_of_both_stages() -> None:
    layers = tuple(Layer(1.0, 1.0, 1.0, static=100.0 * part, activation=float(part)) for part in (1, 2, 3))
    of = replace(setting(1, 3, 10), layers=layers, memory=(1.0,) * 3)
    needed = {lean: Bamboo(of, buffer_per_micro_batch=not lean).begin(of.all_nodes) for lean in (False, True)}
    assert isinstance(needed[False], DoesNotFit)
    assert isinstance(needed[True], DoesNotFit)
    assert needed[False].needed == 200 + 10 * 2 + 300 + 10 * 3
    assert needed[True].needed == 200 + 2 * 2 + 300 + 1 * 3
    alone = Bamboo(replace(setting(1, 1, 10), layers=layers[:1], memory=(1.0,))).begin(frozenset({0}))
    assert isinstance(alone, DoesNotFit)
    assert alone.needed == 100 + 10, "a single stage has no copy"


def test_a_stash_on_the_host_is_seen_only_where_the_link_is_slower_than_the_work(
    plain: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PCIe takes 1 byte in 1 / pcie seconds; beside each redundant forward there are F + F + B = 4 seconds of work."""
    monkeypatch.setattr(Bamboo, "pcie", 0.25)
    assert begun(Bamboo(plain)).period == 31
    monkeypatch.setattr(Bamboo, "pcie", 0.2)
    assert begun(Bamboo(plain)).period > 31


def test_what_runs_passes_check_and_takes_its_period() -> None:
    of = setting(3, 4, 6, layers=8, layer={"gradients": 1.0, "step": 0.5}, bandwidth=4.0)
    system = Bamboo(of)
    states = [begun(system), lose(system, begun(system), 2).state, begun(system, frozenset(range(10)))]
    for state in states:
        assert isinstance(state, BambooRunning)
        ((schedule, profile),) = state.schedules()
        assert check(lower(schedule), about_to_run=True) == []
        assert simulate(lower(schedule), profile).period == pytest.approx(state.period)
