"""Waits of tests for what other processes and threads do."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds=60.0):
    """Wait until something holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
