"""Hostings: candidate assignments of units and micro-batches to live workers.

chains     rows of workers that each host a whole model; a chain's micro-batches stay in the chain
helpers    ranges of any workers with the fewest copies; workers outside whole pipelines help these
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.solve.constants import CLOSE, LOADS, MOST_CHAINS
from recycle.solve.layout.chains import Chains, candidates
from recycle.solve.layout.hosts import assign, home_pipelines
from recycle.solve.layout.ranges import balanced, cheapest_ranges
from recycle.solve.layout.routes import Routes, routes_of
from recycle.solve.layout.units import Parts, Units, count_shared, count_units, ranges_from_cut
from recycle.solve.problem_arrays import Operations


@dataclass(frozen=True, eq=False)
class Hosting:
    """Units that each worker hosts and runs.

    Attributes:
        parts: units of each worker.
        groups: chain or pipeline of each worker.
        quotas: [workers, units], micro-batches of each unit that a worker runs.
        seconds: compute time of the busiest worker.
    """

    workers: tuple[Worker, ...]
    parts: tuple[Parts, ...]
    groups: tuple[int, ...]
    quotas: Operations
    seconds: float

    @property
    def wanted(self) -> dict[Worker, Parts]:
        """Return the units of each worker, in the order of their groups."""
        order = sorted(range(len(self.workers)), key=lambda i: (self.groups[i], self.parts[i]))
        return {self.workers[i]: self.parts[i] for i in order}

    def routes(self) -> Routes:
        return routes_of(self.workers, self.quotas, self.groups, self.parts)

    def copied(self, units: Units) -> int:
        """Return the number of units that workers host and did not host before."""
        return _copied(units, self.workers, self.parts)


def hostings(
    units: Units, shape: Shape, live: Sequence[Worker], profile: Profile, nodes: Mapping[Worker, int], below: float
) -> Iterator[Hosting]:
    """Yield hostings on the live workers with less than `below` seconds on the busiest worker.

    A unit with two or more live hosts keeps at least two, on several of `nodes` if possible, so that no death loses
    state.
    """
    spare = _hosts_kept(units, live)
    for hosting in _all_hostings(units, shape, live, profile, nodes, below):
        if (_hosts_of(units, hosting.parts) >= spare).all():
            yield hosting


def _hosts_kept(units: Units, live: Sequence[Worker]) -> Operations:
    return np.minimum(_hosts_of(units, [units.fault_free[worker.rank] for worker in live]), 2)


def _hosts_of(units: Units, hosted: Sequence[Parts]) -> Operations:
    hosts = np.zeros(len(units), dtype=np.int64)
    for begin, end in (part for parts in hosted for part in parts):
        hosts[begin:end] += 1
    return hosts


def _all_hostings(
    units: Units, shape: Shape, live: Sequence[Worker], profile: Profile, nodes: Mapping[Worker, int], below: float
) -> Iterator[Hosting]:
    speeds = [profile.speed_of(worker) for worker in live]
    count = shape.global_micro_batches
    if len(set(speeds)) == 1:
        for chains in _of_interest(units, shape, len(live), count, below / speeds[0]):
            yield _of_chains(units, live, chains, nodes)
    had = [units.present_parts(worker) for worker in live]
    least = count * float(units.seconds.sum()) / sum(1 / speed for speed in speeds)
    seen: list[Mapping[Worker, Parts]] = []
    hosts = _hosts_wanted(units, shape, live)
    for factor in LOADS:
        tries = (cheapest_ranges(units, had, speeds, count, least * factor, each) for each in hosts)
        wanted = next((ranges for ranges in tries if ranges is not None), None)
        if wanted is None:
            continue
        helped = _of_ranges(units, live, profile, wanted, count, nodes)
        if helped is None or helped.seconds >= below:
            continue
        if helped.wanted not in seen:
            seen.append(helped.wanted)
            yield helped


def hosting_from_layout(units: Units, shape: Shape, held: Mapping[Worker, Parts], profile: Profile) -> Hosting | None:
    """Return the hosting in which workers run the units that they hold; None if a unit has no host.

    Every worker runs a micro-batch of each of its units if there are enough, so that it keeps hosting them.
    """
    workers, hosted, count = list(held), list(held.values()), shape.global_micro_batches
    tries = (_balanced_hosting(units, workers, hosted, profile, count, least) for least in (1, 0))
    return next(filter(None, tries), None)


def _hosts_wanted(units: Units, shape: Shape, live: Sequence[Worker]) -> list[tuple[int, ...]]:
    kept, count = np.maximum(_hosts_kept(units, live), 1), len(units)
    tries = [tuple(kept.tolist()), (1,) * count]
    if shape.pipelines > 1 and len(live) * units.most_static >= 2 * float(units.static.sum()):
        tries.insert(0, (2,) * count)
    return list(dict.fromkeys(tries))


def _of_interest(units: Units, shape: Shape, live: int, micro_batches: int, below: float) -> list[Chains]:
    promising = [chains for chains in candidates(units, live, micro_batches) if chains.seconds < below]
    if not promising:
        return []
    near = [chains for chains in promising if chains.seconds <= promising[0].seconds * CLOSE]
    near.sort(key=lambda chains: (abs(len(chains.cuts) - shape.pipelines), chains.seconds))
    return [*near, *promising[len(near) :]][:MOST_CHAINS]


def _of_chains(units: Units, live: Sequence[Worker], chains: Chains, nodes: Mapping[Worker, int]) -> Hosting:
    ranges = [part for cut in chains.cuts for part in ranges_from_cut(cut)]
    groups = [k for k, cut in enumerate(chains.cuts) for _ in cut]
    homes = dict(enumerate(home_pipelines(live, len(chains.cuts))))
    quotas = np.zeros((len(ranges), len(units)), dtype=np.int64)
    for i, (group, (begin, end)) in enumerate(zip(groups, ranges, strict=True)):
        quotas[i, begin:end] = chains.shares[group]
    parts: list[Parts] = [(part,) for part in ranges]
    workers = _apart(units, assign(units, live, parts, [homes.get(k) for k in groups]), parts, live, nodes)
    return Hosting(tuple(workers), tuple(parts), tuple(groups), quotas, chains.seconds)


def _of_ranges(
    units: Units,
    live: Sequence[Worker],
    profile: Profile,
    wanted: Sequence[tuple[Parts, float]],
    micro_batches: int,
    nodes: Mapping[Worker, int],
) -> Hosting | None:
    workers: list[Worker] = []
    hosted: list[Parts] = []
    for speed in sorted({speed for _, speed in wanted}):
        parts_of_speed = [parts for parts, part_speed in wanted if part_speed == speed]
        alike = [worker for worker in live if profile.speed_of(worker) == speed]
        chosen = assign(units, alike, parts_of_speed)
        workers += _apart(units, chosen, parts_of_speed, alike, nodes)
        hosted += parts_of_speed
    return _balanced_hosting(units, workers, hosted, profile, micro_batches, least=1)


def _balanced_hosting(
    units: Units,
    workers: Sequence[Worker],
    hosted: Sequence[Parts],
    profile: Profile,
    micro_batches: int,
    least: int,
) -> Hosting | None:
    speeds = [profile.speed_of(worker) for worker in workers]
    result = balanced(units, hosted, speeds, micro_batches, least=least)
    if result is None:
        return None
    seconds, quotas = result
    keep = np.flatnonzero(quotas.any(axis=1)).tolist()
    used = []
    for i in keep:
        runs = (begin + np.flatnonzero(quotas[i, begin:end]) for begin, end in hosted[i])
        used.append(tuple((int(at[0]), int(at[-1]) + 1) for at in runs if len(at)))
    kept = tuple(workers[i] for i in keep)
    return Hosting(kept, tuple(used), tuple(worker.pipeline for worker in kept), quotas[keep], seconds)


def _apart(
    units: Units,
    workers: Sequence[Worker],
    hosted: Sequence[Parts],
    live: Sequence[Worker],
    nodes: Mapping[Worker, int],
) -> list[Worker]:
    if not nodes:
        return list(workers)

    def on_one_node(order: Sequence[Worker]) -> list[int]:
        on: list[set[int]] = [set() for _ in range(len(units))]
        for worker, parts in zip(order, hosted, strict=False):
            for begin, end in parts:
                for each in on[begin:end]:
                    each.add(nodes[worker])
        return [u for u, each in enumerate(on) if len(each) < 2]

    order_of_all = [*workers, *sorted(set(live).difference(workers))]  # workers without units at the end
    while bad := on_one_node(order_of_all):
        tries = []
        for i in [i for i, parts in enumerate(hosted) if count_shared(parts, ((bad[0], bad[0] + 1),))]:
            for j in range(len(order_of_all)):
                if nodes[order_of_all[j]] != nodes[order_of_all[i]]:
                    other = list(order_of_all)
                    other[i], other[j] = other[j], other[i]
                    tries.append((len(on_one_node(other)), _copied(units, other, hosted), other))
        best = min(tries, key=lambda attempt: attempt[:2], default=None)
        if best is None or best[0] >= len(bad):
            break
        order_of_all = best[2]
    return order_of_all[: len(workers)]


def _copied(units: Units, workers: Sequence[Worker], hosted: Sequence[Parts]) -> int:
    pairs = zip(hosted, map(units.present_parts, workers), strict=False)  # further workers host nothing
    return sum(count_units(parts) - count_shared(parts, had) for parts, had in pairs)
