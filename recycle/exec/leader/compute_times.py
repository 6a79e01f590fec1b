"""How long the workers computed in an iteration, as columns, and what the line of metrics says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from recycle.exec.protocol import Computed, LinkTime
from recycle.shape import Worker

MOST_LISTED = 256
"""Workers whose times stand in a line of metrics one by one; of more, only those that are furthest from their peers."""


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """A row per worker and other worker that it has messages with.

    Attributes:
        worker, peer: [rows, 2], pipeline and rank of both.
        sent: how many messages to the peer have arrived.
        seconds: the lower quartile of what they took.
        waited: seconds that the worker waited for messages from the peer.
    """

    worker: npt.NDArray[np.int64]
    peer: npt.NDArray[np.int64]
    sent: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    waited: npt.NDArray[np.float64]

    @classmethod
    def of(cls, links: Mapping[Worker, Sequence[LinkTime]]) -> LinkTimes:
        """Of what each worker reports."""
        rows = list(chain.from_iterable(links.values()))
        workers = np.fromiter(chain.from_iterable(links), np.int64).reshape(-1, 2)
        return cls(
            np.repeat(workers, [len(times) for times in links.values()], axis=0),
            np.array([[row.pipeline for row in rows], [row.rank for row in rows]], np.int64).T,
            np.array([row.sent for row in rows], np.int64),
            np.array([row.seconds for row in rows], np.float64),
            np.array([row.waited for row in rows], np.float64),
        )


@dataclass(frozen=True, eq=False)
class ComputeTimes:
    """A row per worker, stage and kind of instruction that it ran.

    Attributes:
        workers: who reported, also of nothing.
        owner: the worker's place in `workers`.
        stage: of the instructions.
        tokens, kind: names of kinds, and the place of the row's in them.
        count, seconds: how many ran, and what they took together.
        links: what their messages took.
    """

    workers: Sequence[Worker]
    owner: npt.NDArray[np.int64]
    stage: npt.NDArray[np.int64]
    tokens: Sequence[str]
    kind: npt.NDArray[np.int64]
    count: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    links: LinkTimes = field(default_factory=lambda: LinkTimes.of({}))

    @classmethod
    def of(
        cls,
        compute: Mapping[Worker, Sequence[Computed]],
        links: Mapping[Worker, Sequence[LinkTime]] = MappingProxyType({}),
    ) -> ComputeTimes:
        """Of what each worker reports."""
        rows = map(astuple, chain.from_iterable(compute.values()))
        stage, token, count, seconds = tuple(zip(*rows, strict=True)) or ((),) * 4
        tokens = sorted(set(token))
        kinds = {token: kind for kind, token in enumerate(tokens)}
        return cls(
            list(compute),
            np.repeat(np.arange(len(compute)), [len(times) for times in compute.values()]),
            np.array(stage, np.int64),
            tokens,
            np.array(list(map(kinds.__getitem__, token)), np.int64),
            np.array(count, np.float64),
            np.array(seconds, np.float64),
            LinkTimes.of(links),
        )

    def line(self, most: int = MOST_LISTED) -> dict[str, Any]:
        """What a line of metrics says of it.

        `compute`: worker -> `<stage><F|I|W|B>` -> mean seconds of one. Of more than `most` workers only of as many,
        those of which an instruction takes longest or least beside the median of its kind and stage; and then also
        `compute_spread`: `<stage><F|I|W|B>` -> least, median and most of these means over all workers.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(self.count > 0, self.seconds / self.count, 0.0)
        if len(self.workers) <= most:
            return {"compute": self._listed(range(len(self.workers)), mean)}
        groups, group = np.unique(self.stage * len(self.tokens) + self.kind, return_inverse=True)
        order = np.lexsort((mean, group))
        ordered = mean[order]
        begins = np.searchsorted(group[order], np.arange(len(groups)))
        ends = np.append(begins[1:], len(order))
        median = ordered[(begins + ends - 1) // 2]
        columns = map(_rounded, (ordered[begins], median, ordered[ends - 1]))
        spread = {
            f"{number // len(self.tokens)}{self.tokens[number % len(self.tokens)]}": list(times)
            for number, times in zip(groups.tolist(), zip(*columns, strict=True), strict=True)
        }
        usual = median[group]
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.where((usual > 0) & (mean > 0), np.abs(np.log(mean / usual)), 0.0)
        furthest = np.zeros(len(self.workers))
        np.maximum.at(furthest, self.owner, away)
        listed = np.argsort(-furthest, kind="stable")[:most]
        return {"compute": self._listed(sorted(listed.tolist()), mean), "compute_spread": spread}

    def _listed(self, places: Sequence[int], mean: npt.NDArray[np.float64]) -> dict[str, dict[str, float]]:
        stages, kinds, seconds = self.stage.tolist(), self.kind.tolist(), _rounded(mean)
        begins = np.searchsorted(self.owner, np.arange(len(self.workers) + 1)).tolist()
        listed: dict[str, dict[str, float]] = {}
        for place in sorted(places, key=self.workers.__getitem__):
            rows = range(begins[place], begins[place + 1])
            times = ((f"{stages[row]}{self.tokens[kinds[row]]}", seconds[row]) for row in rows)
            listed[str(self.workers[place])] = dict(sorted(times))
        return listed


def _rounded(seconds: npt.NDArray[np.float64]) -> list[float]:
    """Microseconds."""
    return list(np.round(seconds, 6).tolist())
