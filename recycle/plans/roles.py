"""Failure vectors and roles. How many workers of each rank are dead is all that a plan depends on; plans name roles,
and the processes that are alive take them, each within its own stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from math import comb, prod

import numpy as np

from recycle.errors import PlanError, errors_as
from recycle.ir.columns import Columns
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape, Worker

Vector = tuple[int, ...]
"""Dead workers of each rank."""


def failure_vector(shape: Shape, failed: Iterable[Worker]) -> Vector:
    """Dead workers of each rank. Raises PlanError for a worker outside the shape."""
    vector = [0] * shape.ranks
    with errors_as(PlanError):
        for worker in set(failed):
            vector[shape.require(worker, "failed workers").rank] += 1
    return tuple(vector)


def require_hosts(shape: Shape, vector: Sequence[int]) -> None:
    """Raises PlanError that names the first stage of which every worker is dead: its parameters are lost."""
    for rank, dead in enumerate(vector):
        if dead >= shape.pipelines:
            raise PlanError(
                f"no live worker is left for stage {rank}: all {shape.pipelines} of its workers are dead;"
                f" the run has to restart from a checkpoint once one is back"
            )


def likely_vectors(shape: Shape, failures: int) -> Iterator[Vector]:
    """All failure vectors with up to `failures` dead that leave each stage a live host, likeliest first.

    Fewer failures are likelier. Among equally many, those that more sets of workers have: product of C(D, k_s).
    """
    for total in range(failures + 1):
        found: set[Vector] = set()
        for ranks in combinations_with_replacement(range(shape.ranks), total):
            vector = tuple(ranks.count(rank) for rank in range(shape.ranks))
            if max(vector) < shape.pipelines:
                found.add(vector)
        yield from sorted(found, key=lambda vector: (-_sets(shape, vector), vector[::-1]))


def _sets(shape: Shape, vector: Vector) -> int:
    return prod(comb(shape.pipelines, dead) for dead in vector)


def count_vectors(shape: Shape, failures: int) -> list[int]:
    """How many vectors `likely_vectors` yields with 0, 1, ... dead: the coefficients of (1 + ... + x^(D-1))^P."""
    counts = [1] + [0] * failures
    for _ in range(shape.ranks):
        counts = [sum(counts[max(0, total - shape.pipelines + 1) : total + 1]) for total in range(failures + 1)]
    return counts


def dead_roles(shape: Shape, vector: Sequence[int]) -> frozenset[Worker]:
    """The canonical dead roles of a vector: the last pipelines of each stage.

    So dead roles of several stages lie in the same pipelines, which is nearly always as good or better for the period.

    Raises:
        PlanError: the vector has another length, or leaves a stage without a live worker.
    """
    if len(vector) != shape.ranks:
        raise PlanError(f"failure vector {tuple(vector)}: needs {shape.ranks} entries, one per rank")
    for rank, count in enumerate(vector):
        if not 0 <= count <= shape.pipelines:
            raise PlanError(f"failure vector {tuple(vector)}: rank {rank} has {shape.pipelines} workers")
    require_hosts(shape, vector)
    return frozenset(Worker(shape.pipelines - 1 - k, rank) for rank, count in enumerate(vector) for k in range(count))


def assign_roles(shape: Shape, dead: Iterable[Worker], failed: Iterable[Worker]) -> dict[Worker, Worker]:
    """Role of each live process, where `dead` are the plan's dead roles and `failed` the dead processes.

    Whoever can keep the role of its own position does; the others take the roles of the dead of their stage, in order.

    Raises:
        PlanError: the two sets have different vectors.
    """
    dead, failed = frozenset(dead), frozenset(failed)
    here, there = failure_vector(shape, failed), failure_vector(shape, dead)
    if here != there:
        raise PlanError(f"a plan for vector {there} cannot serve the failure vector {here}")
    roles: dict[Worker, Worker] = {}
    for rank in range(shape.ranks):
        column = [Worker(k, rank) for k in range(shape.pipelines)]
        vacant = iter([worker for worker in column if worker in failed and worker not in dead])
        for process in column:
            if process not in failed:
                roles[process] = next(vacant) if process in dead else process
    return roles


def align(shape: Shape, dead: frozenset[Worker], failed: frozenset[Worker]) -> list[int]:
    """Pipeline permutation (role pipeline -> process pipeline) that brings dead roles onto dead processes, greedily."""
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
    """The schedule in process names: each process gets the program of its role.

    Peers are interchangeable, so validity, makespan and period stay (as long as `Profile.are_peers_alike`).

    Args:
        roles: process -> role. Workers left out are dead, and take the dead roles in order.
        homes: pipeline -> new pipeline of its micro-batches; as they are when left out.

    Raises:
        PlanError: `roles` is no permutation within the stages.
    """
    shape = schedule.shape
    full = dict(roles)
    for rank in range(shape.ranks):
        column = [Worker(k, rank) for k in range(shape.pipelines)]
        rest = [role for role in column if role not in roles.values()]
        without = [process for process in column if process not in roles]
        if len(rest) != len(without):
            raise PlanError(f"roles of stage {rank} are no permutation: two processes play one role, or change stage")
        full.update(zip(without, rest, strict=True))
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
