"""A pipe by which threads wake a process's one loop."""

from __future__ import annotations

import contextlib
import os


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
        descriptors = self.descriptor, self._end
        self.descriptor = self._end = -1  # a file that is opened later may get the number of a closed one
        for descriptor in descriptors:
            os.close(descriptor)
