"""How far a device is in what it was given, for the heartbeat.

A GPU runs behind its host: the host may have given it everything and wait, while one kernel of it never ends. So the
device's own progress is counted, by the operations that it has done, and each kind is held against the longest time
that the device took for one lately, as `Progress` does on the host.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass

from recycle.exec.device.clock import Clock, Mark

KEPT = 0.9
"""Share of an operation's longest time that is kept when another of its kind ends."""


@dataclass(frozen=True)
class DeviceState:
    """How far a device is that runs behind its host.

    Attributes:
        done: operations that it has done.
        doing: the kind of the first operation that it has been given and has not done; empty when there is none.
        longest: seconds that the device took lately at most for one of the kind; None before the first.
        waits: whether it has come to an operation that waits for another process.
    """

    done: int = 0
    doing: str = ""
    longest: float | None = None
    waits: bool = False


@dataclass(frozen=True)
class _Given:
    doing: str
    began: Mark
    ended: Mark


class DeviceProgress:
    """Operations that the main thread gives to the device, and how far it is; asked by the heartbeat's thread.

    Args:
        clock: of the device.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._given: deque[_Given] = deque()
        self._done = 0
        self._longest: dict[str, float] = {}

    def record_given(self, doing: str, began: Mark, ended: Mark) -> None:
        """The device was given an operation between two marks."""
        if not self.clock.runs_behind:
            return
        with self._lock:
            self._given.append(_Given(doing, began, ended))

    def forget(self) -> None:
        """The generation is over, and nothing of what the device was given counts any more."""
        with self._lock:
            self._given.clear()

    def state(self) -> DeviceState:
        """What the device has done, and the first operation that it has not."""
        with self._lock, contextlib.suppress(RuntimeError):  # it has failed; the main thread meets the same error
            while self._given and self._given[0].ended.reached():
                one = self._given.popleft()
                self._done += 1
                seconds = one.ended.seconds() - one.began.seconds()
                self._longest[one.doing] = max(seconds, KEPT * self._longest.get(one.doing, 0.0))
            if self._given:
                doing = self._given[0].doing
                return DeviceState(self._done, doing, self._longest.get(doing))
        return DeviceState(self._done)
