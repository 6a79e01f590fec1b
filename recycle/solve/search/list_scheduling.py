"""List scheduler: an order for any shape, caps, times and dead workers, in time linear in the operations.

An idle worker takes the first choice that applies:

    F   the policy puts forwards first, memory allows and fewer than `hold` micro-batches are between F and I;
        a W instead if `weights` of them wait
    W   the policy puts weights first, one waits, and only memory prevents an F
    I   (or the whole B)
    F   memory allows, fewer than `hold` micro-batches are between F and I and fewer than `weights` W wait
    W
    F   memory allows and fewer than `hold` micro-batches are between F and I

Ready operations are taken by micro-batch index, then pipeline; with chunks the deepest forward first, or both by
groups. The scheduler cannot deadlock: a ready backward frees memory, and the last stage can run one after its forward.
`schedule_by_priority` improves an existing order, like forward-backward improvement in project scheduling.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf

import numpy as np

from recycle.solve.assignment import Assignment, possible_assignments
from recycle.solve.constants import IDLE_POLICIES
from recycle.solve.problem import TOLERANCE, Order, Problem
from recycle.solve.problem_arrays import Floats, Operations
from recycle.solve.search.event_loop import UNLIMITED, priority_rule, run_event_loop


@dataclass(frozen=True)
class Policy:
    """Preferences of the list scheduler; lists have one entry per stage.

    Attributes:
        assignment: host of each micro-batch at each stage.
        hold: maximum micro-batches between F and I on a host, within its memory cap; at least the number of chunks.
        weights: number of waiting W from which a forward has to wait.
        forward_first: a runnable forward precedes a ready I.
        weight_first: a W precedes a ready I if a forward waits for memory.
        evenness: interpolates the scheduler's clock between the true times (0) and equal F, I and W without links (1).
            True times fill each wait with a W that delays the next F or I; an even clock keeps the rotation. The order
            is timed with the true times afterwards.
        group: with chunks, micro-batches per chunk before the next chunk, as in interleaved 1F1B; 0 takes the deepest
            chunk's forward first, and backwards by micro-batch.
        idleness: share of the longest idle time of any worker up to which a worker waits for an F or I that is on its
            way, so that a W remains for a longer wait; 0 runs a W in every wait.
    """

    assignment: Assignment
    hold: tuple[int, ...]
    weights: tuple[int, ...]
    forward_first: tuple[bool, ...]
    weight_first: tuple[bool, ...]
    evenness: float = 0.0
    group: int = 0
    idleness: float = 0.0


def default_policy(problem: Problem, assignment: Assignment | None = None) -> Policy:
    """Return the policy with backwards first and W last; by default with the generally best assignment."""
    anything, no = (UNLIMITED,) * problem.shape.stages, (False,) * problem.shape.stages
    return Policy(assignment or possible_assignments(problem)[0], anything, anything, no, no)


def portfolio(problem: Problem, assignment: Assignment | None = None) -> Iterator[Policy]:
    """Yield a few policies, the generally best first; by default with the generally best assignment."""
    plain = default_policy(problem, assignment)
    for group in groups(problem):
        for policy in _portfolio(problem, plain):
            yield replace(policy, group=group)


def groups(problem: Problem) -> tuple[int, ...]:
    """Return group sizes to try: P micro-batches as in interleaved 1F1B, and P / 2 for tight memory."""
    ranks = problem.shape.ranks
    return tuple(dict.fromkeys((0, ranks, max(2, ranks // 2)))) if problem.shape.chunks > 1 else (0,)


def _portfolio(problem: Problem, plain: Policy) -> Iterator[Policy]:
    stages = problem.shape.stages
    placed = problem.rank_of.tolist()
    if problem.split:
        for idleness, more in IDLE_POLICIES:
            yield replace(plain, hold=round_trip(problem, more), idleness=idleness)
    yield plain
    firsts = (True, False) if problem.split else (False,)
    evennesses = (0.0,) if problem.is_even else (0.0, 1.0)
    for more, evenness, weight_first in product((0, 1, 2, 3), evennesses, firsts):
        yield replace(
            plain,
            hold=warm_up(problem, more),
            weights=tuple(rank + 1 for rank in placed) if more == 0 else plain.weights,
            forward_first=(True,) * stages,
            weight_first=(weight_first,) * stages,
            evenness=evenness,
        )
    limits = [plain.weights]
    if problem.split:
        limits += [(1,) * stages, (2,) * stages, tuple(max(1, rank) for rank in placed), (4,) * stages]
    holds = (plain.hold, *(warm_up(problem, more) for more in (0, 1, 3)))
    for hold, weights, weight_first in product(holds, limits, firsts[::-1]):
        policy = replace(plain, hold=hold, weights=weights, weight_first=(weight_first,) * stages)
        if policy != plain:
            yield policy


def warm_up(problem: Problem, more: int = 0) -> tuple[int, ...]:
    """Return, per stage, the warm-up forwards of 1F1B (with chunks: of interleaved 1F1B) plus `more`."""
    ranks, chunks = problem.shape.ranks, problem.shape.chunks
    behind = [ranks - 1 - rank for rank in problem.rank_of.tolist()]
    if chunks == 1:
        return tuple(count + 1 + more for count in behind)
    return tuple((chunks - 1) * ranks + 2 * count + 1 + more for count in behind)


def round_trip(problem: Problem, more: int = 0) -> tuple[int, ...]:
    """Return, per stage, the forwards that fill the time until a worker's first backward, plus `more`."""
    ranks, chunks = problem.rank_of.tolist(), problem.shape.chunks
    forward = [time * fastest for time, fastest in zip(problem.forward, problem.fastest, strict=True)]
    counts = [more + ceil(1 + problem.return_path[rank] / forward[rank] - TOLERANCE) for rank in ranks]
    return tuple(max(chunks, count) for count in counts)


