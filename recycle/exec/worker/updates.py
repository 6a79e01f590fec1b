"""At which iteration each stage of a worker is, and how it gets to the committed one: step, step ahead, undo.

A step that is taken before its iteration is committed leaves the state from before it in a second set of buffers, so
that it can be taken back bit for bit. The next step needs this one's commit, so one set is enough: a stage is at most
one iteration away from the committed one, behind it (its reduced gradient is still there) or ahead of it.

Keeping the state from before takes as long as the step itself, and need not wait for it: once a step is committed, the
state stays as it is until the next. So a thread copies it while the worker waits for others, in the bubbles of the
schedule, piece by piece; what is left when the step comes is copied before it. States that hosts compare
are kept in the same way (kept_states.py), and are what a worker goes back to when they differ.
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
"""What it is called to go back to a state in which the worker hosted other stages."""
LOOK_SECONDS = 0.002
"""Seconds between two looks of the thread, while the worker waits, at whether the last step is committed."""


class Updates:
    """The optimizer steps of one worker.

    Args:
        stages: the stages that it hosts, at any time.
        at: the iteration that their states are from; -1 for the initial state.
        decided: the commit of an iteration, None as long as there is none; called from the thread. Without it nothing
            is copied early.
        is_on_host: whether the state from before a step is kept in the host's memory, not on the stages' device.
        hosting: hosts the stages; None where they are always the same.
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
        """`iteration` begins, and will end with a step; the steps of the one before are done."""
        with self._lock:
            self._last, self._copies, self._comparison = iteration - 1, dict.fromkeys(self._stages), None
            self._is_due = self._decided is not None

    def compare_in_waits(self, comparison: Comparison) -> None:
        """The state that the iteration begins with is to be compared as soon as it is committed."""
        with self._lock:
            self._comparison, self._is_due = comparison, self._decided is not None

    def waits(self, whether: bool) -> None:
        """The worker begins or ends a wait for others: time to copy the state that the next step may be undone to."""
        if whether and self._is_due:
            self._waits.set()
        else:
            self._waits.clear()

    def reduced(self, iteration: int) -> None:
        """The gradients of `iteration` are summed on all stages, and stay until the next iteration begins."""
        self._reduced = iteration

    def gathered(self, index: int, iteration: int) -> None:
        """All live parameters of a stage, whose hosts step a part of it each, are those behind `iteration`."""
        self._gathered[index] = iteration

    def all_gathered(self, iteration: int) -> None:
        """Those of all stages are."""
        self._gathered = dict.fromkeys(self._stages, iteration)

    def is_stale(self, iteration: int) -> bool:
        """Whether live parameters that hosts gather are those of another iteration than this on some stage."""
        every = self._stages.items()
        return any(self._gathered.get(index) != iteration and stage.layout.gathered() for index, stage in every)

    def compare_state(self, comparison: Comparison) -> None:
        """The state, which is committed, is to be compared, in waits or when `checksums` is called."""
        with self._lock:
            self.kept_states.begin(comparison)

    def checksums(self) -> Mapping[int, Checksum]:
        """The checksums of the state that was to be compared last, complete now."""
        with self._lock:
            return dict(self.kept_states.finish_all())

    def step(self, index: int, commit: Commit) -> None:
        """Step a stage as a commit says, which may be not at all."""
        with self._lock:
            self.kept_states.finish(index)
        if commit.clip_factor is not None:
            self._gathered.pop(index, None)
            self._stages[index].step(commit.step, commit.clip_factor)
        self._at[index] = commit.step

    def step_ahead(self, index: int, iteration: int) -> None:
        """Step a stage with the gradient that it has, unclipped, before the commit; `settle` can take it back."""
        with self._lock:
            self.kept_states.finish(index)
            copy = self._copies.pop(index, None) or self._copy(index)
        copy.finish()
        self._gathered.pop(index, None)
        self._stages[index].step(iteration, 1.0)
        self._at[index] = iteration

    def joined(self, committed: int) -> None:
        """The states were copied from a peer, at the committed iteration."""
        self.kept_states.clear()
        self._gathered.clear()
        self._at = dict.fromkeys(self._stages, committed)

    def rehost(self, at: int) -> None:
        """The worker hosts other stages from now on, whose states are, or will be, from iteration `at`."""
        with self._lock:
            self._hosts_others(at)

    def _hosts_others(self, at: int) -> None:
        self._at, self._copies = dict.fromkeys(self._stages, at), {}
        self._gathered.clear()
        self._before.clear()

    def reshard(self) -> None:
        """The worker steps other parts of its stages from now on, whose states are from the same iteration.

        The memory for the state before a step stays until the next step is taken ahead, which makes it fit: others may
        wait for this worker now.
        """
        with self._lock:
            self._copies = {}

    def stand_at(self, iteration: int) -> bool:
        """Whether every stage's last step was that of `iteration`."""
        return all(at == iteration for at in self._at.values())

    def ahead(self, committed: int) -> list[int]:
        """The stages whose last step is not committed, or is not any more."""
        return [index for index, at in self._at.items() if at > committed]

    def _is_ahead(self, committed: int) -> bool:
        """Whether there is something to take back. Who hosts nothing is at no step, but may have hosted something."""
        return bool(self.ahead(committed)) if self._at else committed < self._settled

    def way_to(self, committed: int, goes_back: bool = False) -> str:
        """What `settle` will do, as the heartbeat's name of the operation: each takes another time."""
        if self._is_ahead(committed):
            return REHOST if goes_back and self.kept_states.is_of_others(committed) else "undo"
        return "settle" if self.stand_at(committed) else "roll-forward"

    def settle(self, committed: int, commit: Commit | None, goes_back: bool = False) -> None:
        """Bring every stage to the committed iteration; or to a kept state and the stages that were hosted then.

        Args:
            commit: of that iteration, None before the first.
            goes_back: whether what came after that iteration was committed and does not count any more: only a kept
                state is right then.

        Raises:
            RunError: a stage is further away than one step, or its gradient is gone; a bug.
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
        # The agent is gone (RunError) or the device has failed (RuntimeError): the main thread sees it too and says so.
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
        """Do a piece of the comparison of the last state, which is committed; whether there was one."""
        if self._comparison is not None:
            self.kept_states.begin(self._comparison)
        return self.kept_states.piece()

    def _copy_piece(self) -> bool:
        """Copy one piece of one stage; whether there was one. What is still coming here is copied by the step."""
        for index, copy in self._copies.items():
            if not self._stages[index].layout.incomplete:
                copy = self._copies[index] = copy or self._copy(index)
                if copy.piece():
                    return True
        return False
