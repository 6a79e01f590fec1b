"""Lower bounds on the period: true for any assignment to live hosts and any order, so that a plan can print its gap.

The hosts of a stage are those of the loop placement, chunk c of rank r on stage c * P + r.

one_chunk   closed forms where a worker hosts one chunk
chunked     closed forms where it hosts several
fluid       a linear program over a few stages, which raises the former

Whole times make whole bounds: each bound is about E_s - S_s of one stage, or about the makespan; starts counted from
S_s and rounded down make a schedule still, so the smallest is whole, and what is proven may be rounded up.
"""

from __future__ import annotations

from recycle.solve.bounds import chunked, fluid, one_chunk
from recycle.solve.deadline import Deadline
from recycle.solve.problem import Problem

ALL_STAGES = 4
"""Stages up to which the linear program looks at all of them at once."""


def lower_bound(problem: Problem, deadline: Deadline | None = None) -> float:
    """The best proven lower bound on the problem's period (with the barrier: its makespan).

    Args:
        deadline: linear programs that could not be solved by then are left out.
    """
    deadline = deadline or Deadline(None)
    if problem.grain not in (0, 1):
        return problem.grain * lower_bound(problem.in_grains(), deadline)
    bound = closed_form(problem)
    return bound if problem.shape.chunks > 1 else fluid.raise_bound(problem, bound, _chains(problem), deadline)


def closed_form(problem: Problem) -> float:
    """The same without the linear program: less, in a hundredth of the time, and each stage counts by itself.

    As every term looks at the hosts of one stage, the bound of dead workers on several stages is the largest of the
    bounds of each stage's dead alone, where all workers are alike.
    """
    if problem.shape.chunks > 1:
        return chunked.period(problem) if problem.staggered else chunked.makespan(problem)
    return one_chunk.period(problem) if problem.staggered else one_chunk.makespan(problem)


def _chains(problem: Problem) -> list[tuple[int, ...]]:
    """Stages to look at together: all of a short pipeline; else the first with those that other bounds point to."""
    found = one_chunk.detours(problem)
    stages = range(problem.shape.stages)
    if len(stages) <= ALL_STAGES:
        return [tuple(stages), *_in_pairs(max(found)[1:])]
    _, _, longest = max(one for one in found if one[1] == 0)
    loaded = max(stages, key=lambda s: one_chunk.load(problem, s))
    held = max(stages, key=lambda s: one_chunk.memory(problem, s))
    return _in_pairs((0, longest), (0, loaded), (0, held), max(found)[1:])


def _in_pairs(*pairs: tuple[int, int]) -> list[tuple[int, ...]]:
    """Each pair once, a stage beside itself once."""
    return list(dict.fromkeys(tuple(sorted(set(pair))) for pair in pairs))
