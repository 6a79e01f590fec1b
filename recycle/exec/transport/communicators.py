"""The communicators of a process, and their reuse in the next generation.

A communicator is reused only if all members have completed all operations, and have begun the same number of them,
because a send may complete before its receive is posted. Each process publishes these counts before it acknowledges the
next generation (`offer`), and reads the counts of its peers when it forms (`reuse`). So all members decide alike.

No operation begins after the end of a generation. A process whose transport failed without a known death reuses none.
Unfit communicators are aborted before a process forms others, or at the end of the generation; fit ones that a
generation does not need are kept as spares, as long as a process has at most `COMMUNICATORS`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from recycle.job.footprint import COMMUNICATORS

CommunicatorKey = tuple[str, tuple[str, ...]]
"""Purpose of a communicator, and its members, processes by rank."""


class Communicator:
    """A torch backend that counts the operations begun on it; its name is unique in the run."""

    def __init__(self, name: str, backend: Any, lock: threading.Lock, is_over: Callable[[], bool]) -> None:
        self.name, self.backend = name, backend
        self._lock, self._is_over = lock, is_over
        self.begun = 0
        self._starting = 0
        self._works: deque[Any] = deque()

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        return self._begin(self.backend.send, tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        return self._begin(self.backend.recv, tensors, rank, tag)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._begin(self.backend.allreduce, tensors, *(() if options is None else (options,)))

    def reduce(self, tensors: list[Tensor], root: int) -> Any:
        options = dist.ReduceOptions()
        options.rootRank = root
        return self._begin(self.backend.reduce, tensors, options)

    def broadcast(self, tensors: list[Tensor], root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._begin(self.backend.broadcast, tensors, options)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor]) -> Any:
        return self._begin(self.backend.allgather, outputs, tensors)

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor]) -> Any:
        return self._begin(self.backend.alltoall, outputs, tensors)

    def _begin(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            if self._is_over():
                raise RuntimeError("the generation is over")
            self.begun += 1
            self._starting += 1
        work = operation(*arguments)  # if this fails, the communicator stays unfit
        with self._lock:
            self._works.append(work)
            self._starting -= 1
        return work

    def is_idle(self) -> bool:
        """Whether all operations are completed; the caller holds the lock."""
        with contextlib.suppress(RuntimeError):  # the device has failed
            while self._works and self._works[0].is_completed():
                self._works.popleft()
        return not (self._works or self._starting)


class Communicators:
    """All communicators of one process, over its generations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[CommunicatorKey, Communicator] = {}
        self._unfit: list[Communicator] = []
        self._is_over = True

    def begin_generation(self) -> None:
        with self._lock:
            self._is_over = False

    def offer(self) -> dict[str, int]:
        """Name of each idle communicator -> number of operations begun on it. Call after the end of a generation."""
        with self._lock:
            idle = (communicator for communicator in self._by_key.values() if communicator.is_idle())
            return {communicator.name: communicator.begun for communicator in idle}

    def keep_among(self, live: Collection[str]) -> None:
        """Free the communicators with members outside of these processes."""
        with self._lock:
            self._mark_unfit(key for key in self._by_key if not set(key[1]) <= set(live))

    def reuse(self, key: CommunicatorKey, offers: Iterable[Mapping[str, int]]) -> Communicator | None:
        """The communicator of `key` if the offers of all other members match; otherwise marks it as unfit."""
        with self._lock:
            communicator = self._by_key.pop(key, None)
            if communicator is None:  # the generation has ended meanwhile
                return None
            if communicator.is_idle() and all(offer.get(communicator.name) == communicator.begun for offer in offers):
                self._by_key[key] = communicator  # keeps the order of last use
                return communicator
            self._unfit.append(communicator)
            return None

    def add(self, key: CommunicatorKey, name: str, backend: Any) -> Communicator | None:
        """Add a new communicator; None if the generation is over."""
        with self._lock:
            if self._is_over:
                return None
            self._mark_unfit([key] if key in self._by_key else [])
            communicator = Communicator(name, backend, self._lock, lambda: self._is_over)
            self._by_key[key] = communicator
            return communicator

    def break_all(self) -> None:
        """Mark all as unfit, because a backend may report a failed operation as completed."""
        with self._lock:
            self._mark_unfit(self._by_key)

    def forget_completed(self) -> None:
        """Free the tensors of completed operations."""
        with self._lock:
            for communicator in self._by_key.values():
                communicator.is_idle()

    def end_generation(self) -> list[Any]:
        """End the generation. Returns the backends to abort."""
        with self._lock:
            self._is_over = True
            self._mark_unfit(key for key, communicator in self._by_key.items() if not communicator.is_idle())
        return self.take_unfit()

    def retire(self, needed: Collection[CommunicatorKey]) -> None:
        """Free the oldest spares, so that with `needed`, which are held or form next, there are `COMMUNICATORS`."""
        with self._lock:
            spare = [key for key in self._by_key if key not in needed]
            self._mark_unfit(spare[: max(0, len(spare) + len(needed) - COMMUNICATORS)])

    def mark_unfit(self, key: CommunicatorKey) -> None:
        """Free a communicator that did not form."""
        with self._lock:
            self._mark_unfit([key] if key in self._by_key else [])

    def held(self) -> dict[CommunicatorKey, Communicator]:
        with self._lock:
            return dict(self._by_key)

    def _mark_unfit(self, keys: Iterable[CommunicatorKey]) -> None:
        self._unfit += [self._by_key.pop(key) for key in list(keys)]

    def mark_failed(self, has_failed: Callable[[Any], bool]) -> None:
        """Free the communicators with an error: their operations count as completed, but may still run."""
        with self._lock:
            self._mark_unfit([key for key, communicator in self._by_key.items() if has_failed(communicator.backend)])

    def take_unfit(self) -> list[Any]:
        """Remove and return the backends without users."""
        with self._lock:
            unfit, self._unfit = self._unfit, []
        return [communicator.backend for communicator in unfit]
