"""Plans that keep a memory limit by copying activations to the host and back.

Orders are planned for looser limits. Wherever a worker then holds too much, an activation leaves: of those whose copies
fit beside the computation, the one that can stay away longest, as in Belady's rule. The fastest result counts.

Limits: copies are placed by the times of an iteration without them; where they do not fit, the worker waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product

import msgspec
import numpy as np

from recycle.errors import PlanError
from recycle.ir.columns import Floats
from recycle.ir.dependencies import find
from recycle.ir.instruction import BackwardInput, BackwardWeight, Forward, Offload, Reload
from recycle.ir.kinds import ValueKind, makers_of
from recycle.ir.lower import insert
from recycle.ir.memory import TOLERANCE, held_before
from recycle.ir.operations import operations_of
from recycle.ir.replays import given_times
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import timeline_of
from recycle.job import PricedJob
from recycle.job.profile import Profile
from recycle.plans import Plan, errors

GROWTHS = (1.0, 1.25, 1.5, 2.0)
"""Limits that are tried besides none, as multiples of the job's."""
ROOMS = (2.0, 3.0)
"""Activations for which W's that wait leave room: one that is computed, one or two that are copied."""
Stay = tuple[int, int, float]
"""Rows of an activation's forward and backward, and the seconds of a copy."""
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

    unlimited, found = within(None), list[Plan]()
    for plan, room in product((*map(within, GROWTHS), unlimited), ROOMS):
        schedule = with_offloads(plan.schedule, job.prices, limits, room)
        if schedule is not None:
            timeline = timeline_of(schedule, job.prices)
            found.append(replace(plan, schedule=schedule, period=timeline.period, makespan=timeline.makespan))
    best = min(found, key=lambda plan: plan.period)  # one at least: a plan within the limit needs no offloads
    if wrong := errors(best.schedule, job):
        raise PlanError(f"the planner made an invalid schedule, which is a bug: {wrong[0]}")
    return replace(
        best,
        lower_bound=unlimited.lower_bound,
        certificate=unlimited.certificate,
        limits=tuple(limits),
        planner={**best.planner, "offload": True},
    )


def with_offloads(schedule: Schedule, profile: Profile, limits: Sequence[float], room: float) -> Schedule | None:
    """Return a compute-only schedule with the copies that keep the limits; None if none do.

    Args:
        limits: activations (in chunks) that the worker of each rank may hold.
        room: activations besides which W's may wait; further W's run earlier.
    """
    schedule = _with_early_weights(schedule, profile.weight_stash, limits, room)
    c, shape, ops = schedule.columns, schedule.shape, operations_of(schedule)
    start, end, _ = given_times(schedule, profile)
    added, _, before = held_before(schedule, profile, in_bytes=False)
    forwards, backwards = ops.select(Forward), ops.select(*makers_of(ValueKind.INPUT_GRADIENT))
    ends = ops.row[backwards[find(ops.worker_cell[backwards], ops.worker_cell[forwards])]]
    seconds = np.array(profile.per_stage("host_copy", shape.stages))[ops.stage[forwards]]
    stays = list(zip(ops.row[forwards].tolist(), ends.tolist(), seconds.tolist(), strict=True))
    moved: list[tuple[int, int, int]] = []
    for w, (first, stop) in enumerate(pairwise(c.offsets.tolist())):
        of_worker = {stay for stay in stays if first <= stay[0] < stop}
        moves = _moves((before + added)[first:stop], start, end, of_worker, limits[w % shape.ranks], first)
        if moves is None:
            return None
        moved += moves
    if not moved:
        return schedule
    place, kind, row = np.array(sorted(moved)).T
    columns = {"kind": kind, "stage": c.stage[row], "pipeline": c.pipeline[row], "index": c.index[row]}
    return insert(schedule, c.worker[row].astype(np.int64), place, columns)[0]


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


def _moves(
    held: Floats, start: Floats, end: Floats, staying: set[Stay], limit: float, first: int
) -> list[tuple[int, int, int]] | None:
    """Return (row after it, kind, row of the forward) of one worker's copies; None if none keep the limit.

    Args:
        held: what each row from `first` on holds without copies.
        staying: the activations that may leave.
    """
    moves, free, busy = list[tuple[int, int, int]](), 0.0, list[tuple[float, float]]()
    ends = end[first : first + len(held)]

    def move(stay: Stay, row: int) -> tuple[int, int, float, float, Stay]:
        forward, backward, seconds = stay
        out, begin = max(free, end[forward]) + seconds, _latest(busy, start[backward], seconds)
        back = min(first + int(np.searchsorted(ends, begin * (1 + TOLERANCE), side="right")), backward)
        fits = int(out <= start[row] * (1 + TOLERANCE)) + int(back > row)
        return fits, max(back, row + 1), out, begin, stay

    for row in range(first, first + len(held)):
        while held[row - first] > limit + TOLERANCE:
            able = [move(stay, row) for stay in staying if stay[0] < row < stay[1]]
            if not able:
                return None
            _, back, free, begin, stay = max(able)
            held[row - first : back - first] -= 1
            busy.append((begin, begin + stay[2]))
            staying.remove(stay)
            moves += [(row, Offload.kind, stay[0]), (back, Reload.kind, stay[0])]
    return moves


def _latest(busy: Sequence[tuple[float, float]], until: float, seconds: float) -> float:
    """Return the latest begin of a copy that ends by `until` and meets none of the lane's other copies."""
    begin = until - seconds
    for other, end in sorted(busy, reverse=True):
        if other < begin + seconds and end > begin:
            begin = other - seconds
    return begin
