"""The progress of a process, as its heartbeat reports it."""

from __future__ import annotations

import time
from collections.abc import Callable

from recycle.exec.device.device_progress import KEPT, DeviceState
from recycle.exec.protocol import Heartbeat


class Progress:
    """How far the process is, what it does, and whether it waits for another process.

    Of each kind of operation the longest recent time is kept; it decays by a tenth whenever one of the kind ends.

    A device that runs behind its host makes progress of its own. While it computes, the process does not wait, whatever
    its main thread waits for; while it waits for another process, so does the main thread perhaps, without a word,
    where the device takes no more launches.

    Args:
        device: how far the process's device is.
    """

    def __init__(self, device: Callable[[], DeviceState] = DeviceState) -> None:
        self._device = device
        self.count = 0
        self.waiting = True
        self.doing = "start"
        self._longest: dict[str, float] = {}
        self._usual: float | None = None
        self._worked, self._since = 0.0, time.monotonic()

    def begins(self, doing: str, warms_up: bool = True) -> None:
        """The main thread is at an operation of this kind, a word without spaces.

        Args:
            warms_up: the first of its kind may compile or load something; else it takes about as long as any other.
        """
        self.doing, self.waiting = doing, False
        self._usual = None if warms_up else max(self._longest.values(), default=None)
        self._worked, self._since = 0.0, time.monotonic()
        self.count += 1

    def ended(self) -> None:
        """The operation is done, and its time, without its waits, is what the next of its kind is held against."""
        self.set_waiting(False)
        self._longest[self.doing] = max(self._worked, KEPT * self._longest.get(self.doing, 0.0))

    def set_waiting(self, waiting: bool) -> None:
        now = time.monotonic()
        if not self.waiting:
            self._worked += now - self._since
        self.waiting, self._since = waiting, now
        self.count += 1

    def heartbeat(self, beats: int) -> Heartbeat:
        """What is sent as the heartbeat behind `beats` others."""
        device = self._device()
        if device.doing and not device.waits:
            doing, longest, waiting = device.doing, device.longest, False
        else:
            doing, longest = self.doing, self._longest.get(self.doing, self._usual)
            waiting = self.waiting or device.waits
        rounded = None if longest is None else float(f"{longest:.2g}")
        return Heartbeat(beats, self.count + device.done, waiting, doing, rounded)
