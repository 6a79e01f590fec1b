"""Moves: which worker takes over a dead position of another stage, and from whom it copies that stage.

The load of a schedule follows from the failure vector alone, and its most-hit stage rules. A live worker of a stage
that can spare it may become a worker of a stage that cannot, once it holds that stage's parameters and optimizer
state: `Profile.static` bytes, copied from a live peer of the stage that it joins. Which vector is worth reaching is
the planner's question (`solve/normalize.py`); here it is only *how* to reach one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from recycle.errors import PlanError
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.plans.roles import Vector, failure_vector, require_hosts


class Move(msgspec.Struct, frozen=True):
    """One worker that changes stage.

    Attributes:
        worker: the process that moves, by the position that it held (`k.r`).
        role: the dead position that it takes over.
        source: the live worker of that position's stage from which it copies.
        bytes: what it copies: static bytes of all stages of that position; 0 when the profile does not know.
        units: in an elastic layout, the units of the model that it copies: from the first up to but without the last.
            `role` is then its own position. Else empty: all of the position's stages.
        seconds: that the copy takes once its source has sent what it sends before.
    """

    worker: str
    role: str
    source: str
    bytes: float
    units: tuple[int, ...] = ()
    seconds: float = 0.0


class Arrangement(NamedTuple):
    """How a set of dead workers is brought to a vector.

    Attributes:
        vacant: positions that nobody plays, one set with that vector. Live workers in it have moved or stand idle.
        moves: who plays what was dead.
        seconds: until all copies are made, each source sending one after the other, in the profile's unit of time.
    """

    vacant: frozenset[Worker]
    moves: tuple[Move, ...]
    seconds: float


def moves_needed(failed: Sequence[int], vector: Sequence[int]) -> int:
    """Workers that must change stage on the way from one vector to another."""
    return sum(max(0, here - there) for here, there in zip(failed, vector, strict=True))


def arrange(shape: Shape, failed: Iterable[Worker], vector: Sequence[int], profile: Profile) -> Arrangement:
    """Bring a set of dead workers to `vector`, with as few moves as that takes.

    Dead positions are taken over in the pipelines with fewest dead and given up in those with most, so that dead roles
    lie in the same pipelines (nearly always as good or better for the period). A stage that gives a worker up keeps
    the live hosts that `vector` leaves it. Each mover copies from the live peer that can have sent it soonest.

    Raises:
        PlanError: a stage has no live worker (its parameters are lost), or the live workers do not suffice.
    """
    failed = frozenset(failed)
    here = failure_vector(shape, failed)
    require_hosts(shape, here)
    if moves_needed(here, vector) > moves_needed(vector, here):
        raise PlanError(f"vector {tuple(vector)} cannot be reached from {here}: it needs more live workers")
    dead_in = Counter(worker.pipeline for worker in failed)
    taken: list[Worker] = []
    given: list[Worker] = []
    columns = [[Worker(k, rank) for k in range(shape.pipelines)] for rank in range(shape.ranks)]
    for column, now, wanted in zip(columns, here, vector, strict=True):
        fewest = sorted((w for w in column if w in failed), key=lambda w: (dead_in[w.pipeline], w.pipeline))
        taken += fewest[: max(0, now - wanted)]
        dead_in.subtract(worker.pipeline for worker in fewest[: max(0, now - wanted)])
    for column, now, wanted in zip(columns, here, vector, strict=True):
        most = sorted((w for w in column if w not in failed), key=lambda w: (-dead_in[w.pipeline], -w.pipeline))
        given += most[: max(0, wanted - now)]
        dead_in.update(worker.pipeline for worker in most[: max(0, wanted - now)])
    moves, seconds = _copies(shape, failed, taken, given, profile)
    return Arrangement(failed - set(taken) | set(given), moves, seconds)


def _copies(
    shape: Shape, failed: frozenset[Worker], taken: list[Worker], given: list[Worker], profile: Profile
) -> tuple[tuple[Move, ...], float]:
    static = profile.per_stage("static", shape.stages)
    busy: Counter[Worker] = Counter()
    until = dict.fromkeys(shape.workers(), 0.0)
    moves = []
    for role, mover in zip(taken, given, strict=False):  # givers beyond the takers stand idle
        amount = sum(static[role.rank :: shape.ranks])
        peers = [w for w in (Worker(k, role.rank) for k in range(shape.pipelines)) if w not in failed]
        times = profile.copy_seconds(
            shape, [shape.worker_index(w) for w in peers], [shape.worker_index(mover)] * len(peers), amount
        )
        done, _, source = min(
            (until[peer] + float(time), busy[peer], peer) for peer, time in zip(peers, times, strict=True)
        )
        seconds, until[source] = done - until[source], done
        busy[source] += 1
        moves.append(Move(str(mover), str(role), str(source), amount, seconds=seconds))
    return tuple(moves), max(until.values(), default=0.0)


def roles_after(moves: Iterable[Move], roles: dict[Worker, Worker]) -> dict[Worker, Worker]:
    """`roles` by position as roles by process: who moved plays the role of the position that it took over."""
    occupant = {Worker.parse(move.role): Worker.parse(move.worker) for move in moves}
    return {occupant.get(position, position): role for position, role in roles.items()}


def touched(vector: Vector) -> int:
    """Stages with a dead worker, each of which disturbs the schedule."""
    return sum(dead > 0 for dead in vector)
