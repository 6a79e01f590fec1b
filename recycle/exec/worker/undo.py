"""Undo: the state before each step that is taken ahead of its commit, to take the step back bit for bit.

Keeping one takes as long as the step itself, and need not wait for it: once a step is committed, the state stays as it
is until the next. So a thread copies it while the worker waits for others, in the bubbles of the schedule, piece by
piece; what is left when the step comes is copied piece by piece with it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from recycle.errors import RunError
from recycle.exec.membership.messages import Commit
from recycle.exec.model.stage import Stage, copy_state

LOOK_SECONDS = 0.002
"""Seconds between two looks of the thread, while the worker waits, at whether the last step is committed."""


class Undo:
    """One set of buffers per stage: the step after the next needs this one's commit, so one is enough.

    Args:
        stages: those of one worker.
        decided: the commit of an iteration, None as long as there is none; called from the thread. Without it
            nothing is copied early.
    """

    def __init__(self, stages: Mapping[int, Stage], decided: Callable[[int], Commit | None] | None = None) -> None:
        self._stages, self._decided = stages, decided
        self._before: dict[int, list[torch.Tensor]] = {}
        self._kept: dict[int, int] = {}
        self._last, self._is_due = -1, False
        self._waits = threading.Event()
        self._lock = threading.Lock()
        if decided is not None:
            threading.Thread(target=self._copy_in_waits, args=(decided,), daemon=True).start()

    def expect(self, iteration: int) -> None:
        """The next step will be that of `iteration`, and those of the one before are done."""
        with self._lock:
            self._last, self._kept = iteration - 1, dict.fromkeys(self._stages, 0)
            self._is_due = self._decided is not None

    def forget(self) -> None:
        """No step is expected; the states may change."""
        with self._lock:
            self._kept, self._is_due = {}, False
            self._waits.clear()

    def waits(self, whether: bool) -> None:
        """The worker begins or ends a wait for others."""
        if whether and self._is_due:
            self._waits.set()
        else:
            self._waits.clear()

    def step(self, index: int, iteration: int) -> None:
        """Step a stage ahead of the commit, unclipped; `take_back` can undo it."""
        with self._lock:
            kept = self._kept.pop(index, 0)
        self._stages[index].step(iteration, 1.0, self._buffers(index), kept)

    def take_back(self, index: int) -> None:
        """Bring a stage back to where it was before its last `step`."""
        copy_state(self._stages[index].state_tensors(), self._buffers(index))

    def _buffers(self, index: int) -> Sequence[torch.Tensor]:
        if index not in self._before:
            self._before[index] = [torch.empty_like(tensor) for tensor in self._stages[index].state_tensors()]
        return self._before[index]

    def _copy_in_waits(self, decided: Callable[[int], Commit | None]) -> None:
        with contextlib.suppress(RunError):  # the store is gone; the main thread has seen it too
            while True:
                self._waits.wait()
                last = self._last
                commit = decided(last)
                if commit is None:
                    time.sleep(LOOK_SECONDS)
                    continue
                while self._waits.is_set():
                    with self._lock:
                        if self._last != last:
                            break
                        if commit.next_mode == "barrier" or not self._copy_piece():
                            self._is_due = False
                            self._waits.clear()

    def _copy_piece(self) -> bool:
        """Copy one piece of one stage; whether there was one."""
        for index, start in self._kept.items():
            stop = self._stages[index].keep(self._buffers(index), start)
            if stop != start:
                self._kept[index] = stop
                return True
        return False
