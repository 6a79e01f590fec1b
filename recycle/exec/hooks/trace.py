"""A worker's log of executed instructions, written by a separate thread.

The log stays bounded: each time it has grown by `SPARSE_BYTES`, the worker halves the share of iterations that it logs.
An iteration is skipped if it cannot be written, or if too many wait for a slow disk; training never waits.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from recycle.errors import RecycleError
from recycle.exec.device import ExecutedInstruction, has_reached
from recycle.exec.hooks.hook import Generation, IterationHook
from recycle.runs.logs import append_iteration

SPARSE_BYTES = 2**28
MOST_PENDING = 64
"""Most iterations that wait for the disk."""
CLOSE_SECONDS = 10.0
"""How long the end of a process waits for pending writes."""
_Iteration = tuple[int, int, str, list[ExecutedInstruction], int | None]


class TraceLog(IterationHook):
    """This process's log of iterations divisible by `every`; times count from `started`, in monotonic seconds.

    `set_waiting` is called with True before the wait for the disk at the end, and with False after it.
    """

    def __init__(
        self,
        path: Path,
        started: float,
        warn: Callable[[str], None],
        every: int = 1,
        sparse_bytes: int = SPARSE_BYTES,
        set_waiting: Callable[[bool], None] = lambda waiting: None,
    ) -> None:
        self._path, self._started, self._warn, self._every = path, started, warn, every
        self._sparse_bytes, self._written = sparse_bytes, 0
        self._set_waiting = set_waiting
        self._warned = False
        self._incomplete: deque[_Iteration] = deque()
        self._pending: queue.Queue[_Iteration | None] = queue.Queue(MOST_PENDING)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def begin_generation(self, generation: Generation) -> None:
        self._generation, self._role = generation.record.generation, str(generation.role)

    def end_iteration(
        self, iteration: int, executed: list[ExecutedInstruction], whole: bool, batch: int | None = None
    ) -> None:
        """Log the instructions that the device completes; of an interrupted iteration, those already completed."""
        if iteration % self._every:
            return
        if not whole:
            executed = [instruction for instruction in executed if has_reached(instruction.ended)]
        self._incomplete.append((iteration, self._generation, self._role, executed, batch))
        self._queue_completed()

    def end_generation(self) -> None:
        self._queue_completed()
        self._incomplete.clear()

    def _queue_completed(self) -> None:
        while self._incomplete and all(has_reached(instruction.ended) for instruction in self._incomplete[0][3][-1:]):
            completed = self._incomplete.popleft()
            try:
                self._pending.put_nowait(completed)
            except queue.Full:
                self._skip(f"iteration {completed[0]} was skipped, because {MOST_PENDING} were waiting for the disk")

    def close(self) -> None:
        """Write pending iterations, unless the disk takes too long."""
        self._set_waiting(True)
        with contextlib.suppress(queue.Full):
            self._pending.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        self._set_waiting(False)

    def _write(self) -> None:
        while (logged := self._pending.get()) is not None:
            iteration, generation, role, executed, batch = logged
            start = self._started
            rows = [
                (instruction.text, instruction.began.seconds() - start, instruction.ended.seconds() - start)
                for instruction in executed
            ]
            try:
                self._written += append_iteration(self._path, iteration, generation, role, rows, batch)
            except RecycleError as error:
                self._skip(str(error))
            if self._written >= self._sparse_bytes:
                self._written, self._every = 0, 2 * self._every

    def _skip(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"the trace has gaps: {why}")


def trace_every(setting: int | Literal["all", "off"]) -> int | None:
    """Divisor of the iterations that `[train] trace` logs; None for none."""
    if isinstance(setting, int):
        return setting
    return 1 if setting == "all" else None
