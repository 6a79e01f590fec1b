"""Iteration of each stage of a worker, and the transitions to the committed iteration: step, step ahead, undo.

A step before its iteration's commit first saves the state in a second set of buffers, for an exact undo. The next step
needs the commit, so one set is enough: a stage is at most one iteration behind the committed one (with its reduced
gradient) or ahead of it. A thread copies the committed state in the bubbles of the schedule, and the step copies the
remainder. Snapshots (snapshots.py) are saved in the same way. On a GPU, copies run on a separate stream, and the
step waits for them there; buffers in pinned memory take seconds to allocate, so they are allocated when a generation
begins, before any receive is posted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from recycle.errors import RunError
from recycle.exec.checksums import Checksum
from recycle.exec.device import CopyStream, HostCopies
from recycle.exec.leader.commit import Comparison
from recycle.exec.model.stage import Stage, buffers_for, copy_state, on_host
from recycle.exec.protocol import Commit
from recycle.exec.worker.local_stages import LocalStages
from recycle.exec.worker.snapshots import StateCopy, StateSnapshots

REHOST = "rehost"
"""Name of the transition to a snapshot with other stages."""
COMMIT_POLL_SECONDS = 0.002
"""Interval at which the thread checks, during waits, whether the last step is committed."""


class StepState:
    """The optimizer steps of one worker.

    Args:
        at: the iteration of their states; -1 for the initial state.
        known_commit: returns the commit of an iteration, or None; called from the thread. None: no early copies.
        is_on_host: whether previous states are saved in host memory, not on the stages' device.
        hosted: the owner of the stages, which may change; None if they never change.
        stream: for copies of the states.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        at: int = -1,
        known_commit: Callable[[int], Commit | None] | None = None,
        is_on_host: bool = False,
        hosted: LocalStages | None = None,
        stream: CopyStream | None = None,
    ) -> None:
        self._stages, self._decided, self._is_on_host = stages, known_commit, is_on_host
        self._empty_like = on_host if is_on_host else torch.empty_like
        self._stream = stream or HostCopies()
        self._at = dict.fromkeys(stages, at)
        self._reduced, self._rolled_to = -1, at
        self._gathered: dict[int, int] = {}
        self._before: dict[int, list[torch.Tensor]] = {}
        self._copies: dict[int, StateCopy | None] = {}
        self._last, self._is_due = -1, False
        self._comparison: Comparison | None = None
        self.snapshots = StateSnapshots(stages, self._empty_like, self._stream, hosted)
        self._may_copy = threading.Event()
        self._lock = threading.Lock()
        if known_commit is not None:
            threading.Thread(target=self._copy_during_waits, args=(known_commit,), daemon=True).start()

    def reserve(self, set_waiting: Callable[[bool], None]) -> None:
        """Allocate the buffers that are in host memory; `set_waiting` is called before each, as progress."""

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            set_waiting(False)
            return self._empty_like(tensor)

        if self._is_on_host and self._decided is not None:
            for index in self._stages:
                self._buffers(index, allocate)

    def begin_iteration(self, iteration: int) -> None:
        with self._lock:
            self._last, self._copies, self._comparison = iteration - 1, dict.fromkeys(self._stages), None
            self._is_due = self._decided is not None
            self._stream.follow()

    def compare_during_waits(self, comparison: Comparison) -> None:
        """Compare the state at the beginning of the iteration, during waits, once it is committed."""
        with self._lock:
            self._comparison, self._is_due = comparison, self._decided is not None

    def set_waiting(self, waiting: bool) -> None:
        """The worker begins or ends a wait for others, during which the thread may copy."""
        if waiting and self._is_due:
            self._may_copy.set()
        else:
            self._may_copy.clear()

    def mark_reduced(self, iteration: int) -> None:
        """The gradients of all stages are reduced, and stay until the next iteration."""
        self._reduced = iteration

    def mark_gathered(self, index: int, iteration: int) -> None:
        """All live parameters of a stage are from after `iteration`."""
        self._gathered[index] = iteration

    def mark_all_gathered(self, iteration: int) -> None:
        self._gathered = dict.fromkeys(self._stages, iteration)

    def is_stale(self, iteration: int) -> bool:
        """Whether gathered live parameters of some stage are from another iteration."""
        stages = self._stages.items()
        return any(self._gathered.get(index) != iteration and stage.layout.gathered() for index, stage in stages)

    def compare_state(self, comparison: Comparison) -> None:
        """Compare the current, committed state, during waits or when `checksums` is called."""
        with self._lock:
            self._stream.follow()
            self.snapshots.compare(comparison)

    def checksums(self) -> Mapping[int, Checksum]:
        """Finish the last comparison. Returns its checksums."""
        with self._lock:
            return dict(self.snapshots.finish_all())

    def step(self, index: int, commit: Commit) -> None:
        """Step a stage as a commit decides, unless it skips the step."""
        with self._lock:
            self.snapshots.finish_stage(index)
        if commit.clip_factor is not None:
            self._gathered.pop(index, None)
            self._stages[index].step(commit.step, commit.clip_factor)
        self._at[index] = commit.step

    def step_ahead(self, index: int, iteration: int) -> None:
        """Step a stage before the commit, with its unclipped gradient; `roll_to` can undo the step."""
        with self._lock:
            self.snapshots.finish_stage(index)
            copy = self._copies.pop(index, None)
            if copy is None:
                self._stream.follow()
                copy = self._copy(index)
        copy.finish()
        self._stream.mark()()
        self._gathered.pop(index, None)
        self._stages[index].step(iteration, 1.0)
        self._at[index] = iteration

    def mark_copied(self, committed: int) -> None:
        """The states were copied from a peer, at the committed iteration."""
        self.snapshots.clear()
        self._gathered.clear()
        self._at = dict.fromkeys(self._stages, committed)

    def mark_rehosted(self, at: int) -> None:
        """The worker hosts other stages, whose states are, or will be, from iteration `at`."""
        with self._lock:
            self._reset_stages(at)

    def _reset_stages(self, at: int) -> None:
        self._at, self._copies = dict.fromkeys(self._stages, at), {}
        self._gathered.clear()
        self._before.clear()

    def mark_resharded(self) -> None:
        """The worker steps other shards of its stages; the next step ahead reallocates buffers."""
        with self._lock:
            self._copies = {}

    def all_at(self, iteration: int) -> bool:
        return all(at == iteration for at in self._at.values())

    def stages_ahead(self, committed: int) -> list[int]:
        return [index for index, at in self._at.items() if at > committed]

    def _is_ahead(self, committed: int) -> bool:
        return bool(self.stages_ahead(committed)) if self._at else committed < self._rolled_to

    def planned_transition(self, committed: int, restores: bool = False) -> str:
        """Name of the transition that `roll_to` will make, for the heartbeat; each takes a different time."""
        if self._is_ahead(committed):
            return REHOST if restores and self.snapshots.has_other_layout(committed) else "undo"
        return "settle" if self.all_at(committed) else "roll-forward"

    def roll_to(self, committed: int, commit: Commit | None, restores: bool = False) -> None:
        """Bring every stage to the committed iteration, or, if later commits were revoked, to a snapshot.

        Raises RunError if a stage is more than one step away, or its gradient is gone; a bug.
        """
        with self._lock:
            self._copies, self._is_due = {}, False
            self._may_copy.clear()
            self._stream.mark()()  # before buffers of cancelled copies are freed
            if restores and self._is_ahead(committed):
                if not self.snapshots.restore(committed):
                    raise RunError(f"this worker has no snapshot after step {committed}, which training restores")
                self._reset_stages(committed)
            self.snapshots.cancel()
            self._rolled_to = committed
        if any(at > committed + 1 for at in self._at.values()):
            raise RunError(f"a stage is ahead of step {committed} by more than one step")
        for index in self.stages_ahead(committed):
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
        return StateCopy(self._stages[index].state_tensors(), self._buffers(index), self._stream)

    def _buffers(
        self, index: int, empty_like: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        live, before = self._stages[index].state_tensors(), self._before.get(index, [])
        if [tensor.shape for tensor in before] != [tensor.shape for tensor in live]:
            self._before[index] = before = buffers_for(live, before, empty_like or self._empty_like)
            self._stream.follow()  # their memory may still be in use by earlier work
        return before

    def _copy_during_waits(self, known_commit: Callable[[int], Commit | None]) -> None:
        # The agent is gone (RunError) or the device failed (RuntimeError): the main thread notices and reports it.
        with contextlib.suppress(RunError, RuntimeError):
            while True:
                self._may_copy.wait()
                last = self._last
                commit = known_commit(last)
                if commit is None:
                    time.sleep(COMMIT_POLL_SECONDS)
                    continue
                while self._may_copy.is_set():
                    with self._lock:
                        if self._last != last:
                            break
                        if (commit.next_mode == "barrier" or not self._copy_piece()) and not self._compare_piece():
                            self._is_due = False
                            self._may_copy.clear()

    def _compare_piece(self) -> bool:
        if self._comparison is not None:
            self.snapshots.compare(self._comparison)
        return self.snapshots.process_piece()

    def _copy_piece(self) -> bool:
        for index, copy in self._copies.items():
            if not self._stages[index].layout.incomplete:
                copy = self._copies[index] = copy or self._copy(index)
                if copy.piece():
                    return True
        return False
