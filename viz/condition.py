"""Dead and slow workers and slow links, as a text: `1.2, pipeline:0, stage:3, node:1/8, 0.1=1.5, 0.1>0.2=4`.

`pipeline:K`, `stage:S` (all workers of a position) and `node:N/W` (node N with W workers per node, see
`recycle.job.shape`) name several dead workers; `0.1=1.5` takes 1.5 times as long for all its work, and `0.1>0.2=4` is a
link, in both directions, whose transfers take 4 times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from recycle.errors import JobError, PlanError
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker, place_workers

FORMS = (
    "1.2, pipeline:0, stage:3, node:1/8 (the second node of 8 workers each), 0.1=1.5 for a slow worker, or 0.1>0.2=4"
    " for a slow link"
)
MAX_NAMED = 2048


class Condition(NamedTuple):
    """Dead workers, slow live workers with their factors, and slow links; each ascending."""

    failed: frozenset[Worker] = frozenset()
    slow: tuple[tuple[Worker, float], ...] = ()
    links: tuple[tuple[Worker, Worker, float], ...] = ()

    def names(self) -> list[str]:
        """Return a text for each part, in the form that `parse` reads."""
        slow = [f"{worker}={factor:g}" for worker, factor in self.slow]
        return [*map(str, sorted(self.failed)), *slow, *(f"{a}>{b}={factor:g}" for a, b, factor in self.links)]

    def with_failed(self, failed: Iterable[Worker]) -> Condition:
        """Return the condition with other dead workers; dead workers are removed from `slow`."""
        dead = frozenset(failed)
        return Condition(dead, tuple(item for item in self.slow if item[0] not in dead), self.links)

    def slow_down(self, profile: Profile, shape: Shape, included: Condition | None = None) -> Profile:
        """Return a profile with the slow workers and links, except those that are `included` in it already."""
        known = included or Condition()
        speed = {str(w): factor * profile.speed_of(w) for w, factor in self.slow if (w, factor) not in known.slow}
        if speed:
            profile = replace(profile, speed=profile.speed | speed)
        for link in self.links:
            if link not in known.links:
                profile = profile.with_slow_link(shape, *link)
        return profile


def parse(text: str, shape: Shape) -> Condition:
    """Parse a condition. Raises PlanError that describes the error."""
    words = text.replace(",", " ").split()
    if len(words) > MAX_NAMED:
        raise PlanError(f"failed workers: {len(words)} are named; at most {MAX_NAMED}")
    failed: set[Worker] = set()
    slow: dict[int, dict[Any, float]] = {1: {}, 2: {}}
    try:
        for word in words:
            name, is_slow, factor = word.partition("=")
            ends = name.split(">", 1)
            if is_slow or len(ends) > 1:
                what = "slow links" if len(ends) > 1 else "slow workers"
                workers = tuple(shape.require(Worker.parse(end), what) for end in ends)
                slow[len(ends)][workers] = _factor(word, factor)
            else:
                failed |= named_workers(word, shape)
    except JobError as error:
        raise PlanError(str(error)) from None
    workers_and_links = (tuple((*ends, factor) for ends, factor in sorted(each.items())) for each in slow.values())
    return Condition(frozenset(), *workers_and_links).with_failed(failed)


def named_workers(word: str, shape: Shape) -> frozenset[Worker]:
    """Return the workers that `1.2`, `pipeline:0`, `stage:3` or `node:1/8` names. Raises JobError or PlanError."""
    kind, is_group, which = word.partition(":")
    if not is_group:
        return frozenset([shape.require(Worker.parse(word), "failed workers")])
    if kind not in _GROUPS:
        raise PlanError(f"failed workers: {word!r} is not a worker or group: write {FORMS}")
    try:
        number, *size = (int(part) for part in which.split("/"))
        if number < 0 or min(size, default=1) < 1:
            raise IndexError(which)
        return frozenset(_GROUPS[kind](shape, *size)[number])
    except (ValueError, TypeError, IndexError):
        raise PlanError(f"failed workers: {word!r} does not exist in {shape}: write {FORMS}") from None


_GROUPS: Mapping[str, Callable[..., Sequence[Sequence[Worker]]]] = {
    "pipeline": lambda shape: [[Worker(k, r) for r in range(shape.ranks)] for k in range(shape.pipelines)],
    "stage": lambda shape: [[Worker(k, r) for k in range(shape.pipelines)] for r in range(shape.ranks)],
    "node": place_workers,
}


def _factor(word: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise PlanError(f"slow workers: {word!r}: write how many times as long it takes, for example 0.1=1.5")
    return factor
