"""The list scheduler: an order for any shape, caps, times and dead workers, in time linear in its instructions.

Whenever a worker is idle it takes the first that applies:

    F   if the policy puts forwards first, memory allows and fewer than `hold` micro-batches are between F and I;
        a W instead while as many as `weights` wait
    W   if the policy puts weights first, one waits, and only memory keeps an F from running
    I   (or the whole B)
    F   if memory allows, fewer than `hold` are between F and I and fewer than `weights` W wait
    W
    F   if memory allows and fewer than `hold` are between F and I

Forwards first with a hold of P - s is ZB-H1's rotation of I, W and F, which keeps the pipeline's pace even; backwards
first drains what is in flight, which suits ample memory. Ready forwards and backwards are taken by micro-batch index,
then pipeline; with chunks the deepest forward first, or both by groups of micro-batches. Who runs what is the policy's
assignment. A `Policy` holds what may be varied; `portfolio` lists a few of which one does well nearly always.

It cannot deadlock: a backward frees memory whenever one is ready, the last stage can always run one after its
forward, and with several chunks per worker each chunk leaves a free slot for every deeper one.

`schedule_by_priority` makes a new order from the times of one that is there: an operation that may start late can wait.
Gaps that a template or a policy leaves open are closed so, while what was urgent keeps its place; forward-backward
improvement of project scheduling is made of such steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from recycle.solve.assignment import Assignment, possible_assignments
from recycle.solve.problem import Order, Problem, flat
from recycle.solve.problem_arrays import Floats, Operations, seeded
from recycle.solve.search.event_loop import UNLIMITED, Rule, scheduled


@dataclass(frozen=True)
class Policy:
    """The preferences of the list scheduler; per-stage lists have one entry per stage.

    Attributes:
        assignment: the host of each micro-batch at each stage.
        hold: micro-batches between F and I that a host may have, below its memory cap; at least the number of chunks.
        weights: W that may wait before a forward has to stand back.
        forward_first: a forward that may run goes before a ready I.
        weight_first: a W goes before a ready I when a forward waits for memory.
        lead: places by which re-routed micro-batches are moved up in the queues, in micro-batch indices.
        swaps: pairs of (stage, micro-batch) whose hosts change places.
        evenness: how far the clock by which the scheduler decides is from the true times (0) to one where F, I and W
            take the same and links nothing (1). A true clock fills each wait with a W that then holds up the next F or
            I; an even one keeps the rotation, and what it decides is timed truly afterwards.
        group: with chunks, micro-batches that a worker takes through one before the next, as interleaved 1F1B does;
            0: the deepest chunk's forward first, and backwards by micro-batch.
    """

    assignment: Assignment
    hold: tuple[int, ...]
    weights: tuple[int, ...]
    forward_first: tuple[bool, ...]
    weight_first: tuple[bool, ...]
    lead: float = 0.0
    swaps: tuple[tuple[int, int, int], ...] = ()
    evenness: float = 0.0
    group: int = 0


def default_policy(problem: Problem, assignment: Assignment | None = None) -> Policy:
    """Backwards, then forwards, and W when nothing else can run; by the generally best assignment if it is left out."""
    anything, no = (UNLIMITED,) * problem.shape.stages, (False,) * problem.shape.stages
    return Policy(assignment or possible_assignments(problem)[0], anything, anything, no, no)


def portfolio(problem: Problem, assignment: Assignment | None = None) -> Iterator[Policy]:
    """A few policies, the generally best first; of the generally best assignment when it is left out."""
    plain = default_policy(problem, assignment)
    for group in groups(problem):
        for policy in _portfolio(problem, plain):
            yield replace(policy, group=group)


def groups(problem: Problem) -> tuple[int, ...]:
    """Sizes of groups worth a try: P micro-batches as in interleaved 1F1B, and half of that for tight memory."""
    ranks = problem.shape.ranks
    return tuple(dict.fromkeys((0, ranks, max(2, ranks // 2)))) if problem.shape.chunks > 1 else (0,)


def _portfolio(problem: Problem, plain: Policy) -> Iterator[Policy]:
    stages, ranks = problem.shape.stages, problem.shape.ranks
    leads = (0.0, 2.0) if problem.dead else (0.0,)
    yield plain
    evennesses = (0.0,) if problem.is_even else (0.0, 1.0)
    for more, evenness, lead in product((0, 1, 2, 3), evennesses, leads):
        for weight_first in (True, False) if problem.split else (False,):
            yield replace(
                plain,
                hold=warm_up(problem, more),
                weights=tuple(s % ranks + 1 for s in range(stages)) if more == 0 else plain.weights,
                forward_first=(True,) * stages,
                weight_first=(weight_first,) * stages,
                lead=lead,
                evenness=evenness,
            )
    limits = [plain.weights]
    if problem.split:
        limits += [(1,) * stages, (2,) * stages, tuple(max(1, s % ranks) for s in range(stages)), (4,) * stages]
    for hold in (plain.hold, warm_up(problem, 0), warm_up(problem, 1), warm_up(problem, 3)):
        for weights in limits:
            for weight_first in (False, True) if problem.split else (False,):
                for lead in leads:
                    firsts = (weight_first,) * stages
                    policy = replace(plain, hold=hold, weights=weights, weight_first=firsts, lead=lead)
                    if policy != plain:
                        yield policy


def warm_up(problem: Problem, more: int = 0) -> tuple[int, ...]:
    """Per stage: the forwards before the first backward in 1F1B (with chunks: in interleaved 1F1B), and `more`."""
    stages, ranks, chunks = problem.shape.stages, problem.shape.ranks, problem.shape.chunks
    if chunks == 1:
        return tuple(ranks - s + more for s in range(stages))
    return tuple((chunks - 1) * ranks + 2 * (ranks - 1 - s % ranks) + 1 + more for s in range(stages))


def hosts_under(problem: Problem, policy: Policy) -> Operations:
    """Worker of each (stage, micro-batch), flat: as assigned, but for the policy's exchanges."""
    host = policy.assignment.host.copy()
    for s, g, h in policy.swaps:
        g, h = s * problem.micro_batches + g, s * problem.micro_batches + h
        host[g], host[h] = host[h], host[g]
    return host


