"""Prices of an elastic layout's stages: those of fault-free stages, spread over the units that they are made of.

A layout cuts the model at other places than the P * V stages that a job is priced by (`Shape.cut`). Seconds and bytes
of a fault-free stage lie evenly on its units; a message is that of the unit behind which it crosses, and a workspace
that of the largest part of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from recycle.errors import JobError
from recycle.profile import Profile
from recycle.sections import ModelSection, Sections
from recycle.shape import Shape

_SPREAD = (
    *("forward", "backward_input", "backward_weight", "reduce", "step", "overlapped_pair", "redundant_forward"),
    *("activation", "recomputed_from", "static"),
)
_AT_A_PLACE = ("message", "workspace")


def profile_of_cut(profile: Profile, shape: Shape, whole: Sequence[int] = ()) -> Profile:
    """`profile` with an entry for each stage of `shape.cut`; itself where the shape has none.

    Lists with an entry for each stage of the cut stand as they are. A number, or a list over the ranks, is that of
    fault-free stages.

    Args:
        whole: units of each fault-free stage; if left out one stage for each of the shape's ranks, with as many units
            in each (which need not be a whole number).

    Raises:
        JobError: a list has another length, or `whole` has not as many units as the cut.
    """
    if not shape.cut:
        return profile
    ranks = len(whole) or shape.ranks
    if whole and sum(whole) != shape.units:
        raise JobError(f"shape: the cut has {shape.units} units, the fault-free stages {sum(whole)}")
    ends = [0.0, *accumulate(whole)] if whole else [shape.units * r / ranks for r in range(ranks + 1)]
    parts = [_parts(begin, end, ends) for begin, end in pairwise([0, *accumulate(shape.cut)])]
    changes: dict[str, list[float]] = {}
    for name in (*_SPREAD, *_AT_A_PLACE):
        value = getattr(profile, name)
        if value is None or (isinstance(value, list) and len(value) == shape.stages):
            continue
        of_rank = profile.per_stage(name, ranks)
        if name == "message":
            changes[name] = [of_rank[part[-1][0]] for part in parts]
        elif name == "workspace":
            changes[name] = [max(of_rank[rank] for rank, _ in part) for part in parts]
        else:
            changes[name] = [sum(of_rank[rank] * share for rank, share in part) for part in parts]
    return replace(profile, **changes)  # type: ignore[arg-type]


def units_of(job: Sections) -> tuple[int, ...]:
    """Units of each fault-free stage of a job: its layers, or one where it has no `[model]`. Raises JobError."""
    return (1,) * job.shape.stages if job.model == ModelSection() else tuple(job.layers_per_stage())


def _parts(begin: float, end: float, ends: Sequence[float]) -> list[tuple[int, float]]:
    """(fault-free stage, share of it) of the units from `begin` to `end`."""
    found = []
    for rank, (first, last) in enumerate(pairwise(ends)):
        inside = min(end, last) - max(begin, first)
        if inside > 1e-9:
            found.append((rank, inside / (last - first)))
    return found
