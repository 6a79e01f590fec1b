"""Oobleck as a system: templates, what runs, what changes cost, when it stops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import check, lower, simulate
from recycle.systems import SYSTEMS, Change, DoesNotFit, Loss, Pause, Setting, Stopped
from recycle.systems.oobleck.oobleck import Oobleck, OobleckRunning
from tests.systems.settings import setting

NOBODY: frozenset[int] = frozenset()
quick = settings(derandomize=True, max_examples=12, deadline=None, database=None)


def begun(system: Oobleck, nodes: int | None = None) -> OobleckRunning:
    state = system.begin(frozenset(range(system.setting.nodes if nodes is None else nodes)))
    assert isinstance(state, OobleckRunning)
    return state


def lose(system: Oobleck, state: OobleckRunning, *nodes: int) -> Change:
    return system.change(state, frozenset(nodes), NOBODY)


def after(change: Change) -> OobleckRunning:
    assert isinstance(change.state, OobleckRunning)
    return change.state


@pytest.fixture(scope="module")
def of() -> Setting:
    """13 nodes, 12 layers of 1 byte of state; 4 of them and their activations fit: n0 = 3."""
    layer = {"static": 1.0, "state": 1.0, "activation": 0.0}
    made = setting(3, 4, 8, layers=12, layer=layer, memory=(4.0,) * 4, bandwidth=1.0)
    return replace(made, node_of=tuple(range(13)))


@pytest.fixture(scope="module")
def system(of: Setting) -> Oobleck:
    return Oobleck(of)


def test_templates_of_the_example_in_its_tests(system: Oobleck, of: Setting) -> None:
    """f = 1, n0 = 3, 13 nodes: templates for 3 to 10 nodes (its own test writes 3 to 12), runs on 6 to 13."""
    assert SYSTEMS["oobleck"](of).begin(of.all_nodes) == begun(system)
    assert list(system.templates) == list(range(3, 11))
    assert system.templates[3].split == (4, 4, 4)
    assert begun(system, 6).pipelines == ((0, 1, 2), (3, 4, 5))
    stopped = system.begin(frozenset(range(5)))
    assert isinstance(stopped, Stopped)
    assert stopped.reason == "5 node(s), 2 pipelines need 6"


def test_nobody_idles_and_the_batch_is_dealt_by_speed(system: Oobleck) -> None:
    for nodes in range(6, 14):
        state = begun(system, nodes)
        assert state.idle == 0
        assert sum(map(len, state.pipelines)) == nodes
        assert len(state.pipelines) >= 2
        assert sum(state.shares) == 24
    uneven = begun(system, 7)
    assert [len(members) for members in uneven.pipelines] == [4, 3]
    assert uneven.shares == (14, 10)


def test_what_runs_passes_check_and_takes_its_period(of: Setting) -> None:
    layer = replace(of.layers[0], gradients=0.25, step=0.125, message=0.01)
    system = Oobleck(replace(of, layers=(layer,) * 12, latency=0.01))
    for nodes in (6, 7, 10, 13):
        state = begun(system, nodes)
        ((schedule, profile),) = state.schedules()
        assert check(lower(schedule), about_to_run=True) == []
        assert simulate(lower(schedule), profile).period == pytest.approx(state.period)


def test_a_larger_pipeline_shrinks_and_only_missing_layers_are_copied(system: Oobleck) -> None:
    """(4, 3): of four stages of 3 layers the third dies, and three stages of 4 layers take 1, 2 and 1 more in."""
    before = begun(system, 7)
    change = lose(system, before, before.pipelines[0][2])
    state = after(change)
    assert (change.event, change.loss) == ("shrink", Loss.ITERATION)
    assert state.pipelines == ((0, 1, 3), before.pipelines[1])
    assert change.bytes == 1 + 2 + 1
    assert change.pause == Pause(detect=5.0, rebuild=2.0, copy=2.0)
    assert state.shares == (12, 12)


def test_a_pipeline_below_n0_borrows(system: Oobleck) -> None:
    before = begun(system, 7)
    change = lose(system, before, before.pipelines[1][0])
    assert (change.event, change.loss) == ("borrow", Loss.ITERATION)
    assert [len(members) for members in after(change).pipelines] == [3, 3]


def test_where_nobody_can_lend_pipelines_merge(system: Oobleck) -> None:
    before = begun(system, 9)
    assert [len(members) for members in before.pipelines] == [3, 3, 3]
    change = lose(system, before, 0)
    assert change.event == "merge"
    assert sorted(len(members) for members in after(change).pipelines) == [3, 5]


def test_too_few_nodes_stop_it_and_more_restart_it(system: Oobleck, of: Setting) -> None:
    change = lose(system, begun(system, 6), 4)
    assert (change.event, change.loss) == ("stop", Loss.CHECKPOINT)
    assert isinstance(change.state, Stopped)
    assert isinstance(system.change(change.state, NOBODY, NOBODY).state, Stopped)
    again = system.change(change.state, NOBODY, frozenset({9}))
    assert (again.event, again.pause) == ("restart", of.restart(detected=False))
    assert after(again).live == frozenset({0, 1, 2, 3, 5, 9})


def test_a_layer_without_a_replica_is_read_from_the_checkpoint(system: Oobleck, of: Setting) -> None:
    before = begun(system, 9)
    change = lose(system, before, *(members[1] for members in before.pipelines))
    assert (change.event, change.loss, change.pause) == ("restart", Loss.CHECKPOINT, of.restart())
    assert [len(members) for members in after(change).pipelines] == [3, 3]


def test_a_join_is_taken_in_with_what_it_lacks(system: Oobleck) -> None:
    change = system.change(begun(system, 6), NOBODY, frozenset({6}))
    assert (change.event, change.loss) == ("join", Loss.NOTHING)
    assert [len(members) for members in after(change).pipelines] == [3, 4]
    assert change.pause == Pause(rebuild=2.0, copy=3.0)
    assert change.bytes == 3 + 1


def test_several_workers_per_node_are_neighbours(of: Setting) -> None:
    """Nodes of two: templates of 4, 6, ... stages; the layers of a node's two workers are one range."""
    system = Oobleck(replace(of, node_of=tuple(slot // 2 for slot in range(12))))
    assert list(system.templates) == [2, 3, 4]
    state = begun(system)
    assert sum(map(len, state.pipelines)) == 6
    change = lose(system, state, 0)
    assert sum(map(len, after(change).pipelines)) == 5
    assert after(change).idle == 0


def test_a_node_with_another_number_of_workers_is_not_used(of: Setting) -> None:
    system = Oobleck(replace(of, node_of=(0, 0, 1, 1, 2, 2, 3, 3, 4)))
    assert begun(system).idle == 1


def test_memory_sets_n0_or_it_does_not_fit(of: Setting) -> None:
    assert min(Oobleck(replace(of, memory=(2.0,) * 4)).templates) == 6
    found = Oobleck(replace(of, memory=(1.0,) * 4)).begin(of.all_nodes)
    assert isinstance(found, DoesNotFit)
    assert (found.needed, found.cap) == (2, 1)
    assert "2 pipelines on 13 nodes have at most 6 stages each" in found.reason


def test_too_few_nodes_for_the_job_s_depth_are_no_matter_of_memory() -> None:
    """Without bytes nothing says that two stages fit on one worker, so a pipeline has the job's four stages."""
    for nodes in (4, 7):
        state = Oobleck(replace(setting(1, 4, 6), node_of=tuple(range(nodes)))).begin(frozenset(range(nodes)))
        assert isinstance(state, Stopped)
        assert state.reason == f"{nodes} node(s), 2 pipelines need 8"
    odd = Oobleck(replace(setting(3, 4, 6), node_of=tuple(slot // 3 for slot in range(12))))
    stopped = odd.begin(odd.setting.all_nodes)
    assert isinstance(stopped, Stopped)
    assert "no pipeline of whole nodes, of 3 worker(s) each" in stopped.reason
    alone = Oobleck(setting(1, 1, 1, node_of=(0, 1)))
    assert isinstance(alone.begin(frozenset({0, 1})), Stopped)


def test_a_plain_job_keeps_its_depth_and_the_rest_waits() -> None:
    system = Oobleck(setting(3, 4, 6))
    state = begun(system, 11)
    assert ([len(members) for members in state.pipelines], state.idle) == ([4, 4], 3)


def test_the_activations_of_1f1b_count(of: Setting) -> None:
    """Stage 0 of S holds min(S, batch) activations of its 12 / S layers."""
    layer = replace(of.layers[0], static=1.0, activation=1.0)
    system = Oobleck(replace(of, layers=(layer,) * 12, memory=(16.0,) * 4))
    assert min(system.templates) == 3
    assert min(Oobleck(replace(of, layers=(layer,) * 12, memory=(15.0,) * 4)).templates) == 4


@pytest.mark.search
def test_throughput_goes_with_the_nodes() -> None:
    """30 nodes, 26 layers, n0 = 5: tput(n) / tput(30) * 30 / n within 0.95 .. 1.10 for 20 to 30 nodes."""
    made = setting(5, 6, 64, layers=26, layer={"static": 1.0, "activation": 0.0}, memory=(6.0,) * 6)
    system = Oobleck(made)
    assert min(system.templates) == 5
    full = begun(system).period
    shares = [full / begun(system, nodes).period * 30 / nodes for nodes in range(20, 31)]
    assert 0.95 <= min(shares) <= max(shares) <= 1.10


@pytest.mark.search
@quick
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(1, 2)), max_size=12))
def test_whatever_dies_and_joins_its_schedules_pass_check(events: list[tuple[bool, int, int]]) -> None:
    layer = {"static": 1.0, "state": 1.0, "activation": 0.0}
    of = replace(setting(3, 4, 8, layers=12, layer=layer, memory=(4.0,) * 4), node_of=tuple(range(13)))
    system = Oobleck(of)
    state = system.begin(of.all_nodes)
    for is_failure, first, count in events:
        assert not isinstance(state, DoesNotFit)
        pool = sorted(state.live if is_failure else of.all_nodes - state.live)
        chosen = frozenset(pool[first % max(1, len(pool)) :][:count])
        live = state.live - chosen if is_failure else state.live | chosen
        change = system.change(state, chosen if is_failure else NOBODY, NOBODY if is_failure else chosen)
        state = change.state
        assert state.live == live
        if isinstance(state, OobleckRunning):
            used = [node for members in state.pipelines for node in members]
            assert len(used) == len(set(used))
            assert set(used) <= live
            assert sum(state.shares) == of.micro_batches
            ((schedule, profile),) = state.schedules()
            assert check(schedule) == []
            assert simulate(lower(schedule), profile).period == pytest.approx(state.period)
