"""Assignments: the live worker that runs each micro-batch at each stage, and its slot.

*By slots* divides an iteration into slots, in which a given number of pipelines run one micro-batch each. Pipelines
with the most remaining micro-batches go first, which minimizes the number of slots and spreads re-routed work evenly.

*By load* gives each micro-batch without a home to the host with the earliest end; a slow worker keeps as many of its
own as it completes by then. If peers are alike, the numbers of two hosts of a stage differ by at most one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from recycle.solve.problem import TOLERANCE, Problem
from recycle.solve.problem_arrays import Operations


@dataclass(frozen=True, eq=False)
class Assignment:
    """Host of every (stage, micro-batch), and optionally the slot of every micro-batch.

    Attributes:
        host: worker index of each (stage, micro-batch), flat.
        slot: slot of each micro-batch, from 0; None for an assignment without slots.
        is_free_of_clashes: no worker has two micro-batches of one stage in one slot.
    """

    host: Operations
    slot: Operations | None = None
    is_free_of_clashes: bool = False

    @property
    def slots(self) -> int:
        assert self.slot is not None
        return int(self.slot.max()) + 1


def possible_assignments(problem: Problem) -> list[Assignment]:
    """Return the assignments to try, at least one, the generally best first."""
    slots = assign_by_slots(problem)
    if not problem.dead and problem.peers_are_alike:
        return [slots]
    assignments = [slots]
    for speed in dict.fromkeys((problem.speed, (1.0,) * problem.shape.worker_count)):
        by_load = assign_by_load(replace(problem, speed=speed))
        if not any(np.array_equal(by_load.host, other.host) for other in assignments):
            assignments.append(by_load)
    assignments = assignments if problem.peers_are_alike else [*assignments[1:], slots]
    if problem.hops:
        return [*(avoid_slow_links(problem, assignment) for assignment in assignments), *assignments]
    return assignments


def home_hosts(problem: Problem) -> Operations:
    """Return [stages, pipelines, micro-batches per pipeline], the worker of each in the fault-free layout."""
    shape = problem.shape
    homes = np.arange(shape.pipelines)[None, :] * shape.ranks + problem.rank_of[:, None]
    return np.repeat(homes[:, :, None], shape.micro_batches, axis=2)


def assign_by_slots(problem: Problem, running: int | None = None) -> Assignment:
    """Return the assignment by slots, which assumes that peers are alike.

    Args:
        running: pipelines that run a micro-batch in each slot. None for the number of live workers of the poorest
            stage; then no worker has two micro-batches of one stage in one slot.
    """
    shape, stages = problem.shape, problem.shape.stages
    host = home_hosts(problem)
    if not problem.dead:
        return Assignment(host.ravel(), np.arange(problem.micro_batches) % shape.micro_batches, is_free_of_clashes=True)
    slot = np.empty((shape.pipelines, shape.micro_batches), dtype=np.int64)
    due = [0] * shape.pipelines
    live = [{worker // shape.ranks for worker in hosts} for hosts in problem.hosts]
    taken = [[0] * shape.pipelines for _ in range(shape.ranks)]  # counts all chunks of a worker
    disturbed = [s for s in range(stages) if len(live[s]) < shape.pipelines]
    fewest = min(map(len, live))
    running = running or fewest
    for place, at_work in enumerate(_slots(problem, running)):
        running_now = set(at_work)
        for s in disturbed:
            if not (displaced := sorted(running_now - live[s])):
                continue
            rank = int(problem.rank_of[s])
            counts = taken[rank]
            loads = [(int(h in running_now), counts[h], h) for h in live[s]]  # of this slot, then of all
            heapq.heapify(loads)
            for k in displaced:
                here, count, h = heapq.heappop(loads)
                host[s, k, due[k]] = h * shape.ranks + rank
                counts[h] = count + 1
                heapq.heappush(loads, (here + 1, count + 1, h))
        for k in at_work:
            slot[k, due[k]] = place
            due[k] += 1
    return Assignment(host.ravel(), slot.ravel(), is_free_of_clashes=running <= fewest)


def avoid_slow_links(problem: Problem, assignment: Assignment) -> Assignment:
    """Exchange hosts of a stage within a slot to reduce the time on links.

    Without slots, micro-batches with the same index are exchanged. Numbers of micro-batches per host do not change.
    """
    if not problem.reroute:
        return assignment
    shape = problem.shape
    host = assignment.host.reshape(shape.stages, -1).copy()
    slot = np.arange(problem.micro_batches) % shape.micro_batches if assignment.slot is None else assignment.slot

    def cost(stage: int, micro_batch: int, worker: int) -> float:
        near = [int(host[s, micro_batch]) for s in (stage - 1, stage + 1) if 0 <= s < shape.stages]
        return sum(problem.hop_between(worker, w) + problem.hop_between(w, worker) for w in near)

    for place in range(int(slot.max()) + 1):
        together = np.flatnonzero(slot == place).tolist()
        for s in range(1, shape.stages):
            for g in together:
                host_now = int(host[s, g])
                most, other = TOLERANCE, g
                now = cost(s, g, host_now)
                if now <= 4 * problem.links[0] + TOLERANCE:
                    continue
                for h in together:
                    host_then = int(host[s, h])
                    gain = now + cost(s, h, host_then) - cost(s, g, host_then) - cost(s, h, host_now)
                    if host_then != host_now and gain > most + TOLERANCE:
                        most, other = gain, h
                host[s, g], host[s, other] = host[s, other], host_now
    return replace(assignment, host=host.ravel())


def assign_by_load(problem: Problem) -> Assignment:
    """Return the assignment by load, taking micro-batches by index."""
    shape, host = problem.shape, home_hosts(problem)
    units = np.zeros(shape.worker_count, dtype=np.int64)  # counts all chunks of a worker
    for s, live in enumerate(problem.hosts):
        kept = _kept(problem, live, units)
        moved = [(j, w // shape.ranks) for w in live for j in _not_kept(shape.micro_batches, kept[w])]
        units[live] += [kept[w] for w in live]
        load = [(problem.speed[w] * (int(units[w]) + 1), place, w) for place, w in enumerate(live)]
        heapq.heapify(load)
        dead = set(range(shape.pipelines)) - {w // shape.ranks for w in live}
        for j, k in sorted([*product(range(shape.micro_batches), dead), *moved]):
            finished, place, w = heapq.heappop(load)
            host[s, k, j] = w
            units[w] += 1
            heapq.heappush(load, (finished + problem.speed[w], place, w))
    return Assignment(host.ravel())


def assign_to_peers(home: Operations, hosts: Sequence[Sequence[int]]) -> Operations:
    """Assign micro-batches of dead workers to the peers with the fewest, and return the worker of each micro-batch.

    Args:
        home: [stages, micro-batches], worker index, dead or alive.
        hosts: live workers of each stage.
    """
    host = home.copy()
    for stage, live in enumerate(hosts):
        load = {worker: int((home[stage] == worker).sum()) for worker in live}
        for micro_batch in np.flatnonzero(~np.isin(home[stage], live)).tolist():
            peer = min(live, key=lambda worker: (load[worker], worker))
            load[peer] += 1
            host[stage, micro_batch] = peer
    return host


def _slots(problem: Problem, most: int) -> list[list[int]]:
    pipelines = problem.shape.pipelines
    remaining = [problem.shape.micro_batches] * pipelines
    slots: list[list[int]] = []
    while any(remaining):
        by_need = sorted(range(pipelines), key=lambda k: (-remaining[k], (k - len(slots)) % pipelines))
        running = sorted(k for k in by_need[:most] if remaining[k])
        for k in running:
            remaining[k] -= 1
        slots.append(running)
    return slots


def _kept(problem: Problem, live: list[int], units: Operations) -> dict[int, int]:
    m = problem.shape.micro_batches
    if not problem.reroute or len({problem.speed[w] for w in live}) == 1:
        return dict.fromkeys(live, m)
    counts = dict.fromkeys(live, 0)
    # among hosts with equal ends, one whose own micro-batches remain goes first
    load = [(problem.speed[w] * (int(units[w]) + 1), False, place, w) for place, w in enumerate(live)]
    heapq.heapify(load)
    for _ in range(problem.micro_batches):
        finished, _, place, w = heapq.heappop(load)
        counts[w] += 1
        heapq.heappush(load, (finished + problem.speed[w], counts[w] >= m, place, w))
    return {w: min(m, count) for w, count in counts.items()}


def _not_kept(count: int, kept: int) -> list[int]:
    if kept == count:
        return []
    return [j for j in range(count) if (j + 1) * kept // count == j * kept // count]
