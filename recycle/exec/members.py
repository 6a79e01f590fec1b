"""Names of a worker's processes, as messages, logs and faults use them.

With tensor parallelism T a worker is T processes, its members, that fail as one. The one of tensor rank 0 has the
worker's name, `k.r`, and every other is `k.rtN`, with N its tensor rank: `1.0`, `1.0t1`. What is agreed on among
workers (who is live, roles, who joins) names workers; what each process says for itself (that it is ready, has
acknowledged, formed, reported, beats) names members, and counts for the worker when all of them have said it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

from recycle.job.shape import Worker


def member_name(worker: Worker | str, tensor_rank: int) -> str:
    """Name of the worker's process of a tensor rank."""
    return f"{worker}t{tensor_rank}" if tensor_rank else str(worker)


def members_of(workers: Iterable[Worker | str], tensor_parallel: int) -> list[str]:
    """Names of all processes of `workers`, worker by worker."""
    return [name for worker in workers for name in _names(worker, tensor_parallel)]


@lru_cache(maxsize=2**14)
def _names(worker: Worker | str, tensor_parallel: int) -> tuple[str, ...]:
    return tuple(member_name(worker, rank) for rank in range(tensor_parallel))


@lru_cache(maxsize=2**17)
def split_member(name: str) -> tuple[str, int]:
    """The worker and the tensor rank that a member's name is made of."""
    worker, _, rank = name.partition("t")
    return worker, int(rank or 0)


def worker_of(name: str) -> Worker:
    """The worker that a member, or a worker itself, is of."""
    return Worker.parse(split_member(name)[0])


def parse_workers(names: Iterable[str]) -> set[Worker]:
    """The workers of these members, or of these names."""
    return set(map(worker_of, names))


def worker_names(workers: Iterable[Worker]) -> list[str]:
    """Names of workers, in the order of the workers."""
    return list(map(str, sorted(workers)))


@lru_cache(maxsize=4)
def parse_members(names: tuple[str, ...]) -> tuple[tuple[Worker, int], ...]:
    """The worker and the tensor rank of each process; remembered, because all iterations of a generation ask for the
    same."""
    return tuple((worker_of(name), split_member(name)[1]) for name in names)


def joined_digests(parts: Sequence[dict[int, str]]) -> dict[int, str]:
    """Stage -> one digest of what the members of a worker hold, given theirs by tensor rank."""
    if len(parts) == 1:
        return parts[0]
    return {stage: hashlib.sha256("".join(part[stage] for part in parts).encode()).hexdigest() for stage in parts[0]}
