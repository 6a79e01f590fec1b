"""SIGTERM to a worker process: the first has the worker leave at the next boundary, a second ends the process.

The signal is blocked in all threads but one that waits for it, so that it interrupts no transfer and is noticed however
long the main thread waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

from recycle.errors import RunError

_SIGNALS = {signal.SIGTERM}
ENDED = 128 + signal.SIGTERM
"""Exit code of a process that was told to leave a second time."""


class Termination:
    """Takes SIGTERM from here on. Made before any other thread, because threads inherit what is blocked."""

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS))

    def listen(self, notify: Callable[[], None], end: Callable[[str, int], object]) -> None:
        """Start the thread that waits.

        Args:
            notify: tells the leader that this worker leaves; called from the thread. Raises RunError when the
                agent is gone; the process then ends by itself.
            end: ends the process, given a reason and an exit code.
        """
        threading.Thread(target=self._listen, args=(notify, end), daemon=True).start()

    @staticmethod
    def _listen(notify: Callable[[], None], end: Callable[[str, int], object]) -> None:
        signal.sigwait(_SIGNALS)
        with contextlib.suppress(RunError):
            notify()
        signal.sigwait(_SIGNALS)
        end("it was told to leave a second time", ENDED)
