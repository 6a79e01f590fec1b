"""Failure vectors, roles and moves: mapping a set of dead workers to a plan.

Plans name roles; live processes take roles within their own stage, or move to another stage after copying its state
from a live peer there. This module computes how to reach a vector; `solve/normalize.py` chooses the vector.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from math import comb, prod
from typing import NamedTuple

import msgspec
import numpy as np

from recycle.errors import PlanError, errors_as
from recycle.ir.columns import Columns
from recycle.ir.schedule import Schedule
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker

Vector = tuple[int, ...]
"""Dead workers of each rank."""


def failure_vector(shape: Shape, failed: Iterable[Worker]) -> Vector:
    """Count the dead workers of each rank. Raises PlanError for a worker outside the shape."""
    vector = [0] * shape.ranks
    with errors_as(PlanError):
        for worker in set(failed):
            vector[shape.require(worker, "failed workers").rank] += 1
    return tuple(vector)


def require_hosts(shape: Shape, vector: Sequence[int]) -> None:
    """Raise PlanError for the first stage without a live worker, whose parameters are lost."""
    for rank, dead in enumerate(vector):
        if dead >= shape.pipelines:
            raise PlanError(
                f"no live worker is left for stage {rank}: all {shape.pipelines} of its workers are dead;"
                f" the run has to restart from a checkpoint once one is back"
            )


def likely_vectors(shape: Shape, failures: int) -> Iterator[Vector]:
    """Yield all failure vectors with up to `failures` dead that leave each stage a live host, likeliest first."""
    for total in range(failures + 1):
        vectors: set[Vector] = set()
        for ranks in combinations_with_replacement(range(shape.ranks), total):
            vector = tuple(ranks.count(rank) for rank in range(shape.ranks))
            if max(vector) < shape.pipelines:
                vectors.add(vector)
        yield from sorted(vectors, key=lambda vector: (-_sets(shape, vector), vector[::-1]))


def _sets(shape: Shape, vector: Vector) -> int:
    return prod(comb(shape.pipelines, dead) for dead in vector)


def count_vectors(shape: Shape, failures: int) -> list[int]:
    """Count the vectors that `likely_vectors` yields with 0, 1, ... dead: the coefficients of (1 + ... + x^(D-1))^P."""
    counts = [1] + [0] * failures
    for _ in range(shape.ranks):
        counts = [sum(counts[max(0, total - shape.pipelines + 1) : total + 1]) for total in range(failures + 1)]
    return counts


def dead_roles(shape: Shape, vector: Sequence[int]) -> frozenset[Worker]:
    """Return the canonical dead roles of a vector: the last pipelines of each stage.

    Raises PlanError if the vector has the wrong length, or leaves a stage without a live worker.
    """
    if len(vector) != shape.ranks:
        raise PlanError(f"failure vector {tuple(vector)}: needs {shape.ranks} entries, one per rank")
    for rank, count in enumerate(vector):
        if not 0 <= count <= shape.pipelines:
            raise PlanError(f"failure vector {tuple(vector)}: rank {rank} has {shape.pipelines} workers")
    require_hosts(shape, vector)
    return frozenset(Worker(shape.pipelines - 1 - k, rank) for rank, count in enumerate(vector) for k in range(count))


def assign_roles(shape: Shape, dead: Iterable[Worker], failed: Iterable[Worker]) -> dict[Worker, Worker]:
    """Assign a role to each live process, for dead roles `dead` and dead processes `failed`.

    A process keeps its own position if it can; the others take the roles of the dead of their stage, in order. Raises
    PlanError if the two sets have different vectors.
    """
    dead, failed = frozenset(dead), frozenset(failed)
    live_vector, plan_vector = failure_vector(shape, failed), failure_vector(shape, dead)
    if live_vector != plan_vector:
        raise PlanError(f"a plan for vector {plan_vector} cannot serve the failure vector {live_vector}")
    roles: dict[Worker, Worker] = {}
    for rank in range(shape.ranks):
        column = [Worker(k, rank) for k in range(shape.pipelines)]
        vacant = iter([worker for worker in column if worker in failed and worker not in dead])
        for process in column:
            if process not in failed:
                roles[process] = next(vacant) if process in dead else process
    return roles


def align(shape: Shape, dead: frozenset[Worker], failed: frozenset[Worker]) -> list[int]:
    """Return a permutation of pipelines (role -> process) that matches dead roles to dead processes, greedily."""
    at = [{w.rank for w in dead if w.pipeline == k} for k in range(shape.pipelines)]
    to = [{w.rank for w in failed if w.pipeline == k} for k in range(shape.pipelines)]
    scored = sorted(
        (-len(at[k] & to[p]), len(at[k] ^ to[p]), k != p, k, p)
        for k in range(shape.pipelines)
        for p in range(shape.pipelines)
    )
    homes: dict[int, int] = {}
    for *_, k, p in scored:
        if k not in homes and p not in homes.values():
            homes[k] = p
    return [homes[k] for k in range(shape.pipelines)]


def rename(schedule: Schedule, roles: Mapping[Worker, Worker], homes: Sequence[int] | None = None) -> Schedule:
    """Rewrite a schedule in process names: each process gets the program of its role.

    Peers are interchangeable, so validity, makespan and period stay the same (if `Profile.are_peers_alike`).

    Args:
        roles: process -> role, a permutation within the stages, else PlanError. Omitted workers are dead.
        homes: pipeline -> new pipeline of its micro-batches; unchanged if None.
    """
    shape = schedule.shape
    full = dict(roles)
    for rank in range(shape.ranks):
        column = [Worker(k, rank) for k in range(shape.pipelines)]
        dead_roles_left = [role for role in column if role not in roles.values()]
        dead_processes = [process for process in column if process not in roles]
        if len(dead_roles_left) != len(dead_processes):
            raise PlanError(
                f"roles of stage {rank} are not a permutation: two processes have one role, or a process changes stage"
            )
        full.update(zip(dead_processes, dead_roles_left, strict=True))
    role_of = [shape.worker_index(full[process]) for process in shape.workers()]
    process_of = np.full(shape.worker_count + 1, -1, dtype=np.int64)  # the last entry maps peer -1 to itself
    process_of[role_of] = np.arange(shape.worker_count)
    c = schedule.columns
    rows = np.concatenate([np.arange(c.offsets[w], c.offsets[w + 1]) for w in role_of]).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.diff(c.offsets)[role_of])]).astype(np.int64)
    taken = c.take(rows, offsets)
    columns = {name: getattr(taken, name) for name in Columns.FIELDS}
    columns["peer"] = process_of[taken.peer]
    if homes is not None:
        to = np.array([*homes, -1])
        columns["pipeline"], columns["pipeline2"] = to[taken.pipeline], to[taken.pipeline2]
    return replace(
        schedule,
        columns=Columns.from_arrays(offsets, **columns),
        placement=tuple(schedule.placement[w] for w in role_of),
        failed=frozenset(process for process, role in full.items() if role in schedule.failed),
    )


class Move(msgspec.Struct, frozen=True):
    """One worker that changes stage.

    Attributes:
        worker: the process that moves, by its previous position (`k.r`).
        role: the dead position that it takes over.
        source: live worker of the position's stage that it copies from.
        bytes: bytes copied, the static bytes of all stages of the position; 0 if the profile does not state them.
        units: in an elastic layout, the copied units as (first, end), `role` being the worker's own position.
        seconds: duration of the copy, after the earlier copies of its source.
    """

    worker: str
    role: str
    source: str
    bytes: float
    units: tuple[int, ...] = ()
    seconds: float = 0.0


class Arrangement(NamedTuple):
    """How to bring a set of dead workers to a vector.

    Attributes:
        vacant: positions without a process, one set with the vector. Live workers among them moved or stand idle.
        seconds: until all copies are done, serially per source, in the profile's unit of time.
    """

    vacant: frozenset[Worker]
    moves: tuple[Move, ...]
    seconds: float


def moves_needed(failed: Sequence[int], vector: Sequence[int]) -> int:
    """Return the number of workers that must change stage between two vectors."""
    return sum(max(0, dead - wanted) for dead, wanted in zip(failed, vector, strict=True))


def arrange(shape: Shape, failed: Iterable[Worker], vector: Sequence[int], profile: Profile) -> Arrangement:
    """Move live workers to other stages, as few as possible, so that the dead roles have `vector`.

    Dead positions are taken over in the pipelines with the fewest dead and given up in those with the most. Each mover
    copies from the live peer that can finish first.

    Raises:
        PlanError: a stage has no live worker (its parameters are lost), or there are too few live workers.
    """
    failed = frozenset(failed)
    current = failure_vector(shape, failed)
    require_hosts(shape, current)
    if moves_needed(current, vector) > moves_needed(vector, current):
        raise PlanError(f"vector {tuple(vector)} cannot be reached from {current}: it needs more live workers")
    dead_in = Counter(worker.pipeline for worker in failed)

    def chosen(is_dead: bool, wanted: Sequence[int]) -> list[Worker]:
        """Return `wanted` dead or live workers of each rank, updating `dead_in` after each rank."""
        sign, workers = 1 if is_dead else -1, list[Worker]()
        for rank, count in enumerate(wanted):
            if count <= 0:
                continue
            column = [w for w in (Worker(k, rank) for k in range(shape.pipelines)) if (w in failed) == is_dead]
            column.sort(key=lambda w: (sign * dead_in[w.pipeline], sign * w.pipeline))
            workers += column[:count]
            for worker in column[:count]:
                dead_in[worker.pipeline] -= sign
        return workers

    more = [now - wanted for now, wanted in zip(current, vector, strict=True)]
    taken, given = chosen(True, more), chosen(False, [-count for count in more])
    moves, seconds = _copies(shape, failed, taken, given, profile)
    return Arrangement(failed - set(taken) | set(given), moves, seconds)


def _copies(
    shape: Shape, failed: frozenset[Worker], taken: list[Worker], given: list[Worker], profile: Profile
) -> tuple[tuple[Move, ...], float]:
    static = profile.per_stage("static", shape.stages)
    busy: Counter[Worker] = Counter()
    until: dict[Worker, float] = defaultdict(float)
    moves = []
    for role, mover in zip(taken, given, strict=False):  # surplus workers stand idle
        amount = sum(static[stage] for stage in shape.stages_of_rank(role.rank))
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
    """Convert roles by position to roles by process: a moved worker plays the role of its new position."""
    occupant = {Worker.parse(move.role): Worker.parse(move.worker) for move in moves}
    return {occupant.get(position, position): role for position, role in roles.items()}


def touched(vector: Vector) -> int:
    """Return the number of stages with a dead worker."""
    return sum(dead > 0 for dead in vector)
