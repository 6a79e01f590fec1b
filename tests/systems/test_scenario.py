"""A scenario prices any cut as the job's profile prices its own; fault-free grids follow closed forms."""

from dataclasses import replace
from importlib import import_module
from math import ceil

import pytest

from recycle.job import Job
from recycle.job.layers import Layer
from recycle.systems import Running, Setting
from recycle.systems.checkpoint_restart import CheckpointRestart
from recycle.systems.grids import PipelineGrids
from recycle.systems.recycle import ReCycle
from recycle.systems.scenario import Scenario
from recycle.systems.system import ActiveConfiguration

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


def test_a_plain_jobs_own_cut_has_the_jobs_prices():
    job = Job.from_toml(PLAIN)
    scenario = Scenario.of(job)
    own, stated = scenario.profile(scenario.split, 3), job.profile()
    for name in ("forward", "backward_input", "backward_weight", "activation", "message"):
        assert own.per_stage(name, 4) == stated.per_stage(name, 4)
    assert own.per_stage("step", 4) == [0.5] * 4
    assert (own.latency, own.weight_stash) == (0.25, 0.5)
    assert [scenario.cap(rank, 4) for rank in range(4)] == [4, 4, 3, 2]
    assert (scenario.nodes, scenario.samples, scenario.micro_batches) == (3, 18, 18)
    assert scenario.slots({0, 2}) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert scenario.least_ranks == 4


def test_layers_of_a_model_share_the_times_of_their_stage():
    job = Job.from_toml(PLAIN + "[model]\nlayers = 8\n[data]\nmicro_batch_size = 2\n")
    scenario = Scenario.of(job)
    assert scenario.split == (2, 2, 2, 2)
    assert scenario.profile(scenario.split, 1).forward == [1.0, 2.0, 1.0, 1.5]
    assert scenario.profile((4, 4), 1).forward == [3.0, 2.5]
    assert scenario.samples == 36


def test_memory_limits_how_short_a_pipeline_is():
    layers = tuple(Layer(1.0, 1.0, 1.0, static=10.0, activation=1.0) for _ in range(8))
    scenario = replace(Scenario.of(Job.from_toml(PLAIN)), layers=layers)
    for cap, least in ((11.0, 8), (22.0, 4), (33.0, 3), (87.0, 2), (88.0, 1), (10.0, 9)):
        assert replace(scenario, memory=(cap,) * 4).least_ranks == least


def gridded(memory=1e9) -> Scenario:
    job = Job.from_toml("[shape]\npipelines = 4\nranks = 8\nmicro_batches = 6\n")
    priced = (Layer(1.0, 1.0, 1.0, static=10.0, gradients=1.0),) * 8
    return replace(Scenario.of(job), layers=priced, memory=(memory,) * 8)


@pytest.mark.parametrize(("pipelines", "ranks"), [(4, 8), (3, 8), (5, 4), (24, 1), (7, 2)])
def test_1f1b_takes_its_closed_form(pipelines, ranks):
    grid = PipelineGrids(gridded()).grid(pipelines, ranks)
    most = ceil(24 / pipelines)
    assert grid.micro_batches == most
    assert grid.period == pytest.approx((most + ranks - 1) * 3 * 8 / ranks)
    assert grid.fullest.needed == 8 / ranks * (10 + min(ranks, most))


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("memory", [1e9, 50.0, 18.0])
def test_the_best_grid_is_the_fastest_that_fits(family, memory):
    grids = PipelineGrids(replace(gridded(memory), bandwidth=1.0), family)
    for slots in (5, 13, 32):
        all_grids = [grids.grid(slots // ranks, ranks) for ranks in range(1, min(slots, 8) + 1)]
        fitting = [grid.period for grid in all_grids if grid.fullest.fits]
        best = grids.best(slots)
        assert (best and best.period) == min(fitting, default=None)


@pytest.mark.parametrize("placement", ["loop", "v", "auto"])
def test_other_shapes_have_one_chunk_on_the_loop(placement):
    shape = f'[shape]\npipelines = 2\nranks = 2\nmicro_batches = 4\nchunks = 2\nplacement = "{placement}"\n'
    base = Scenario.of(Job.from_toml(f'{shape}[times]\nprofile = "analytic"\n[model]\nlayers = 8\nhidden = 1024\n'))
    assert ReCycle(base.with_shape(1, 4)).scenario.shape.placement == "loop"


def test_former_names_of_scenario_and_configuration():
    former = import_module("recycle.systems.setting"), import_module("recycle.systems.system")
    assert (former[0].Setting, former[1].Running) == (Scenario, ActiveConfiguration) == (Setting, Running)
    assert CheckpointRestart(gridded()).setting.nodes == gridded().nodes
