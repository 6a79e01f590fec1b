"""A setting prices any cut as the job's profile prices its own; fault-free grids take what closed forms say."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job import Job
from recycle.job.layers import Layer, ring_seconds
from recycle.systems.grids import PipelineGrids
from recycle.systems.setting import Setting

PLAIN = """
[shape]
pipelines = 3
ranks = 4
micro_batches = 6
[times]
forward = [1.0, 2.0, 1.0, 1.5]
link = 0.25
step = 0.5
[memory]
limit = [4, 4, 3, 2]
weight_stash = 0.5
[cluster]
workers_per_node = 5
"""


def test_a_plain_jobs_own_cut_has_the_jobs_prices() -> None:
    job = Job.from_toml(PLAIN)
    setting = Setting.of(job)
    mine, theirs = setting.profile(setting.split, 3), job.profile()
    for name in ("forward", "backward_input", "backward_weight", "activation", "message"):
        assert mine.per_stage(name, 4) == theirs.per_stage(name, 4)
    assert mine.per_stage("step", 4) == [0.5] * 4
    assert (mine.latency, mine.weight_stash) == (0.25, 0.5)
    assert [setting.cap(rank, 4) for rank in range(4)] == [4, 4, 3, 2]
    assert (setting.nodes, setting.samples, setting.micro_batches) == (3, 18, 18)
    assert setting.slots({0, 2}) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert setting.least_ranks == 4


def test_layers_of_a_model_share_the_times_of_their_stage() -> None:
    job = Job.from_toml(PLAIN + "[model]\nlayers = 8\n[data]\nmicro_batch_size = 2\n")
    setting = Setting.of(job)
    assert setting.split == (2, 2, 2, 2)
    assert setting.profile(setting.split, 1).forward == [1.0, 2.0, 1.0, 1.5]
    assert setting.profile((4, 4), 1).forward == [3.0, 2.5]
    assert setting.samples == 36


def test_a_ring_moves_each_gradient_almost_twice() -> None:
    setting = replace(Setting.of(Job.from_toml(PLAIN)), bandwidth=100.0)
    assert ring_seconds(1000.0, 4, setting.bandwidth) == 2 * 3 / 4 * 10
    assert ring_seconds(1000.0, 1, setting.bandwidth) == 0
    assert setting.copy_seconds(50.0) == 0.25 + 0.5


def test_memory_says_how_short_a_pipeline_may_be() -> None:
    layers = tuple(Layer(1.0, 1.0, 1.0, static=10.0, activation=1.0) for _ in range(8))
    setting = replace(Setting.of(Job.from_toml(PLAIN)), layers=layers)
    for cap, least in ((11.0, 8), (22.0, 4), (33.0, 3), (87.0, 2), (88.0, 1), (10.0, 9)):
        assert replace(setting, memory=(cap,) * 4).least_ranks == least


def gridded(layers: int = 8, memory: float = 1e9) -> Setting:
    job = Job.from_toml("[shape]\npipelines = 4\nranks = 8\nmicro_batches = 6\n")
    priced = tuple(Layer(1.0, 1.0, 1.0, static=10.0) for _ in range(layers))
    return replace(Setting.of(job), layers=priced, memory=(memory,) * 8)


@pytest.mark.parametrize(("pipelines", "ranks"), [(4, 8), (3, 8), (5, 4), (24, 1), (7, 2)])
def test_1f1b_takes_its_closed_form(pipelines: int, ranks: int) -> None:
    grid = PipelineGrids(gridded()).grid(pipelines, ranks)
    most = ceil(24 / pipelines)
    assert grid.micro_batches == most
    assert grid.period == pytest.approx((most + ranks - 1) * 3 * 8 / ranks)
    assert grid.fullest.needed == 8 / ranks * (10 + min(ranks, most))


def test_the_best_grid_is_the_best_that_fits() -> None:
    for memory in (1e9, 50.0, 30.0, 18.0):
        grids = PipelineGrids(gridded(memory=memory))
        for slots in (1, 5, 13, 24, 32):
            all_grids = [grids.grid(slots // ranks, ranks) for ranks in range(1, min(slots, 8) + 1)]
            fitting = [grid.period for grid in all_grids if grid.fullest.fits]
            best = grids.best(slots)
            assert (best.period if best else None) == (min(fitting) if fitting else None)


def test_its_schedules_pass_the_check_and_hold_the_whole_batch() -> None:
    grids = PipelineGrids(gridded())
    grid = grids.grid(5, 8)
    loads = []
    for schedule, profile in grids.schedules(grid):
        assert check(schedule, profile=profile) == []
        loads.append(schedule.shape.micro_batches)
    assert loads == [5, 4]
    assert simulate(*grids.schedules(grid)[0]).period == grid.period


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zb-h2"])
def test_no_depth_is_given_up_that_splitting_the_backward_pass_makes_best(family: str) -> None:
    layers = tuple(Layer(1.0, 1.0, 1.0, static=1.0, gradients=1.0) for _ in range(16))
    grids = PipelineGrids(replace(gridded(16), layers=layers, bandwidth=1.0), family)
    best = grids.best(32)
    assert best is not None
    assert best.period == min(grids.grid(32 // ranks, ranks).period for ranks in range(1, 17))
