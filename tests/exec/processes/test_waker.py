"""A waker makes its descriptor readable, and writes into no other file once it is closed."""

from __future__ import annotations

import os
import select

from recycle.exec.processes.processes import Waker


def is_readable(descriptor: int) -> bool:
    return select.select([descriptor], [], [], 0) == ([descriptor], [], [])


def test_wakes_are_readable_until_they_are_cleared() -> None:
    waker = Waker()
    assert not is_readable(waker.descriptor)
    waker.wake()
    waker.wake()
    assert is_readable(waker.descriptor)
    waker.clear()
    assert not is_readable(waker.descriptor)
    waker.close()


def test_wake_after_close_writes_into_no_file_that_got_the_descriptor() -> None:
    waker = Waker()
    waker.close()
    reader, writer = os.pipe()
    waker.wake()
    assert not is_readable(reader)
    os.close(reader)
    os.close(writer)
