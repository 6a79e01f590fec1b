"""A setting prices any cut of the model as the job's profile prices its own."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from recycle.errors import JobError
from recycle.job import Job
from recycle.job.layers import Layer, ring_seconds
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


def test_the_balanced_cut_is_the_best_there_is() -> None:
    chance = random.Random(3)
    for count in (1, 4, 7):
        layers = tuple(Layer(chance.choice([1.0, 2.0, 5.0]), 1.0, 1.0) for _ in range(count))
        setting = replace(Setting.of(Job.from_toml(PLAIN)), layers=layers)
        for stages in range(1, count + 1):
            split = setting.balanced(stages)
            cuts = [(0, *inner, count) for inner in itertools.combinations(range(1, count), stages - 1)]
            slowest = min(max(sum(x.seconds for x in layers[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
            assert max(sum(x.seconds for x in stage) for stage in setting.stages(split)) == slowest
            assert min(split) >= 1
    with pytest.raises(JobError, match="7 layer"):
        setting.balanced(8)


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
