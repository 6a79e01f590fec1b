"""Jobs for the planner's tests: a few by name, and hypothesis strategies for small ones of any kind."""

from typing import Any

import msgspec
from hypothesis import strategies as st

from recycle import Job, Worker
from recycle.job import PricedJob, price
from recycle.solve.problem import Problem


def job(
    pipelines: int, ranks: int, micro_batches: int, limit: int | list[int] | None = None, **other: Any
) -> PricedJob:
    """A job of unit times; `other` may hold keys of [times] and [planner], `weight_stash`, `chunks` and `placement`."""
    shape = {"pipelines": pipelines, "ranks": ranks, "micro_batches": micro_batches}
    shape |= {key: other.pop(key) for key in ("chunks", "placement") if key in other}
    memory = {"limit": limit, "weight_stash": other.pop("weight_stash", 1.0)}
    keys = ("decoupled", "staggered", "reroute", "seed", "steps", "seconds", "move", "iterations_between_changes")
    planner = {key: other.pop(key) for key in keys if key in other}
    unpriced = msgspec.convert({"shape": shape, "memory": memory, "planner": planner, "times": other}, type=Job)
    unpriced.validate()
    return price(unpriced)


def worked_example(limit: int | list[int], **other: Any) -> PricedJob:
    """Three pipelines of four stages, six micro-batches each; worker 1.2 is the one to die."""
    return job(3, 4, 6, limit, **other)


DEAD = Worker(1, 2)

_time = st.sampled_from([0.5, 1.0, 1.0, 1.3, 2.0])


@st.composite
def small_jobs(draw: st.DrawFn) -> tuple[PricedJob, list[Worker]]:
    """A small job with any times, caps and techniques, and dead workers that leave each stage a live host."""
    pipelines, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    chunks = draw(st.sampled_from([1, 1, 1, 2]))
    slots = st.integers(chunks, 6)
    limit = draw(st.one_of(st.none(), slots, st.lists(slots, min_size=ranks, max_size=ranks)))
    per_stage = st.lists(_time, min_size=ranks * chunks, max_size=ranks * chunks)
    priced = job(
        pipelines, ranks, draw(st.integers(1, 4)), limit, chunks=chunks,
        placement=draw(st.sampled_from(["loop", "v"])) if chunks == 2 else "loop",
        forward=draw(per_stage), backward_input=draw(per_stage), backward_weight=draw(per_stage),
        link=draw(st.sampled_from([0.0, 0.0, 0.2, 1.0])), step=draw(st.sampled_from([0.0, 0.5])),
        weight_stash=draw(st.sampled_from([0.0, 0.5, 1.0])),
        decoupled=draw(st.booleans()), staggered=draw(st.booleans()), seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    dead = []
    for rank in range(ranks):
        count = draw(st.integers(0, pipelines - 1))
        dead += [Worker(k, rank) for k in draw(st.permutations(range(pipelines)))[:count]]
    return priced, dead


def small_problems() -> st.SearchStrategy[tuple[PricedJob, Problem]]:
    """The jobs of `small_jobs`, with their problems."""
    return small_jobs().map(lambda case: (case[0], Problem.from_job(*case)))
