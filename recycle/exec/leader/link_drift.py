"""Links that are slower than planned for, from what the workers' messages take.

With each commit come, for each directed pair of workers, the lower quartile of the seconds that the sender's messages
took and the seconds that the receiver waited for them. A link is slow in an iteration where its messages take `FACTOR`
times as long as the profile says, and as those of the middle one of all links; where that is `SHARE` of a typical
instruction at least; and where the receiver waited: a message that nobody waits for holds nobody up, and the sender of
one that comes before its receiver has room for it sees a long transfer, whatever the link. As with workers
(drift.py) more than half of the last N iterations must show it.

A slow link is priced by what its messages took, and by the profile again once that is near it. A link that a plan makes
no use of any more cannot be measured: it is tried again after `RETRY` windows, then after twice as many, and so on.

Limits: a link that holds back fewer than three quarters of its messages is not found, because receivers that are late
make single messages look long; nor are links inside sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from recycle.exec.leader.compute_times import LinkTimes
from recycle.profile import Link, Profile
from recycle.shape import Shape, Worker

FACTOR = 2.0
"""How many times as long as planned for messages take over a link that counts as slow. Times of messages scatter more
than those of computing, and a plan that goes around a link is worth a new generation only where it is far slower."""
SHARE = 0.25
"""Of a typical instruction's time, what a message must take longer for a plan to be better without."""
LEAST_SECONDS = 2e-3
"""Longer messages and waits than this are believed: below, it is the interpreter's and the machine's own noise."""
FEW_LINKS = 4
"""Links of which the middle one says what is usual."""
MOST = 64
"""Links that are watched at once."""
RETRY = 4


@dataclass(frozen=True)
class LinkChange:
    """A link that departs from what was planned for.

    Attributes:
        sender, receiver: the directed pair.
        price: of a message from now on, in the profile's unit; None for what the profile says.
        factor: price over what the profile says, by which the link has more latency and less bandwidth; None where the
            profile says nothing.
        seconds: that a message takes.
    """

    sender: Worker
    receiver: Worker
    price: float | None
    factor: float | None
    seconds: float

    def __str__(self) -> str:
        pair = f"messages from {self.sender} to {self.receiver}"
        if self.price is None:
            return f"{pair} take as long as the profile says again"
        how = f"{self.seconds:.3g} s" if self.factor is None else f"{self.factor:.3g} times as long as the profile says"
        return f"{pair} take {how}"


class _Watched:
    """A link's last prices.

    Attributes:
        idle: iterations since it was measured last.
        patience: after how many of them a slow one is tried again.
    """

    def __init__(self, iterations: int) -> None:
        self.prices: deque[float] = deque(maxlen=iterations)
        self.idle, self.patience = 0, RETRY * iterations


