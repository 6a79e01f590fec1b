"""The memory limit that keeps layers in place, the value with which they move, and its period."""

from math import inf
from typing import Any

import pytest

from recycle import Job, PlanError, Worker
from recycle.job import PricedJob, price
from recycle.job.pricing import parse_bytes
from recycle.job.sections import MemorySection
from recycle.plans import LayoutLimit, Plan, RaisedLimit
from recycle.solve.effort import Deadline
from recycle.solve.layout.limits import layout_limit
from recycle.solve.planner import plan, plan_for_training
from tests.solve.layout.test_elastic import ANALYTIC

SHAPE = "[shape]\npipelines = 2\nranks = {ranks}\nmicro_batches = {micro_batches}\n[model]\nlayers = {layers}\n"


def job(ranks: int = 2, micro_batches: int = 4, layers: int = 4, **memory: Any) -> PricedJob:
    text = SHAPE.format(ranks=ranks, micro_batches=micro_batches, layers=layers) + "[planner]\nlayout = 'elastic'\n"
    return price(Job.from_toml(text)).with_sections(memory=MemorySection(**memory))


def planned(its_job: PricedJob, dead: str = "1.1") -> Plan:
    return plan(its_job, [Worker.parse(dead)], steps=20)


@pytest.mark.search
def test_state_limit_is_named_with_the_value_that_moves_layers():
    """Each worker has two layers; one layer more is half of the state more."""
    unmoved = planned(job(4, 8, 8), "1.2")
    assert unmoved.layout_limit == LayoutLimit("limits", (RaisedLimit("memory.state_limit", 1.25, 1.5),), 29.0, (2, 3))
    assert (unmoved.period, unmoved.moves) == (48.0, ())
    assert Plan.from_text(unmoved.text()) == unmoved
    raised = planned(job(4, 8, 8, state_limit=1.5), "1.2")
    assert raised.period == 29.0
    assert raised.moves
    assert raised.layout_limit is None
    below = planned(job(4, 8, 8, state_limit=1.49), "1.2").layout_limit
    assert below == LayoutLimit("limits", (RaisedLimit("memory.state_limit", 1.49, 1.5),), 29.0, (2, 3))


@pytest.mark.parametrize(
    ("shape", "limit", "needed", "period"),
    [((2, 4, 4), 1, 2, 19.5), ((3, 4, 6), [3, 2, 1], [3, 2, 2], 18.0)],
    ids=["for all ranks", "for each rank"],
)
def test_activation_limit_is_named_with_the_value_that_moves_layers(shape, limit, needed, period):
    unmoved = planned(job(*shape, limit=limit, state_limit=1.5))
    assert unmoved.layout_limit == LayoutLimit("limits", (RaisedLimit("memory.limit", limit, needed),), period)
    assert not unmoved.moves
    raised = planned(job(*shape, limit=needed, state_limit=1.5))
    assert raised.period == period < unmoved.period
    assert raised.moves


def test_two_limits_are_named_if_neither_suffices():
    limit = planned(job(limit=1)).layout_limit
    both = RaisedLimit("memory.state_limit", 1.25, 1.5), RaisedLimit("memory.limit", 1, 2)
    assert limit == LayoutLimit("limits", both, 19.5, (2, 3))


def test_limit_in_bytes_is_named_in_its_unit():
    text = ANALYTIC.replace("state_limit = 2.0", 'state_limit = 2.0\nlimit = "4 GiB"').replace("ranks = 4", "ranks = 2")
    text = text.replace("micro_batches = 16", "micro_batches = 2").replace("layers = 8", "layers = 4")
    unmoved = planned(price(Job.from_toml(text)))
    (limit,) = unmoved.layout_limit.limits
    assert (limit.key, limit.value) == ("memory.limit", "4 GiB")
    assert isinstance(limit.needed, str)
    assert 4 * 2**30 < parse_bytes(limit.needed, limit.key) < 6 * 2**30
    raised = planned(price(Job.from_toml(text.replace("4 GiB", limit.needed))))
    assert raised.moves
    assert raised.period < unmoved.period


def test_bound_none_and_time_are_causes_without_values():
    its_job, dead = job(4, 8, 8, state_limit=8.0), [Worker(1, 2)]
    assert layout_limit(its_job, dead, 28.7, 28.5, Deadline(60)) == LayoutLimit("bound")
    assert layout_limit(its_job, dead, 28.9, 28.5, Deadline(60)) == LayoutLimit("none")
    assert layout_limit(job(4, 8, 8), dead, 48.0, 28.5, Deadline(0)) == LayoutLimit("time")


def test_limit_is_named_if_all_workers_of_a_rank_are_dead():
    """No worker holds the last two layers, so no plan exists to compare with."""
    dead = [Worker(0, 1), Worker(1, 1)]
    limit = layout_limit(job(), dead, inf, 0.0, Deadline(60))
    assert limit.limits == (RaisedLimit("memory.state_limit", 1.25, 2.0),)
    with pytest.raises(PlanError):
        plan_for_training(job(), (0, 2), failed=dead, moves=True)
    raised = Plan.from_text(plan_for_training(job(state_limit=2.0), (0, 2), failed=dead, moves=True))
    assert raised.period == limit.period
