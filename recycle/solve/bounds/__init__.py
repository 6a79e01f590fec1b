"""Lower bounds on the period: true for any assignment to live hosts and any order, so that a plan can print its gap.

The hosts of a stage are those of the loop placement, chunk c of rank r on stage c * P + r.

one_chunk   closed forms where a worker hosts one chunk
chunked     closed forms where it hosts several
fluid       a linear program over a few stages, which raises the former
grids       the times at which that program looks
rising      the bound beside a search, which it ends once it is met

Whole times make whole bounds: each bound is about E_s - S_s of one stage, or about the makespan; starts counted from
S_s and rounded down make a schedule still, so the smallest is whole, and what is proven may be rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    return max(rising_bounds(problem, deadline))


def rising_bounds(problem: Problem, deadline: Deadline | None = None) -> Iterator[float]:
    """Proven lower bounds as they are found, the closed form first, none below the one before it."""
    deadline = deadline or Deadline(None)
    if problem.grain not in (0, 1):
        yield from (problem.grain * bound for bound in rising_bounds(problem.in_grains(), deadline))
    else:
        yield from fluid.rising_bounds(problem, closed_form(problem), _chains(problem), deadline)


def closed_form(problem: Problem) -> float:
    """The same without the linear program: less, in a hundredth of the time, and each stage counts by itself.

    As every term looks at the hosts of one stage, the bound of dead workers on several stages is the largest of the
    bounds of each stage's dead alone, where all workers are alike.
    """
    if problem.shape.chunks > 1:
        return chunked.period(problem) if problem.staggered else chunked.makespan(problem)
    return one_chunk.period(problem) if problem.staggered else one_chunk.makespan(problem)


def _chains(problem: Problem) -> list[tuple[int, ...]]:
    """Stages to look at together: those of the ranks that other bounds point to, and all of a short pipeline."""
    shape, forms = problem.shape, one_chunk if problem.shape.chunks == 1 else chunked
    found, ranks = forms.detours(problem), range(shape.ranks)
    if shape.stages <= ALL_STAGES:
        together = [tuple(ranks), max(found)[1:]]
    else:
        _, _, longest = max(one for one in found if one[1] == 0)
        loaded = max(ranks, key=lambda r: forms.load(problem, r))
        held = max(ranks, key=lambda r: forms.memory(problem, r))
        together = [(0, longest), (0, loaded), (0, held), max(found)[1:], (held,)]
        together = together if shape.chunks == 1 else together[::-1]
    return [
        tuple(s for s in range(shape.stages) if s % shape.ranks in chosen)
        for chosen in dict.fromkeys(map(frozenset, together))
    ]
