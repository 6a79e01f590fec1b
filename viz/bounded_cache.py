"""A cache that keeps the values used last, as far as a bound on their total weight allows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Values by key. Safe to use from several threads.

    Args:
        most: total weight that is kept.
        weigh: weight of a value.
        at_least: values that stay however heavy they are.
        at_most: values that are kept however light they are; None: any number.
    """

    def __init__(self, most: float, weigh: Callable[[V], float], at_least: int = 1, at_most: int | None = None) -> None:
        self.most, self.weigh, self.at_least, self.at_most = most, weigh, at_least, at_most
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: K, value: V) -> V:
        """Keep a value, at the cost of those not used for longest."""
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            weights = [self.weigh(kept) for kept in self._kept.values()]
            while len(weights) > self.at_least and (
                sum(weights) > self.most or (self.at_most is not None and len(weights) > self.at_most)
            ):
                self._kept.popitem(last=False)
                del weights[0]
        return value

    def get(self, key: K) -> V | None:
        """The value of a key; None when it was never there, or others took its place."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)