class LinkMonitor:
    """Watches the links of one run.

    Args:
        shape: of the job.
        profile: the job's own.
        iterations: N, the window.
    """

    def __init__(self, shape: Shape, profile: Profile, iterations: int) -> None:
        self._shape, self._profile, self._iterations = shape, profile, iterations
        self._watched: dict[int, _Watched] = {}
        self._planned: dict[int, float] = {}
        self._unit = 1.0

    @cached_property
    def _bytes(self) -> float:
        return max(self._profile.per_stage("message", self._shape.stages))

    @cached_property
    def _instruction(self) -> float:
        """A typical instruction's time, in the profile's unit."""
        names = ("forward", "backward_input", "backward_weight")
        return fmean(time for name in names for time in self._profile.per_stage(name, self._shape.stages))

    def observe(self, links: LinkTimes, unit: float) -> None:
        """Take what the live workers report of one iteration.

        Args:
            unit: seconds that a unit of the profile's times lasts, as the workers' computing shows.
        """
        self._unit = unit
        workers = self._shape.worker_count
        own, peer = (ends[:, 0] * self._shape.ranks + ends[:, 1] for ends in (links.worker, links.peer))
        known = (links.peer < [self._shape.pipelines, self._shape.ranks]).all(axis=1)
        rows = np.flatnonzero(known & (links.sent > 0))
        codes, prices = own[rows] * workers + peer[rows], links.seconds[rows] / unit
        waits = peer[known] * workers + own[known]
        awaited = np.isin(codes, waits[links.waited[known] >= LEAST_SECONDS])
        expected = self._profile.copy_seconds(self._shape, own[rows], peer[rows], self._bytes)
        usual = float(np.sort(prices)[(len(prices) - 1) // 2]) if len(prices) >= FEW_LINKS else 0.0
        excess = np.maximum(0.0, usual - expected)  # what all messages take beyond the profile is not this link's
        prices = np.maximum(expected, prices - excess)
        slow = awaited & self._is_beyond(prices, np.maximum(expected, usual))
        for code in codes[slow].tolist():
            if code not in self._watched and len(self._watched) < MOST:
                self._watched[code] = _Watched(self._iterations)
        mine = np.isin(codes, list(self._watched))
        measured = set()
        for code, price, is_slow in zip(codes[mine].tolist(), prices[mine].tolist(), slow[mine].tolist(), strict=True):
            base = self._planned.get(code, 0.0)
            if is_slow or not self._is_beyond(price, max(base, self._expected(code))):
                self._watched[code].prices.append(price)
                measured.add(code)
        for code in set(self._watched) - measured:
            self._watched[code].idle += 1
        for code in measured:
            watched = self._watched[code]
            watched.idle = 0
            is_usual = len(watched.prices) == self._iterations and not any(
                self._is_beyond(price, self._expected(code)) for price in watched.prices
            )
            if is_usual and code not in self._planned:
                del self._watched[code]

    def forget(self, worker: Worker) -> None:
        """The worker's process has ended; the links of another one in its place are not measured yet."""
        index = self._shape.worker_index(worker)
        for code in [code for code in self._watched if index in divmod(code, self._shape.worker_count)]:
            del self._watched[code]
            self._planned.pop(code, None)

    def departed(self, planned: Profile, live: Collection[Worker]) -> list[LinkChange]:
        """The links of live workers that the last iterations show to be other ones than `planned` says."""
        changes = []
        self._planned = {}
        for code, watched in sorted(self._watched.items()):
            ends = self._ends(code)
            if not set(ends) <= set(live):
                continue
            now, base = self._price(planned, code), self._expected(code)
            is_priced = planned.links.get(_pair(*ends)) != self._profile.links.get(_pair(*ends))
            if is_priced:
                self._planned[code] = now
            price = self._moved(watched, now, base, is_priced)
            if price is None:
                continue
            is_usual = not self._is_beyond(price, base)
            if is_usual and not is_priced:
                continue
            factor = price / base if base else None
            factor = None if factor is None else _rounded(factor)
            changes.append(LinkChange(*ends, None if is_usual else _rounded(price), factor, price * self._unit))
        return changes

    def priced(self, planned: Profile, changes: Collection[LinkChange]) -> Profile:
        """`planned` with the links that have changed."""
        links = dict(planned.links)
        for change in changes:
            pair = _pair(change.sender, change.receiver)
            links.pop(pair, None)
            if change.price is None:
                if pair in self._profile.links:
                    links[pair] = self._profile.links[pair]
                continue
            usual, factor = self._profile.link_between(self._shape, change.sender, change.receiver), change.factor
            if factor is None:
                links[pair] = Link(change.price)
            else:
                bandwidth = None if usual.bandwidth is None else _rounded(usual.bandwidth / factor)
                links[pair] = Link(_rounded(factor * usual.latency), bandwidth)
        return replace(planned, links=links)

    def _moved(self, watched: _Watched, now: float, base: float, is_priced: bool) -> float | None:
        """The price that the last iterations show where it is not the one at hand; that of the profile for a link that
        is to be tried again."""
        if is_priced and watched.idle >= watched.patience:
            watched.patience *= 2
            watched.prices.clear()
            watched.idle = 0
            return base
        for beyond in (
            [price for price in watched.prices if self._is_beyond(price, now)],
            [price for price in watched.prices if self._is_beyond(now, price)],
        ):
            if 2 * len(beyond) > self._iterations:
                return median(beyond)
        return None

    def _is_beyond(self, price: npt.ArrayLike, reference: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether a price is so much more than another that it counts."""
        price, reference = np.asarray(price), np.asarray(reference)
        least = max(SHARE * self._instruction, LEAST_SECONDS / self._unit)
        return np.asarray((price > FACTOR * reference) & (price - reference > least))

    def _ends(self, code: int) -> tuple[Worker, Worker]:
        sender, receiver = divmod(code, self._shape.worker_count)
        return self._shape.worker_at(sender), self._shape.worker_at(receiver)

    def _expected(self, code: int) -> float:
        return self._price(self._profile, code)

    def _price(self, profile: Profile, code: int) -> float:
        sender, receiver = divmod(code, self._shape.worker_count)
        return float(profile.copy_seconds(self._shape, [sender], [receiver], self._bytes)[0])


def _pair(sender: Worker, receiver: Worker) -> str:
    return f"{sender}>{receiver}"


def _rounded(price: float) -> float:
    return float(f"{price:.3g}")
