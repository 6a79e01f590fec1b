"""Waits of tests for what other processes and threads do, and a clock for what must not depend on a busy machine."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds=60.0):
    """Wait until something holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class ManualTime:
    """Stands for the module `time` in a tested module: only tests and the module's own sleeps move its clock."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float):
        self.now += seconds
