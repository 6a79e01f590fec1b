"""Prices of an elastic layout's stages: those of fault-free stages, spread over the units that they are made of.

A layout cuts the model at other places than the P * V stages that a job is priced by (`Shape.cut`). Seconds and bytes
of a fault-free stage lie on its units by their weights, evenly where none are known; a message is that of the unit
behind which it crosses, a workspace and the latency of a reduction that of the largest part of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from types import MappingProxyType

from recycle.errors import JobError
from recycle.job.profile import Profile
from recycle.job.sections import ModelSection, Sections
from recycle.job.shape import Shape

_SPREAD = (
    *("forward", "backward_input", "backward_weight", "reduce", "step", "gather"),
    *("overlapped_pair", "redundant_forward"),
    *("activation", "recomputed_from", "static"),
)
_AT_A_PLACE = ("message", "workspace", "reduce_latency")
_NO_WEIGHTS: Mapping[str, Sequence[float]] = MappingProxyType({})


def profile_of_cut(
    profile: Profile, shape: Shape, whole: Sequence[int] = (), weights: Mapping[str, Sequence[float]] = _NO_WEIGHTS
) -> Profile:
    """`profile` with an entry for each stage of `shape.cut`; itself where the shape has none.

    A number, or a list over the fault-free stages, is that of fault-free stages. Other lists with an entry for each
    stage of the cut stand as they are, and without `whole` so do all lists with one.

    Args:
        whole: units of each fault-free stage; if left out P * V stages with as many units in each (which need not be a
            whole number).
        weights: of each unit by a price's name, for the share of a fault-free stage's price that lies on the unit; with
            `whole` only.

    Raises:
        JobError: a list has another length, or `whole` has not as many units as the cut.
    """
    if not shape.cut:
        return profile
    count = len(whole) or shape.ranks * shape.chunks
    if whole and sum(whole) != shape.units:
        raise JobError(f"shape: the cut has {shape.units} units, the fault-free stages {sum(whole)}")
    ends = [0.0, *accumulate(whole)] if whole else [shape.units * s / count for s in range(count + 1)]
    cuts = list(pairwise([0, *accumulate(shape.cut)]))
    parts = [_parts(begin, end, ends) for begin, end in cuts]
    changes: dict[str, list[float]] = {}
    for name in (*_SPREAD, *_AT_A_PLACE):
        value = getattr(profile, name)
        if value is None:
            continue
        if isinstance(value, list) and len(value) == shape.stages and len(value) != len(whole):
            continue
        of_stage = profile.per_stage(name, count)
        if name == "message":
            changes[name] = [of_stage[part[-1][0]] for part in parts]
        elif name in ("workspace", "reduce_latency"):
            changes[name] = [max(of_stage[stage] for stage, _ in part) for part in parts]
        elif name in weights:
            on_unit = _weighted(of_stage, weights[name], whole)
            changes[name] = [sum(on_unit[begin:end]) for begin, end in cuts]
        else:
            changes[name] = [sum(of_stage[stage] * share for stage, share in part) for part in parts]
    return replace(profile, **changes)  # type: ignore[arg-type]


def units_of(job: Sections) -> tuple[int, ...]:
    """Units of each fault-free stage of a job: its layers.

    Where they do not divide, a job without `[model]`, which can only be planned, and one of an emulated model have one
    for each stage.

    Raises:
        JobError: layers neither divide over the stages nor are stated.
    """
    try:
        return tuple(job.layers_per_stage())
    except JobError:
        if job.model != ModelSection() and job.model.kind != "emulated":
            raise
        return (1,) * job.shape.stages


def _weighted(of_stage: Sequence[float], weights: Sequence[float], whole: Sequence[int]) -> list[float]:
    """The price of each unit; evenly on the units of a stage that have no weight."""
    found: list[float] = []
    for price, (begin, end) in zip(of_stage, pairwise([0, *accumulate(whole)]), strict=True):
        total = sum(weights[begin:end])
        found += [price * each / total if total else price / (end - begin) for each in weights[begin:end]]
    return found


def _parts(begin: float, end: float, ends: Sequence[float]) -> list[tuple[int, float]]:
    """(fault-free stage, share of it) of the units from `begin` to `end`."""
    found = []
    for stage, (first, last) in enumerate(pairwise(ends)):
        inside = min(end, last) - max(begin, first)
        if inside > 1e-9:
            found.append((stage, inside / (last - first)))
    return found


@cache
def balanced(weights: tuple[float, ...], parts: int) -> tuple[int, ...]:
    """How many neighbours each of so many parts takes, at least one, so that the heaviest part is as light as can be.

    By dynamic programming over the first n weights in k parts, whose last one begins the later the larger n is; weights
    that are all alike are spread evenly.

    Raises:
        JobError: there are fewer weights than parts.
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
