"""Assignments: which live worker runs each micro-batch at each stage, and in which slot.

*By slots* an iteration is cut into slots. In each slot every pipeline runs at most one
micro-batch, and a given number of pipelines run one. The pipelines with most left to do go first, which gives the
fewest slots possible and spreads what is re-routed evenly over time and peers. Where no more run than the stage with
the fewest live workers has, the micro-batches of dead workers find at each stage a live worker whose own pipeline runs
nothing in the slot, so that no worker has two of one stage in one slot; where more run, workers of that stage take two
in some slots. With several chunks per worker, those of one micro-batch may go to different peers.

*By load* each micro-batch without a home goes to the host that would be done with it first, and a slow worker keeps
only as many of its own as it is done with by then. Where peers are alike, no host of a stage has two more than another;
that is less for the workers of a stage with few dead than they have by slots, which follow the poorest stage. Where
peers are not alike, it is tried as if they were, too.

Where links are unlike, each assignment is tried with hosts exchanged so that little goes over slow ones, too.
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
    """A host for every (stage, micro-batch), and perhaps a slot for every micro-batch.

    Attributes:
        host: worker of each (stage, micro-batch), by index, flat.
        slot: place of each micro-batch in the iteration, from 0 on; None where they are assigned without slots.
        is_free_of_clashes: no worker has two micro-batches of one stage in one slot.
    """

    host: Operations
    slot: Operations | None = None
    is_free_of_clashes: bool = False

    @property
    def slots(self) -> int:
        """The number of slots. Raises ValueError for an assignment without slots."""
        if self.slot is None:
            raise ValueError("the assignment has no slots")
        return int(self.slot.max()) + 1


def possible_assignments(problem: Problem) -> list[Assignment]:
    """The assignments worth a try, one at least, the generally best first."""
    slots = by_slots(problem)
    if not problem.dead and problem.peers_are_alike:
        return [slots]
    found = [slots]
    for speed in dict.fromkeys((problem.speed, (1.0,) * problem.shape.worker_count)):
        one = by_load(replace(problem, speed=speed))
        if not any(np.array_equal(one.host, other.host) for other in found):
            found.append(one)
    found = found if problem.peers_are_alike else [*found[1:], slots]
    return [*(around_slow_links(problem, one) for one in found), *found] if problem.hops else found


def at_home(problem: Problem) -> Operations:
    """[stages, pipelines, micro-batches of each], the worker where each would run if all were alive."""
    shape, stages = problem.shape, problem.shape.stages
    homes = np.arange(shape.pipelines)[None, :] * shape.ranks + np.arange(stages)[:, None] % shape.ranks
    return np.repeat(homes[:, :, None], shape.micro_batches, axis=2)


def by_slots(problem: Problem, running: int | None = None) -> Assignment:
    """The assignment by slots, which takes peers to be alike.

    Args:
        running: pipelines that run a micro-batch in each slot; when left out, as many as the stage with the fewest live
            workers has, and then no worker has two of one stage in one slot.
    """
    shape, stages = problem.shape, problem.shape.stages
    host = at_home(problem)
    if not problem.dead:
        return Assignment(host.ravel(), np.arange(problem.micro_batches) % shape.micro_batches, is_free_of_clashes=True)
    slot = np.empty((shape.pipelines, shape.micro_batches), dtype=np.int64)
    due = [0] * shape.pipelines
    live = [{worker // shape.ranks for worker in hosts} for hosts in problem.hosts]
    taken = np.zeros((shape.ranks, shape.pipelines), dtype=np.int64)  # over all chunks of a worker
    fewest = min(map(len, live))
    running = running or fewest
    for place, at_work in enumerate(_slots(problem, running)):
        for s in range(stages):
            rank = s % shape.ranks
            count = dict.fromkeys(live[s], 0) | dict.fromkeys(live[s] & set(at_work), 1)
            for k in at_work:
                if k not in live[s]:
                    h = min(count, key=lambda h: (count[h], taken[rank, h], h))
                    host[s, k, due[k]] = h * shape.ranks + rank
                    taken[rank, h] += 1
                    count[h] += 1
        for k in at_work:
            slot[k, due[k]] = place
            due[k] += 1
    return Assignment(host.ravel(), slot.ravel(), is_free_of_clashes=running <= fewest)


def around_slow_links(problem: Problem, assignment: Assignment) -> Assignment:
    """The assignment with hosts of a stage exchanged inside each slot where micro-batches then take less on links.

    How many micro-batches each host has at each stage stays as it is, and so does what runs in a slot: where a host
    has a fast link to some host of each neighbouring stage, nothing has to go over a slow one. Of an assignment without
    slots those with the same index are exchanged.
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
        here = np.flatnonzero(slot == place).tolist()
        for s in range(1, shape.stages):
            for g in here:
                mine = int(host[s, g])
                most, other = TOLERANCE, g
                now = cost(s, g, mine)
                if now <= 4 * problem.hop + TOLERANCE:
                    continue
                for h in here:
                    theirs = int(host[s, h])
                    gain = now + cost(s, h, theirs) - cost(s, g, theirs) - cost(s, h, mine)
                    if theirs != mine and gain > most + TOLERANCE:
                        most, other = gain, h
                host[s, g], host[s, other] = host[s, other], mine
    return replace(assignment, host=host.ravel())


