"""Which workers are dead and which are slow, as one text: `1.2, pipeline:0, stage:3, node:1/8, 0.1=1.5`.

`pipeline:K`, `stage:S` (all workers of a position) and `node:N/W` (node N where W workers share one, see
`recycle.nodes`) name several dead workers at once; `0.1=1.5` is a worker that takes 1.5 times as long for all its work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from recycle.errors import JobError, PlanError
from recycle.nodes import place_workers
from recycle.shape import Shape, Worker

MOST_NAMED = 2048
FORMS = "1.2, pipeline:0, stage:3, node:1/8 (the second node of 8 workers each), or 0.1=1.5 for a slow worker"


class Condition(NamedTuple):
    """Dead workers, and how many times as long slow ones take.

    Attributes:
        failed: the dead ones.
        slow: (worker, factor) of live ones, by worker.
    """

    failed: frozenset[Worker] = frozenset()
    slow: tuple[tuple[Worker, float], ...] = ()

    def names(self) -> list[str]:
        """A text for each worker, as `parse` reads them."""
        return [*map(str, sorted(self.failed)), *(f"{worker}={factor:g}" for worker, factor in self.slow)]

    def without(self, failed: Iterable[Worker]) -> Condition:
        """The same condition with other dead workers; a worker that is dead does not count as slow."""
        dead = frozenset(failed)
        return Condition(dead, tuple(one for one in self.slow if one[0] not in dead))


def parse(text: str, shape: Shape) -> Condition:
    """The condition that a text names. Raises PlanError that says what is wrong with it."""
    words = text.replace(",", " ").split()
    if len(words) > MOST_NAMED:
        raise PlanError(f"failed workers: {len(words)} are named; at most {MOST_NAMED}")
    failed: set[Worker] = set()
    slow: dict[Worker, float] = {}
    try:
        for word in words:
            name, is_slow, factor = word.partition("=")
            if is_slow:
                slow[shape.require(Worker.parse(name), "slow workers")] = _factor(word, factor)
            else:
                failed |= group(word, shape)
    except JobError as error:
        raise PlanError(str(error)) from None
    return Condition(frozenset(), tuple(sorted(slow.items()))).without(failed)


def group(word: str, shape: Shape) -> frozenset[Worker]:
    """The workers that `1.2`, `pipeline:0`, `stage:3` or `node:1/8` names. Raises JobError or PlanError."""
    kind, is_group, which = word.partition(":")
    if not is_group:
        return frozenset([shape.require(Worker.parse(word), "failed workers")])
    if kind not in _GROUPS:
        raise PlanError(f"failed workers: {word!r} is none of the forms: {FORMS}")
    try:
        return _GROUPS[kind](shape, *(int(part) for part in which.split("/")))
    except (ValueError, TypeError, IndexError):
        raise PlanError(f"failed workers: {word!r} names nothing of {shape}: write {FORMS}") from None


def _pipeline(shape: Shape, pipeline: int) -> frozenset[Worker]:
    _require(pipeline, shape.pipelines)
    return frozenset(Worker(pipeline, rank) for rank in range(shape.ranks))


def _stage(shape: Shape, rank: int) -> frozenset[Worker]:
    _require(rank, shape.ranks)
    return frozenset(Worker(pipeline, rank) for pipeline in range(shape.pipelines))


def _node(shape: Shape, node: int, workers_per_node: int) -> frozenset[Worker]:
    if workers_per_node < 1:
        raise ValueError
    nodes = place_workers(shape, workers_per_node)
    _require(node, len(nodes))
    return frozenset(nodes[node])


def _require(number: int, count: int) -> None:
    if not 0 <= number < count:
        raise IndexError(number)


_GROUPS: dict[str, Callable[..., frozenset[Worker]]] = {"pipeline": _pipeline, "stage": _stage, "node": _node}


def _factor(word: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise PlanError(f"slow workers: {word!r}: write how many times as long it takes, for example 0.1=1.5")
    return factor
