"""Plans that keep a memory limit by copying activations to the host and back.

Orders are planned for looser limits. Wherever a worker then holds too much, an activation leaves: of those whose copies
fit beside the computation, the one that can stay away longest, as in Belady's rule. The fastest result counts.

Limits: copies are placed by the times of an iteration without them; where they do not fit, the worker waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import msgspec
import numpy as np

from recycle.errors import PlanError
from recycle.ir.columns import Floats
from recycle.ir.dependencies import find
from recycle.ir.instruction import BackwardInput, BackwardWeight, Forward, Offload, Reload
from recycle.ir.kinds import ValueKind, makers_of
from recycle.ir.lower import insert, lowered_graph
from recycle.ir.memory import TOLERANCE, held_before
from recycle.ir.operations import operations_of
from recycle.ir.replays import given_times
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import time_graph
from recycle.job import PricedJob
from recycle.job.profile import Profile
from recycle.plans import Plan, errors

GROWTHS = (1.0, 1.25, 1.5, 2.0)
"""Limits that are tried besides none, as multiples of the job's."""
ROOMS = (2.0, 3.0)
"""Activations for which W's that wait leave room: one that is computed, one or two that are copied."""
SHARE = 1 / (len(GROWTHS) + 1)
"""Share of the planning time of each."""


def plan_with_offloads(job: PricedJob, planned: Callable[[PricedJob], Plan]) -> Plan:
    """Return the fastest plan of a job with a limit whose activations may leave; its bound holds without any limit.

    Args:
        planned: plans a job without offloads, in `SHARE` of the time.

    Raises:
        PlanError: as `planned`; or the profile does not state the bandwidth between device and host.
    """
    limits = job.limits
    assert limits is not None
    if job.prices.host_bandwidth is None:
        raise PlanError(
            "[memory] offload: the profile has no host_bandwidth; state [memory] host_bandwidth, bytes per second"
        )

    def within(growth: float | None) -> Plan:
        looser = None if growth is None else [int(growth * limit) for limit in limits]
        memory = msgspec.structs.replace(job.memory, limit=looser, offload="off")
        return planned(msgspec.structs.replace(job, memory=memory))

    unlimited = within(None)
    best: Plan | None = None
    for plan, room in product((*map(within, GROWTHS), unlimited), ROOMS):
        schedule = with_offloads(plan.schedule, job.prices, limits, room)
        if schedule is None:
            continue
        graph = lowered_graph(schedule)
        wrong = errors(schedule, job, graph)
        if wrong:
            raise PlanError(f"the planner made an invalid schedule, which is a bug: {wrong[0]}")
        timeline = time_graph(graph, job.prices)
        if best is None or timeline.period < best.period:
            best = replace(plan, schedule=schedule, period=timeline.period, makespan=timeline.makespan)
    assert best is not None, "a plan within the limit needs no offloads"
    return replace(
        best,
        lower_bound=unlimited.lower_bound,
        certificate=unlimited.certificate,
        limits=tuple(limits),
        planner={**best.planner, "offload": True},
    )


class _Wait(NamedTuple):
    """The rows of one activation's forward and backward, and the seconds of a copy."""

    forward: int
    backward: int
    seconds: float