def by_load(problem: Problem) -> Assignment:
    """The assignment by load.

    Micro-batches are taken by index, each to the host that would be done with it first, so that no host gets two at the
    same time and all hosts of a stage are done with their shares at about the same time.
    """
    shape, host = problem.shape, at_home(problem)
    units = np.zeros(shape.worker_count, dtype=np.int64)  # over all chunks of a worker
    for s, live in enumerate(problem.hosts):
        kept = _kept(problem, live, units)
        moved = [(j, w // shape.ranks) for w in live for j in _evenly(shape.micro_batches, kept[w])]
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
    """Micro-batches of dead workers go to the peers with the fewest; the others stay.

    Args:
        home: [stages, micro-batches], worker of each by index, dead or alive.
        hosts: live workers of each stage.

    Returns:
        [stages, micro-batches], a live worker of each.
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
    """The pipelines that run a micro-batch in each slot, as many as given at most."""
    pipelines = problem.shape.pipelines
    left = [problem.shape.micro_batches] * pipelines
    slots: list[list[int]] = []
    while any(left):
        by_need = sorted(range(pipelines), key=lambda k: (-left[k], (k - len(slots)) % pipelines))
        running = sorted(k for k in by_need[:most] if left[k])
        for k in running:
            left[k] -= 1
        slots.append(running)
    return slots


def _kept(problem: Problem, live: list[int], units: Operations) -> dict[int, int]:
    """How many of its own micro-batches each host keeps when each goes to the host that is done with it first."""
    m = problem.shape.micro_batches
    if not problem.reroute or len({problem.speed[w] for w in live}) == 1:
        return dict.fromkeys(live, m)
    counts = dict.fromkeys(live, 0)
    # of hosts that would be done at the same time, one that still has a micro-batch of its own goes first
    load = [(problem.speed[w] * (int(units[w]) + 1), False, place, w) for place, w in enumerate(live)]
    heapq.heapify(load)
    for _ in range(problem.micro_batches):
        finished, _, place, w = heapq.heappop(load)
        counts[w] += 1
        heapq.heappush(load, (finished + problem.speed[w], counts[w] >= m, place, w))
    return {w: min(m, count) for w, count in counts.items()}


def _evenly(count: int, kept: int) -> list[int]:
    """The indices of `count` micro-batches that go away when `kept` stay, evenly spread."""
    return [j for j in range(count) if (j + 1) * kept // count == j * kept // count]