def schedule_by_policy(problem: Problem, policy: Policy | None = None) -> Order:
    """Return the list scheduler's order for `policy`, complete and within the memory caps."""
    policy = policy or default_policy(problem)
    rule = priority_rule(_priority(problem, policy), problem.shape.stages, np.arange(problem.micro_batches))._replace(
        by_priority=0,
        hold=np.array(policy.hold, dtype=np.float64),
        weights=np.array(policy.weights),
        idleness=policy.idleness,
        forward_first=np.array(policy.forward_first, dtype=np.int64),
        weight_first=np.array(policy.weight_first, dtype=np.int64),
    )
    arrays = problem.arrays._replace(
        times=problem.times + policy.evenness * (problem.unit - problem.times),
        link=problem.link * (1 - policy.evenness),
        hops=problem.arrays.hops * (1 - policy.evenness),
    )
    return run_event_loop(problem, arrays, policy.assignment.host, rule)


def _priority(problem: Problem, policy: Policy) -> Floats:
    shape, n = problem.shape, problem.micro_batches
    m, pipelines, chunks = shape.micro_batches, shape.pipelines, shape.chunks
    g, chunk = np.tile(np.arange(n), shape.stages), problem.stage_of // shape.ranks
    turn = (g % m * pipelines + g // m).astype(np.float64)
    if not policy.group:
        return np.concatenate([turn - chunk * n, turn])
    size = policy.group * pipelines
    begun = turn // size * chunks * size + turn % size
    return np.concatenate([begun + chunk * size, begun + (chunks - 1 - chunk) * size])


def schedule_by_priority(
    problem: Problem,
    host: Operations,
    priority: Floats,
    *,
    patience: float = 0.0,
    weight_patience: float = 0.0,
    release: Floats | None = None,
) -> Order:
    """Return the order for these priorities, complete and within the memory caps.

    Args:
        host: worker of each (stage, micro-batch), flat.
        priority: of each operation, lowest first.
        patience, weight_patience: seconds that an F or I, and a W, waits for a more urgent operation.

    Raises:
        PlanError: see `event_loop.run_event_loop`.
    """
    rule = priority_rule(priority, problem.shape.stages, np.arange(problem.micro_batches))._replace(
        patience=float(patience),
        weight_patience=float(weight_patience),
        release=np.zeros(problem.micro_batches) if release is None else release,
    )
    return run_event_loop(problem, problem.arrays, host, rule)


def move_weights(problem: Problem, order: Order, idleness: float) -> Order | None:
    """Return an order with the same F and I whose W fill waits; None if that exceeds the memory.

    A worker runs W in a wait that they fill, if an F finds no memory, and if it would otherwise be idle for longer than
    `idleness` times the longest idle time of any worker so far. The others remain for later waits.
    """
    n, needs, times = problem.micro_batches, problem.needs.tolist(), problem.times.tolist()
    plane = problem.shape.stages * n
    host = {x: w for w, program in enumerate(order) for x in program}
    fixed = [[x for x in program if x < 2 * plane] for program in order]
    moved: Order = [[] for _ in order]
    weights = [deque[int]() for _ in order]
    taken, free, held, idle = [0] * len(order), [0.0] * len(order), [0.0] * len(order), [0.0] * len(order)
    end: dict[int, float] = {}
    asleep: dict[int, int] = {}
    longest = 0.0
    events = [(0.0, w) for w in range(len(order))]
    while events:
        _, w = heapq.heappop(events)
        if taken[w] == len(fixed[w]):
            moved[w] += weights[w]
            continue
        x = fixed[w][taken[w]]
        before = needs[x]
        if before >= 0 and before not in end:
            asleep[before] = w
            continue
        arrival = 0.0 if before < 0 else end[before] + problem.hop_between(host[before], w)
        wait = max(0.0, arrival - free[w])
        idle_then = idle[w] + wait if moved[w] else 0.0
        is_full = x < plane and held[w] + 1 > problem.cap[w] + TOLERANCE
        length = times[weights[w][0] // n] * problem.speed[w] if weights[w] else inf
        is_filled = length <= wait + TOLERANCE or (wait > TOLERANCE and idle_then > idleness * longest + TOLERANCE)
        if weights[w] and (is_full or is_filled):
            moved[w].append(weights[w].popleft())
            free[w] += length
            held[w] -= problem.stash
        elif is_full:
            return None
        else:
            idle[w], longest = idle_then, max(longest, idle_then)
            moved[w].append(x)
            taken[w] += 1
            free[w] = end[x] = free[w] + wait + times[x // n] * problem.speed[w]
            held[w] += 1.0 if x < plane else problem.stash - 1
            if x >= plane:
                weights[w].append(x + plane)
            if x in asleep:
                heapq.heappush(events, (end[x], asleep.pop(x)))
        heapq.heappush(events, (free[w], w))
    return moved
