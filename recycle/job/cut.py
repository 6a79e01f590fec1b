"""Prices of the stages of an elastic layout (`Shape.cut`), derived from the prices of fault-free stages.

Seconds and bytes of a fault-free stage are distributed over its units by weight, or evenly without weights. A message
is priced by the unit whose output crosses. Workspace and reduction latency are the maximum over a stage's parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from types import MappingProxyType

from recycle.errors import JobError
from recycle.job.profile import PER_STAGE, Profile
from recycle.job.sections import ModelSection, Sections
from recycle.job.shape import Shape

_NO_WEIGHTS: Mapping[str, Sequence[float]] = MappingProxyType({})


def profile_of_cut(
    profile: Profile,
    shape: Shape,
    fault_free_units: Sequence[int] = (),
    weights: Mapping[str, Sequence[float]] = _NO_WEIGHTS,
) -> Profile:
    """Return `profile` with one entry for each stage of `shape.cut`; `profile` itself for a shape without a cut.

    Numbers, and lists over the fault-free stages, describe fault-free stages. Lists with one entry per stage of the cut
    are kept; without `fault_free_units` this holds for all lists of that length.

    Args:
        fault_free_units: units of each fault-free stage; if empty, P * V stages of equal size, also fractional.
        weights: per price name, the weight of each unit in its stage's price; needs `fault_free_units`.

    Raises:
        JobError: a list has another length, or the cut has another number of units.
    """
    if not shape.cut:
        return profile
    count = len(fault_free_units) or shape.ranks * shape.chunks
    if fault_free_units and sum(fault_free_units) != shape.units:
        raise JobError(f"shape: the cut has {shape.units} units, the fault-free stages {sum(fault_free_units)}")
    ends = (
        [0.0, *accumulate(fault_free_units)]
        if fault_free_units
        else [shape.units * s / count for s in range(count + 1)]
    )
    cuts = list(pairwise([0, *accumulate(shape.cut)]))
    parts = [_overlaps(begin, end, ends) for begin, end in cuts]
    changes: dict[str, list[float]] = {}
    for name in PER_STAGE:
        value = getattr(profile, name)
        if value is None:
            continue
        if isinstance(value, list) and len(value) == shape.stages and len(value) != len(fault_free_units):
            continue
        of_stage = profile.per_stage(name, count)
        if name == "message":
            changes[name] = [of_stage[part[-1][0]] for part in parts]
        elif name in ("workspace", "reduce_latency"):
            changes[name] = [max(of_stage[stage] for stage, _ in part) for part in parts]
        elif name in weights:
            on_unit = _spread_by_weight(of_stage, weights[name], fault_free_units)
            changes[name] = [sum(on_unit[begin:end]) for begin, end in cuts]
        else:
            changes[name] = [sum(of_stage[stage] * share for stage, share in part) for part in parts]
    return replace(profile, **changes)  # type: ignore[arg-type]


def units_of(job: Sections) -> tuple[int, ...]:
    """Return the units of each fault-free stage of a job: its layers. Raises JobError if they do not divide.

    A job without `[model]` (which can only be planned), or of an emulated model, then has one unit per stage.
    """
    try:
        return tuple(job.layers_per_stage())
    except JobError:
        if job.model != ModelSection() and job.model.kind != "emulated":
            raise
        return (1,) * job.shape.stages


def _spread_by_weight(
    of_stage: Sequence[float], weights: Sequence[float], fault_free_units: Sequence[int]
) -> list[float]:
    prices: list[float] = []
    for price, (begin, end) in zip(of_stage, pairwise([0, *accumulate(fault_free_units)]), strict=True):
        total = sum(weights[begin:end])
        prices += [price * each / total if total else price / (end - begin) for each in weights[begin:end]]
    return prices


def _overlaps(begin: float, end: float, ends: Sequence[float]) -> list[tuple[int, float]]:
    parts = []
    for stage, (first, last) in enumerate(pairwise(ends)):
        inside = min(end, last) - max(begin, first)
        if inside > 1e-9:
            parts.append((stage, inside / (last - first)))
    return parts


@cache
def balanced(weights: tuple[float, ...], parts: int) -> tuple[int, ...]:
    """Split weights into `parts` contiguous parts that minimize the heaviest part; return the length of each part.

    Every part has at least one entry; equal weights are spread evenly. Dynamic programming over the first n weights in
    k parts, whose last part never starts earlier as n grows. Raises JobError if there are fewer weights than parts.
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise JobError(f"{count} layer(s) cannot be cut into {parts} stages")
    if len(set(weights)) == 1:
        return tuple(count * (part + 1) // parts - count * part // parts for part in range(parts))
    ends = [0.0, *accumulate(weights)]
    heaviest, cuts = ends, list[list[int]]()
    for k in range(2, parts + 1):
        cut, least, at = [0] * (count + 1), [inf] * (count + 1), k - 1
        for n in range(k, count + 1):
            while at + 1 < n and max(heaviest[at + 1], ends[n] - ends[at + 1]) <= max(heaviest[at], ends[n] - ends[at]):
                at += 1
            cut[n], least[n] = at, max(heaviest[at], ends[n] - ends[at])
        cuts.append(cut)
        heaviest = least
    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return tuple(b - a for a, b in pairwise([0, *reversed(bounds)]))


def even_ranks(weights: Sequence[float], sizes: Sequence[int], shape: Shape) -> list[int]:
    """Change the sizes of contiguous parts, the stages of `shape`, as long as that evens the sums of its ranks.

    One part of the rank with the largest sum gives an entry to another part at a time: first to lower the largest sum,
    then the sum of squares over ranks, then over parts. Limits: it may end before the best split.
    """
    total, hosted = sum(weights), [shape.stages_of_rank(rank) for rank in range(shape.ranks)]

    def sums(sizes: Sequence[int]) -> tuple[list[float], list[float]]:
        of_part = [sum(weights[begin:end]) / total for begin, end in pairwise([0, *accumulate(sizes)])]
        return [sum(of_part[part] for part in parts) for parts in hosted], of_part

    def unevenness(sizes: Sequence[int]) -> list[float]:
        of_rank, of_part = sums(sizes)
        squares = (sum(each * each for each in values) for values in (of_rank, of_part))
        return [round(each, 9) for each in (max(of_rank), *squares)]

    while True:
        of_rank, _ = sums(sizes)
        busiest = [part for part in hosted[of_rank.index(max(of_rank))] if sizes[part] > 1]
        pairs = [(part, other) for part in busiest for other in range(len(sizes)) if other != part]
        moved = [[size - (at == part) + (at == other) for at, size in enumerate(sizes)] for part, other in pairs]
        best = min(moved, key=unevenness, default=sizes)
        if unevenness(best) >= unevenness(sizes):
            return list(sizes)
        sizes = best