def with_offloads(
    schedule: Schedule, profile: Profile, limits: Sequence[float], room: float = ROOMS[0]
) -> Schedule | None:
    """Return a compute-only schedule with the copies that keep the limits; None if none do.

    Args:
        limits: activations (in chunks) that the worker of each rank may hold.
        room: activations besides which W's may wait; further W's run earlier.
    """
    schedule = _with_early_weights(schedule, profile.weight_stash, limits, room)
    c, shape, ops = schedule.columns, schedule.shape, operations_of(schedule)
    start, end, _ = given_times(schedule, profile)
    added, _, before = held_before(schedule, profile, in_bytes=False)
    copy_seconds = profile.per_stage("host_copy", shape.stages)
    key = (ops.worker * shape.stages + ops.stage) * shape.global_micro_batches + ops.micro_batch
    forwards, backwards = ops.select(Forward), ops.select(*makers_of(ValueKind.INPUT_GRADIENT))
    ends = ops.row[backwards[find(key[backwards], key[forwards])]]
    waits: list[list[_Wait]] = [[] for _ in shape.workers()]
    for at, backward in zip(forwards.tolist(), ends.tolist(), strict=True):
        wait = _Wait(int(ops.row[at]), backward, copy_seconds[ops.stage[at]])
        waits[ops.worker[at]].append(wait)
    moved: list[tuple[int, int, int]] = []
    for w, of_worker in enumerate(waits):
        rows, limit = slice(*c.offsets[w : w + 2].tolist()), limits[w % shape.ranks]
        try:
            for wait, left, back in _offloads((before + added)[rows], start, end, of_worker, limit, rows.start):
                moved += [(left, Offload.kind, wait.forward), (back, Reload.kind, wait.forward)]
        except _Full:
            return None
    if not moved:
        return schedule
    place, kind, row = np.array(sorted(moved)).T
    names = {"stage": c.stage, "pipeline": c.pipeline, "index": c.index}
    named = {name: column[row] for name, column in names.items()}
    return insert(schedule, c.worker[row].astype(np.int64), place, {"kind": kind, **named})[0]


def _with_early_weights(schedule: Schedule, stash: float, limits: Sequence[float], room: float) -> Schedule:
    c = schedule.columns
    key = (c.stage * schedule.shape.pipelines + c.pipeline) * schedule.shape.micro_batches + c.index
    order: list[int] = []
    for w, (begin, end) in enumerate(pairwise(c.offsets.tolist())):
        limit, held = limits[w % schedule.shape.ranks], 0.0
        weights = {key[row]: row for row in range(begin, end) if c.kind[row] == BackwardWeight.kind}
        waiting: list[int] = []
        for row in range(begin, end):
            if c.kind[row] == BackwardWeight.kind:
                if row not in waiting:
                    continue
                waiting.remove(row)
            held += c.kind[row] == Forward.kind
            while waiting and len(waiting) * stash + min(held, room) > limit + TOLERANCE:
                order.append(waiting.pop(0))
            order.append(row)
            if c.kind[row] == BackwardInput.kind:
                held -= 1
                waiting.append(weights[key[row]])
    return replace(schedule, columns=c.take(np.array(order), c.offsets))


class _Full(Exception):
    """No activation can leave."""


def _offloads(
    held: Floats, start: Floats, end: Floats, waits: Sequence[_Wait], limit: float, first: int
) -> Iterator[tuple[_Wait, int, int]]:
    """Yield (activation, row before which it has left, row before which it begins to return) of one worker.

    `held` is what each row from `first` on holds without offloads.
    """
    free, busy, staying = 0.0, list[tuple[float, float]](), set(waits)
    ends = end[first : first + len(held)]

    def moves(wait: _Wait, row: int) -> tuple[int, int, float, float, _Wait]:
        out = max(free, end[wait.forward]) + wait.seconds
        begin = _latest(busy, start[wait.backward], wait.seconds)
        back = min(first + int(np.searchsorted(ends, begin * (1 + TOLERANCE), side="right")), wait.backward)
        fits = int(out <= start[row] * (1 + TOLERANCE)) + int(back > row)
        return fits, max(back, row + 1), out, begin, wait

    for row in range(first, first + len(held)):
        while held[row - first] > limit + TOLERANCE:
            able = [moves(wait, row) for wait in staying if wait.forward < row < wait.backward]
            if not able:
                raise _Full
            _, back, free, begin, wait = max(able)
            held[row - first : back - first] -= 1
            busy.append((begin, begin + wait.seconds))
            staying.remove(wait)
            yield wait, row, back


def _latest(busy: Sequence[tuple[float, float]], until: float, seconds: float) -> float:
    """Return the latest begin of a copy that ends by `until` and meets none of the lane's other copies."""
    begin = until - seconds
    for other, end in sorted(busy, reverse=True):
        if other < begin + seconds and end > begin:
            begin = other - seconds
    return begin
