"""Iteration of each stage of a worker, and the transitions to the committed iteration: step, step ahead, undo.

A step before its iteration's commit first saves the state in a second set of buffers, for an exact undo. The next step
needs the commit, so one set is enough: a stage is at most one iteration behind the committed one (with its reduced
gradient) or ahead of it.

Saving the state takes as long as the step itself. After a commit the state stays unchanged until the next step. So a
thread copies it piece by piece in the bubbles of the schedule. The step copies the remainder. Snapshots for comparisons
(kept_states.py) are saved in the same way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from recycle.errors import RunError
from recycle.exec.checksums import Checksum
from recycle.exec.leader.commit import Comparison
from recycle.exec.model.stage import Stage, buffers_for, copy_state, on_host
from recycle.exec.protocol import Commit
from recycle.exec.worker.hosted import Hosted
from recycle.exec.worker.kept_states import KeptStates, StateCopy

REHOST = "rehost"
"""Name of the transition to a snapshot with other stages."""
LOOK_SECONDS = 0.002
"""Seconds between two checks of the thread, during waits, whether the last step is committed."""


class Updates:
    """The optimizer steps of one worker.

    Args:
        at: the iteration of their states; -1 for the initial state.
        decided: returns the commit of an iteration, or None; called from the thread. Without it no copies are made
            early.
        is_on_host: whether previous states are saved in host memory, not on the stages' device.
        hosting: hosts the stages; None if they never change.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        at: int = -1,
        decided: Callable[[int], Commit | None] | None = None,
        is_on_host: bool = False,
        hosting: Hosted | None = None,
    ) -> None:
        self._stages, self._decided, self._empty_like = stages, decided, on_host if is_on_host else torch.empty_like
        self._at = dict.fromkeys(stages, at)
        self._reduced, self._settled = -1, at
        self._gathered: dict[int, int] = {}
        self._before: dict[int, list[torch.Tensor]] = {}
        self._copies: dict[int, StateCopy | None] = {}
        self._last, self._is_due = -1, False
        self._comparison: Comparison | None = None
        self.kept_states = KeptStates(stages, self._empty_like, hosting)
        self._waits = threading.Event()
        self._lock = threading.Lock()
        if decided is not None:
            threading.Thread(target=self._copy_in_waits, args=(decided,), daemon=True).start()

    def begin(self, iteration: int) -> None:
        """Begin `iteration`, after the steps of the previous one."""
        with self._lock:
            self._last, self._copies, self._comparison = iteration - 1, dict.fromkeys(self._stages), None
            self._is_due = self._decided is not None

    def compare_in_waits(self, comparison: Comparison) -> None:
        """Compare the state at the beginning of the iteration, during waits, once it is committed."""
        with self._lock:
            self._comparison, self._is_due = comparison, self._decided is not None

    def waits(self, whether: bool) -> None:
        """Note that the worker begins or ends a wait for others, during which the thread may copy."""
        if whether and self._is_due:
            self._waits.set()
        else:
            self._waits.clear()

    def reduced(self, iteration: int) -> None:
        """Note that the gradients of `iteration` are reduced on all stages. They stay until the next iteration."""
        self._reduced = iteration

    def gathered(self, index: int, iteration: int) -> None:
        """Note that all live parameters of a stage are from after `iteration`."""
        self._gathered[index] = iteration

    def all_gathered(self, iteration: int) -> None:
        """Note that all live parameters of all stages are from after `iteration`."""
        self._gathered = dict.fromkeys(self._stages, iteration)

    def is_stale(self, iteration: int) -> bool:
        """Whether gathered live parameters of some stage are from another iteration."""
        every = self._stages.items()
        return any(self._gathered.get(index) != iteration and stage.layout.gathered() for index, stage in every)

    def compare_state(self, comparison: Comparison) -> None:
        """Compare the current, committed state, during waits or when `checksums` is called."""
        with self._lock:
            self.kept_states.begin(comparison)

    def checksums(self) -> Mapping[int, Checksum]:
        """Finish the last comparison. Returns its checksums."""
        with self._lock:
            return dict(self.kept_states.finish_all())

    def step(self, index: int, commit: Commit) -> None:
        """Step a stage as a commit decides, unless it skips the step."""
        with self._lock:
            self.kept_states.finish(index)
        if commit.clip_factor is not None:
            self._gathered.pop(index, None)
            self._stages[index].step(commit.step, commit.clip_factor)
        self._at[index] = commit.step

    def step_ahead(self, index: int, iteration: int) -> None:
        """Step a stage before the commit, with its unclipped gradient; `settle` can undo the step."""
        with self._lock:
            self.kept_states.finish(index)
            copy = self._copies.pop(index, None) or self._copy(index)
        copy.finish()
        self._gathered.pop(index, None)
        self._stages[index].step(iteration, 1.0)
        self._at[index] = iteration

    def joined(self, committed: int) -> None:
        """Note that the states were copied from a peer, at the committed iteration."""
        self.kept_states.clear()
        self._gathered.clear()
        self._at = dict.fromkeys(self._stages, committed)

    def rehost(self, at: int) -> None:
        """Note that the worker hosts other stages, whose states are, or will be, from iteration `at`."""
        with self._lock:
            self._hosts_others(at)

    def _hosts_others(self, at: int) -> None:
        self._at, self._copies = dict.fromkeys(self._stages, at), {}
        self._gathered.clear()
        self._before.clear()

    def reshard(self) -> None:
        """Note that the worker steps other shards of its stages; the next step ahead reallocates buffers."""
        with self._lock:
            self._copies = {}

    def stand_at(self, iteration: int) -> bool:
        """Whether the last step of every stage was `iteration`."""
        return all(at == iteration for at in self._at.values())

    def ahead(self, committed: int) -> list[int]:
        """The stages whose last step is not committed (any more)."""
        return [index for index, at in self._at.items() if at > committed]

    def _is_ahead(self, committed: int) -> bool:
        return bool(self.ahead(committed)) if self._at else committed < self._settled

    def way_to(self, committed: int, goes_back: bool = False) -> str:
        """Name of the transition that `settle` will make, for the heartbeat; each takes a different time."""
        if self._is_ahead(committed):
            return REHOST if goes_back and self.kept_states.is_of_others(committed) else "undo"
        return "settle" if self.stand_at(committed) else "roll-forward"

    def settle(self, committed: int, commit: Commit | None, goes_back: bool = False) -> None:
        """Bring every stage to the committed iteration, or, if later commits were revoked, to a snapshot.

        Raises RunError if a stage is more than one step away, or its gradient is gone; a bug.
        """
        with self._lock:
            self._copies, self._is_due = {}, False
            self._waits.clear()
            if goes_back and self._is_ahead(committed):
                if not self.kept_states.go_back(committed):
                    raise RunError(f"the state after step {committed} is to be gone back to, and is not kept here")
                self._hosts_others(committed)
            self.kept_states.cancel()
            self._settled = committed
        if any(at > committed + 1 for at in self._at.values()):
            raise RunError(f"a stage is ahead of step {committed} by more than one step")
        for index in self.ahead(committed):
            copy_state(self._stages[index].state_tensors(), self._buffers(index))
            self._gathered.pop(index, None)
            self._at[index] = committed
        for index, at in self._at.items():
            if at == committed:
                continue
            if commit is None or at != committed - 1 or self._reduced != committed:
                raise RunError(f"stage {index} is at iteration {at}, the register at {committed}")
            self.step(index, commit)

    def _copy(self, index: int) -> StateCopy:
        return StateCopy(self._stages[index].state_tensors(), self._buffers(index))

    def _buffers(self, index: int) -> Sequence[torch.Tensor]:
        live, before = self._stages[index].state_tensors(), self._before.get(index, [])
        if [one.shape for one in before] != [one.shape for one in live]:
            self._before[index] = before = buffers_for(live, before, self._empty_like)
        return before

    def _copy_in_waits(self, decided: Callable[[int], Commit | None]) -> None:
        # The agent is gone (RunError) or the device failed (RuntimeError): the main thread notices and reports it.
        with contextlib.suppress(RunError, RuntimeError):
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
                        if (commit.next_mode == "barrier" or not self._copy_piece()) and not self._compare_piece():
                            self._is_due = False
                            self._waits.clear()

    def _compare_piece(self) -> bool:
        if self._comparison is not None:
            self.kept_states.begin(self._comparison)
        return self.kept_states.piece()

    def _copy_piece(self) -> bool:
        for index, copy in self._copies.items():
            if not self._stages[index].layout.incomplete:
                copy = self._copies[index] = copy or self._copy(index)
                if copy.piece():
                    return True
        return False
