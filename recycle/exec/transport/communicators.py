"""The communicators of a process, which go on to the next generation where nothing can be under way on them.

A communicator carries operations in their order and knows no generations. One on which an operation was begun at one
end and not at the other, or not completed at either, would hand what is left of it to the next generation. So it is
kept only if every member says that all operations it has begun are completed, and all have begun the same number: each
leaves these counts with its agent before it acknowledges the next generation (`offer`), and reads those of the other
members when the generation forms (`agree`). All read the same, so all decide alike, and nobody waits on a communicator
whose other end is gone. A process that came anew offers none. Completed at one end is not enough: a send may be
completed before its receiver has come.

That something may be under way on a communicator is noted before its operation is begun, which may take long where the
device takes no more launches. Once the generation is over no operation begins, so what is idle then stays idle.

Nothing is kept either by a process whose transport broke without a death that explains it.

A communicator that was not kept is aborted when no process forms any: at the end of a generation, or when the next one
runs. One that the generation does not need, such as that of a re-routed lane after its worker has come back, is kept
as a spare, because the same worker may fail again.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

SPARES = 32
"""Communicators that a process keeps though its generation does not need them: those that it used last. Each holds
memory of the device, some ten MB with NCCL."""
CommunicatorKey = tuple[str, tuple[str, ...]]
"""What a communicator is for, and its members, processes by rank."""


class Communicator:
    """A torch backend that counts what is begun on it.

    Args:
        name: that no other communicator of the run has or had; the same at all its members.
        backend: of torch.
        lock: of the communicators of this process.
        is_over: whether the generation is over, so that nothing may begin.
    """

    def __init__(self, name: str, backend: Any, lock: threading.Lock, is_over: Callable[[], bool]) -> None:
        self.name, self.backend = name, backend
        self._lock, self._is_over = lock, is_over
        self.begun = 0
        self._beginning = 0
        self._works: deque[Any] = deque()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        return self._begin(self.backend.send, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        return self._begin(self.backend.recv, tensors, rank, tag)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return self._begin(self.backend.allreduce, tensors)

    def reduce(self, tensors: list[torch.Tensor], root: int) -> Any:
        options = dist.ReduceOptions()
        options.rootRank = root
        return self._begin(self.backend.reduce, tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._begin(self.backend.broadcast, tensors, options)

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> Any:
        return self._begin(self.backend.allgather, outputs, tensors)

    def _begin(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            if self._is_over():
                raise RuntimeError("the generation is over")
            self.begun += 1
            self._beginning += 1
        work = operation(*arguments)  # one that fails leaves the communicator unfit for ever
        with self._lock:
            self._works.append(work)
            self._beginning -= 1
        return work

    def is_idle(self) -> bool:
        """Whether all that was begun is completed; the caller holds the lock."""
        with contextlib.suppress(RuntimeError):  # the device has failed
            while self._works and self._works[0].is_completed():
                self._works.popleft()
        return not (self._works or self._beginning)


class Communicators:
    """All communicators of one process, over its generations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[CommunicatorKey, Communicator] = {}
        self._unfit: list[Communicator] = []
        self._is_over = True

    def begin(self) -> None:
        """A generation begins to form."""
        with self._lock:
            self._is_over = False

    def offer(self) -> dict[str, int]:
        """Name of each idle communicator -> how many operations were begun on it. The generation is over."""
        with self._lock:
            return {one.name: one.begun for one in self._held.values() if one.is_idle()}

    def keep_among(self, live: Collection[str]) -> None:
        """Free the communicators that have a member outside of these processes."""
        with self._lock:
            self._let_go(key for key in self._held if not set(key[1]) <= set(live))

    def held(self, keys: Collection[CommunicatorKey]) -> list[CommunicatorKey]:
        """Those of `keys` that there is a communicator of."""
        with self._lock:
            return [key for key in keys if key in self._held]

    def agree(self, key: CommunicatorKey, offers: Iterable[Mapping[str, int]]) -> Communicator | None:
        """The communicator of `key` if the offers of all its other members have it as it is here; else it is let go."""
        with self._lock:
            one = self._held.pop(key, None)
            if one is None:  # the generation has ended meanwhile
                return None
            if one.is_idle() and all(offer.get(one.name) == one.begun for offer in offers):
                self._held[key] = one  # the last that was used is the last in order
                return one
            self._unfit.append(one)
            return None

    def add(self, key: CommunicatorKey, name: str, backend: Any) -> Communicator | None:
        """A communicator that was made; None when the generation is over."""
        with self._lock:
            if self._is_over:
                return None
            one = Communicator(name, backend, self._lock, lambda: self._is_over)
            self._held[key] = one
            return one

    def break_all(self) -> None:
        """Something broke that the end of the generation does not explain: nothing goes on to the next one.

        A backend may say that an operation is completed that has failed.
        """
        with self._lock:
            self._let_go(self._held)

    def forget_completed(self) -> None:
        """Free the tensors that the works of completed operations hold."""
        with self._lock:
            for one in self._held.values():
                one.is_idle()

    def end(self) -> list[Any]:
        """The generation is over; the backends that are to be aborted for that."""
        with self._lock:
            self._is_over = True
            self._let_go(key for key, one in self._held.items() if not one.is_idle())
        return self.take_unfit()

    def retire(self, needed: Collection[CommunicatorKey]) -> None:
        """Free the spares beyond the most that are kept; `needed` are not spares."""
        with self._lock:
            spare = [key for key in self._held if key not in needed]
            self._let_go(spare[: max(0, len(spare) - SPARES)])

    def _let_go(self, keys: Iterable[CommunicatorKey]) -> None:
        self._unfit += [self._held.pop(key) for key in list(keys)]

    def take_unfit(self) -> list[Any]:
        """The backends that nobody uses any more, each once."""
        with self._lock:
            unfit, self._unfit = self._unfit, []
        return [one.backend for one in unfit]
