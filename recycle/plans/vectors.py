"""Failure vectors: how many workers of each rank are dead, which is all that a plan depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations_with_replacement
from math import comb, prod

from recycle.errors import PlanError, errors_as
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
