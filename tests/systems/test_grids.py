"""Fault-free grids take what closed forms say, and the best one is the best of all that fit."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job import Job
from recycle.job.layers import Layer
from recycle.systems.grids import PipelineGrids
from recycle.systems.setting import Setting


def setting(layers: int = 8, memory: float = 1e9) -> Setting:
    job = Job.from_toml("[shape]\npipelines = 4\nranks = 8\nmicro_batches = 6\n")
    priced = tuple(Layer(1.0, 1.0, 1.0, static=10.0) for _ in range(layers))
    return replace(Setting.of(job), layers=priced, memory=(memory,) * 8)


@pytest.mark.parametrize(("pipelines", "ranks"), [(4, 8), (3, 8), (5, 4), (24, 1), (7, 2)])
def test_1f1b_takes_its_closed_form(pipelines: int, ranks: int) -> None:
    grid = PipelineGrids(setting()).grid(pipelines, ranks)
    most = ceil(24 / pipelines)
    assert grid.micro_batches == most
    assert grid.period == pytest.approx((most + ranks - 1) * 3 * 8 / ranks)
    assert grid.fullest.needed == 8 / ranks * (10 + min(ranks, most))


def test_the_best_grid_is_the_best_that_fits() -> None:
    for memory in (1e9, 50.0, 30.0, 18.0):
        grids = PipelineGrids(setting(memory=memory))
        for slots in (1, 5, 13, 24, 32):
            all_grids = [grids.grid(slots // ranks, ranks) for ranks in range(1, min(slots, 8) + 1)]
            fitting = [grid.period for grid in all_grids if grid.fullest.fits]
            best = grids.best(slots)
            assert (best.period if best else None) == (min(fitting) if fitting else None)


def test_its_schedules_pass_the_check_and_hold_the_whole_batch() -> None:
    grids = PipelineGrids(setting())
    grid = grids.grid(5, 8)
    loads = []
    for schedule, profile in grids.schedules(grid):
        assert check(schedule, profile=profile) == []
        loads.append(schedule.shape.micro_batches)
    assert loads == [5, 4]
    assert simulate(*grids.schedules(grid)[0]).period == grid.period


def test_zero_bubble_is_another_family() -> None:
    plain, split = PipelineGrids(setting()).grid(4, 8), PipelineGrids(setting(), "zb-h1").grid(4, 8)
    assert split.period < plain.period


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zb-h2"])
def test_no_depth_is_given_up_that_splitting_the_backward_pass_makes_best(family: str) -> None:
    layers = tuple(Layer(1.0, 1.0, 1.0, static=1.0, gradients=1.0) for _ in range(16))
    grids = PipelineGrids(replace(setting(16), layers=layers, bandwidth=1.0), family)
    best = grids.best(32)
    assert best is not None
    assert best.period == min(grids.grid(32 // ranks, ranks).period for ranks in range(1, 17))
