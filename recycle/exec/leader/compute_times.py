"""How long the workers computed in an iteration, as columns, and what the line of metrics says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.exec.protocol import Computed, LinkTime
from recycle.shape import Worker

MOST_LISTED = 256
"""Workers whose times stand in a line of metrics one by one; of more, only those that are furthest from their peers."""
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Groups:
    """Values in groups.

    Attributes:
        keys: of the groups, in order.
        least, median, most, sizes: of each group. The median of an even number is the lower one of the middle two.
        of: the place of each value's group.
    """

    keys: Integers
    least: Floats
    median: Floats
    most: Floats
    sizes: Integers
    of: Integers

    @classmethod
    def by(cls, keys: Integers, values: Floats) -> Groups:
        """Values by the keys of their groups, which are at least 0."""
        order = np.lexsort((values, keys))
        begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
        sizes, ordered = np.diff(begins, append=len(order)), values[order]
        of = np.empty(len(order), np.int64)
        of[order] = np.repeat(np.arange(len(begins)), sizes)
        least, median, most = (ordered[place] for place in (begins, begins + (sizes - 1) // 2, begins + sizes - 1))
        return cls(keys[order][begins], least, median, most, sizes, of)


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """A row per worker and other worker that it has messages with: columns of `LinkTime`, and `owner`, the place of the
    worker among those that reported."""

    owner: Integers
    pipeline: Integers
    rank: Integers
    sent: Integers
    seconds: Floats
    waited: Floats


@dataclass(frozen=True, eq=False)
class ComputeTimes:
    """A row per worker, stage and kind of instruction that it ran.

    Attributes:
        reports: what each worker has reported.
        workers: who reported, also of nothing.
        owner: the worker's place in `workers`.
        stage: of the instructions.
        tokens, kind: names of kinds, and the place of the row's in them.
        count, seconds: how many ran, and what they took together.
        links: what their messages took.
    """

    reports: Mapping[Worker, Sequence[Computed]]
    workers: Sequence[Worker]
    owner: Integers
    stage: Integers
    tokens: Sequence[str]
    kind: Integers
    count: Floats
    seconds: Floats
    links: LinkTimes

    @classmethod
    def of(
        cls,
        compute: Mapping[Worker, Sequence[Computed]],
        links: Mapping[Worker, Sequence[LinkTime]] = MappingProxyType({}),
    ) -> ComputeTimes:
        """Of what each worker reports; `links` has the same workers in the same order, or none."""
        rows, messages = list(chain.from_iterable(compute.values())), list(chain.from_iterable(links.values()))
        token = [row.token for row in rows]
        tokens = sorted(set(token))
        kinds = {token: kind for kind, token in enumerate(tokens)}
        return cls(
            compute,
            list(compute),
            _owners(compute.values()),
            _column(rows, "stage", np.int64),
            tokens,
            np.fromiter(map(kinds.__getitem__, token), np.int64, len(rows)),
            _column(rows, "count", np.float64),
            _column(rows, "seconds", np.float64),
            LinkTimes(
                _owners(links.values()),
                *(_column(messages, name, np.int64) for name in ("pipeline", "rank", "sent")),
                *(_column(messages, name, np.float64) for name in ("seconds", "waited")),
            ),
        )

    def line(self, most: int = MOST_LISTED) -> dict[str, Any]:
        """What a line of metrics says of it.

        `compute`: worker -> `<stage><F|I|W|B>` -> mean seconds of one. Of more than `most` workers only of as many,
        those of which an instruction takes longest or least beside the median of its kind and stage; and then also
        `compute_spread`: `<stage><F|I|W|B>` -> least, median and most of these means over all workers.
        """
        listed, spread = sorted(self.workers), {}
        if len(self.workers) > most:
            mean = np.divide(self.seconds, self.count, out=np.zeros(len(self.count)), where=self.count > 0)
            groups = Groups.by(self.stage * len(self.tokens) + self.kind, mean)
            keys = (divmod(key, len(self.tokens)) for key in groups.keys.tolist())
            figures = np.column_stack((groups.least, groups.median, groups.most)).round(6).tolist()
            spread = {f"{stage}{self.tokens[kind]}": of for (stage, kind), of in zip(keys, figures, strict=True)}
            usual = groups.median[groups.of]
            ratio = np.divide(mean, usual, out=np.ones(len(mean)), where=(mean > 0) & (usual > 0))
            furthest = np.zeros(len(self.workers))
            np.maximum.at(furthest, self.owner, np.abs(np.log(ratio)))
            listed = sorted(self.workers[place] for place in np.argsort(-furthest, kind="stable")[:most])
        compute = {
            str(worker): {
                f"{of.stage}{of.token}": round(of.seconds / max(of.count, 1), 6) for of in self.reports[worker]
            }
            for worker in listed
        }
        return {"compute": compute, "compute_spread": spread} if spread else {"compute": compute}


def worker_indices(workers: Iterable[Worker], ranks: int) -> Integers:
    """`Shape.worker_index` of each of many workers."""
    pairs = np.fromiter(chain.from_iterable(workers), np.int64).reshape(-1, 2)
    return np.asarray(pairs[:, 0] * ranks + pairs[:, 1])


def _column(rows: Sequence[Computed | LinkTime], name: str, kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.fromiter(map(attrgetter(name), rows), kind, len(rows))


def _owners(reports: Iterable[Sequence[object]]) -> Integers:
    sizes = [len(report) for report in reports]
    return np.repeat(np.arange(len(sizes)), sizes)
