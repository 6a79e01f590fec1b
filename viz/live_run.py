"""A run that is followed while it goes on."""

from __future__ import annotations

import threading
import time

from recycle.errors import RecycleError
from viz.run import Run, load_run

REFRESH_SECONDS = 4.0
"""Between two readings of a run that goes on."""


class LiveRun:
    """A run directory that is read again while its run goes on; `run` is what was read last."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._read_again_at = time.monotonic() + REFRESH_SECONDS
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read a live run again, however many browsers ask: once per REFRESH_SECONDS, and for a tenth of the time."""
        with self._lock:
            began = time.monotonic()
            if self.run.live and began >= self._read_again_at:
                try:
                    self.run = load_run(self.run.path)
                except RecycleError as error:
                    self.run.problems[:] = [str(error)]
                ended = time.monotonic()
                self._read_again_at = ended + max(REFRESH_SECONDS, 10 * (ended - began))
