"""Names of a worker's processes, as messages, logs and faults use them.

With tensor parallelism T a worker is T processes, its members, which fail together. The member of tensor rank 0 has the
worker's name `k.r`; rank N is named `k.rtN`: `1.0`, `1.0t1`. Decisions (live set, roles, joins) name workers. Messages
of processes (ready, acknowledged, formed, reports, heartbeats) name members, and count when all members have sent them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

from recycle.job.shape import Worker


def member_name(worker: Worker | str, tensor_rank: int) -> str:
    return f"{worker}t{tensor_rank}" if tensor_rank else str(worker)


def members_of(workers: Iterable[Worker | str], tensor_parallel: int) -> list[str]:
    """Return the names of all processes of `workers`, worker by worker."""
    return [name for worker in workers for name in _names(worker, tensor_parallel)]


@lru_cache(maxsize=2**14)
def _names(worker: Worker | str, tensor_parallel: int) -> tuple[str, ...]:
    return tuple(member_name(worker, rank) for rank in range(tensor_parallel))


@lru_cache(maxsize=2**17)
def split_member(name: str) -> tuple[str, int]:
    """Split a member's name into the worker's name and the tensor rank."""
    worker, _, rank = name.partition("t")
    return worker, int(rank or 0)


def worker_of(name: str) -> Worker:
    return Worker.parse(split_member(name)[0])


def parse_workers(names: Iterable[str]) -> set[Worker]:
    return set(map(worker_of, names))


def worker_names(workers: Iterable[Worker]) -> list[str]:
    return list(map(str, sorted(workers)))


@lru_cache(maxsize=4)
def parse_members(names: tuple[str, ...]) -> tuple[tuple[Worker, int], ...]:
    """Return worker and tensor rank of each process; cached, because all iterations of a generation ask the same."""
    return tuple((worker_of(name), split_member(name)[1]) for name in names)


def joined_digests(parts: Sequence[dict[int, str]]) -> dict[int, str]:
    """Return stage -> one digest over the members' digests, given by tensor rank."""
    if len(parts) == 1:
        return parts[0]
    return {stage: hashlib.sha256("".join(part[stage] for part in parts).encode()).hexdigest() for stage in parts[0]}
