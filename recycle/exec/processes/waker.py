"""A pipe by which threads wake a process's one loop, and the thread that does so for changes of the store."""

from __future__ import annotations

import contextlib
import os
import threading

from recycle.errors import RunError
from recycle.exec.membership.store import RunStore

LISTEN_SECONDS = 300.0
"""How long one call listens to the store; there is another behind it."""


class Waker:
    """`wake` makes `descriptor` readable until the next `clear`; safe from any thread."""

    def __init__(self) -> None:
        self.descriptor, self._end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._end, False)

    def wake(self) -> None:
        """Make the descriptor readable. Does nothing after `close`."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._end, b"!")

    def clear(self) -> None:
        """Forget all wakes so far."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self.descriptor)
        os.close(self._end)


class Listener:
    """A thread that wakes a loop for every change of the store that its client follows, until the store is closed.

    Args:
        store: a client of the thread's own.
    """

    def __init__(self, store: RunStore, waker: Waker) -> None:
        self._store, self._waker, self._closing = store, waker, threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(RunError):
            while not self._closing.is_set():
                self._store.wait_for_change(LISTEN_SECONDS)
                self._waker.wake()
        self._waker.wake()

    def close(self) -> None:
        """End the thread, by closing its client and all clones of that."""
        self._closing.set()
        self._store.close()
        self._thread.join()
