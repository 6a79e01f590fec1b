"""Transfer times between neighboring stages by lane, a numbered directed pair of workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.solve.problem_arrays import Floats, Operations, lane_between


def _transfers(
    shape: Shape, dead: frozenset[Worker], profile: Profile
) -> Iterator[tuple[Operations, Operations, Floats]]:
    live = [
        np.array([k * shape.ranks + r for k in range(shape.pipelines) if Worker(k, r) not in dead])
        for r in range(shape.ranks)
    ]
    for boundary in range(shape.stages - 1):
        hosts, following = live[shape.rank_of(boundary)], live[shape.rank_of(boundary + 1)]
        near, far = (side.ravel() for side in np.meshgrid(hosts, following))
        near, far = near[near != far], far[near != far]
        if not len(near):  # neighboring stages have one host in common and no other
            continue
        for sender, receiver in ((near, far), (far, near)):
            yield sender, receiver, profile.transfer_seconds(shape, sender, receiver, boundary)


def link_times(shape: Shape, dead: frozenset[Worker], profile: Profile) -> tuple[float, ...]:
    """Return all transfer times, ascending: any live host of a stage may send to any host of the next."""
    times = {time for *_, seconds in _transfers(shape, dead, profile) for time in np.unique(seconds).tolist()}
    return tuple(sorted(times)) or (0.0,)


def hops_between(shape: Shape, dead: frozenset[Worker], profile: Profile) -> tuple[float, ...]:
    """Return `Problem.hops`: transfer time per lane; empty if links between neighboring ranks are uniform."""
    if not profile.links or shape.ranks == 1:
        return ()
    hops, unlike = np.zeros(3 * shape.worker_count * shape.pipelines), False
    for sender, receiver, seconds in _transfers(shape, dead, profile):
        lanes = lane_between(sender, receiver, shape.worker_count, shape.ranks)
        hops[lanes] = np.maximum(hops[lanes], seconds)
        unlike = unlike or len(np.unique(seconds)) > 1
    return tuple(hops.tolist()) if unlike else ()