def schedule_by_policy(problem: Problem, policy: Policy | None = None, *, noise: float = 0.0, seed: int = 0) -> Order:
    """The order that the list scheduler makes under `policy`; always complete and within the caps.

    Args:
        noise: share of decisions taken at random, for a search to vary.
        seed: of those decisions.
    """
    policy = policy or default_policy(problem)
    n, m = problem.micro_batches, problem.shape.micro_batches
    host = hosts_under(problem, policy)
    g, stage = np.tile(np.arange(n), problem.shape.stages), problem.stage_of
    rerouted = host != g // m * problem.shape.ranks + stage % problem.shape.ranks
    rank = g % m * problem.shape.pipelines + g // m - policy.lead * problem.shape.pipelines * rerouted
    arrays = problem.arrays._replace(
        times=problem.times + policy.evenness * (problem.unit - problem.times),
        link=problem.link * (1 - policy.evenness),
        hops=problem.arrays.hops * (1 - policy.evenness),
    )
    rule = Rule(
        priority=_priority(problem, policy, rank, stage),
        by_priority=0,
        hold=np.array(policy.hold, dtype=np.float64),
        weights=np.array(policy.weights),
        forward_first=np.array(policy.forward_first, dtype=np.int64),
        weight_first=np.array(policy.weight_first, dtype=np.int64),
        noise=float(noise),
        random=seeded(seed),
        patience=0.0,
        weight_patience=0.0,
        starts=np.arange(n),
        release=np.zeros(n),
    )
    return scheduled(problem, arrays, host, rule)


def _priority(problem: Problem, policy: Policy, rank: Floats, stage: Operations) -> Floats:
    """Of the F, then of the backward of each (stage, micro-batch): a worker takes the lowest that is ready."""
    chunks, chunk = problem.shape.chunks, stage // problem.shape.ranks
    if not policy.group:
        return np.concatenate([rank - chunk * (1 + np.ptp(rank)), rank])
    size = policy.group * problem.shape.pipelines
    begun = rank // size * chunks * size + rank % size
    return np.concatenate([begun + chunk * size, begun + (chunks - 1 - chunk) * size])


def hosts_in(problem: Problem, order: Order) -> Operations:
    """Worker of each (stage, micro-batch) in an order, flat."""
    operations, offsets = flat(order)
    host = np.empty(problem.shape.stages * problem.micro_batches, dtype=np.int64)
    host[operations % len(host)] = np.repeat(np.arange(len(order)), np.diff(offsets))
    return host


def schedule_by_priority(
    problem: Problem,
    host: Operations,
    priority: Floats,
    *,
    patience: float = 0.0,
    weight_patience: float = 0.0,
    hold: Sequence[int] | None = None,
    release: Floats | None = None,
) -> Order:
    """The order that these priorities give, complete and within the caps.

    Args:
        host: worker of each (stage, micro-batch), flat.
        priority: of each operation, the smallest first.
        patience, weight_patience: how long an F or I, and a W, stands back for what is more urgent and on its way.
        hold: per stage, micro-batches between F and I that a host may have; as many as memory allows when left out.

    Raises:
        PlanError: see `event_loop.scheduled`.
    """
    stages = problem.shape.stages
    anything, no = np.full(stages, UNLIMITED), np.zeros(stages, dtype=np.int64)
    rule = Rule(
        priority=priority,
        by_priority=1,
        hold=np.array(anything if hold is None else hold, dtype=np.float64),
        weights=anything,
        forward_first=no,
        weight_first=no,
        noise=0.0,
        random=seeded(0),
        patience=float(patience),
        weight_patience=float(weight_patience),
        starts=np.arange(problem.micro_batches),
        release=np.zeros(problem.micro_batches) if release is None else release,
    )
    return scheduled(problem, problem.arrays, host, rule)
