"""ReCycle whose layers move: re-routed at once, moved at the next boundary where that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job import Job
from recycle.systems.recycle import ReCycle
from recycle.systems.recycle_elastic import ElasticReCycle
from recycle.systems.setting import Setting
from recycle.systems.system import Loss
from tests.systems.settings import Play


def setting(bandwidth: float = 1e3, chunks: int = 1) -> Setting:
    """Three pipelines of four workers with four layers each, whose bubbles hold no second worker's load."""
    text = f"[shape]\npipelines = 3\nranks = 4\nmicro_batches = 24\nchunks = {chunks}\n[model]\nlayers = 16\n"
    made = Setting.of(Job.from_toml(f"{text}[memory]\nlimit = {8 * chunks}\n"))
    layers = tuple(replace(layer, state=100.0) for layer in made.layers)
    return replace(made, layers=layers, bandwidth=bandwidth)


@pytest.mark.search
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_set_of_live_nodes_runs_the_faster_of_both(chunks: int) -> None:
    ours, plain = ElasticReCycle(setting(chunks=chunks)), ReCycle(setting(chunks=chunks))
    assert Play(ours).period <= Play(plain).period
    assert Play(plain, "0-4 6-11").period >= 72 / 2 * 3 * chunks
    moved = Play(ours, "0-4 6-11").state
    assert moved.period <= 1.06 * 72 * 4 * 3 * chunks / 11
    for schedule, profile in moved.schedules():
        assert check(schedule, profile=profile, limits=[8.0 * chunks] * 4) == []
        assert simulate(schedule, profile).period == moved.period


@pytest.mark.search
def test_a_failure_is_re_routed_first_and_layers_move_at_the_next_boundary() -> None:
    played, plain = Play(ElasticReCycle(setting())), Play(ReCycle(setting()))
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
def test_layers_stay_where_copying_takes_longer_than_it_saves() -> None:
    Play(ElasticReCycle(setting(bandwidth=1e-4))).play("-5: event=re-route, reconsider=False")
