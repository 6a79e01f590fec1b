"""At which iteration each stage of a worker is, and how it gets to the committed one: step, step ahead, undo.

A step that is taken before its iteration is committed leaves the state from before it in a second set of buffers, so
that it can be taken back bit for bit. The next step needs this one's commit, so one set is enough: a stage is at most
one iteration away from the committed one, behind it (its reduced gradient is still there) or ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from recycle.errors import RunError
from recycle.exec.membership.messages import Commit
from recycle.exec.model.stage import Stage
from recycle.exec.worker.undo import Undo


class Updates:
    """The optimizer steps of one worker.

    Args:
        stages: the stages that it hosts.
        at: the iteration that their states are from; -1 for the initial state.
        decided: the commit of an iteration once there is one; see `Undo`.
    """

    def __init__(
        self, stages: Mapping[int, Stage], at: int = -1, decided: Callable[[int], Commit | None] | None = None
    ) -> None:
        self._stages = stages
        self._at = dict.fromkeys(stages, at)
        self._undo = Undo(stages, decided)
        self._reduced = -1

    def begin(self, iteration: int) -> None:
        """`iteration` begins, and will end with a step."""
        self._undo.expect(iteration)

    def waits(self, whether: bool) -> None:
        """The worker begins or ends a wait for others: time to copy the state that the next step may be undone to."""
        self._undo.waits(whether)

    def reduced(self, iteration: int) -> None:
        """The gradients of `iteration` are summed on all stages, and stay until the next iteration begins."""
        self._reduced = iteration

    def step(self, index: int, commit: Commit) -> None:
        """Step a stage as a commit says, which may be not at all."""
        if commit.clip_factor is not None:
            self._stages[index].step(commit.step, commit.clip_factor)
        self._at[index] = commit.step

    def step_ahead(self, index: int, iteration: int) -> None:
        """Step a stage with the gradient that it has, unclipped, before the commit; `settle` can take it back."""
        self._undo.step(index, iteration)
        self._at[index] = iteration

    def joined(self, committed: int) -> None:
        """The states were copied from a peer, at the committed iteration."""
        self._at = dict.fromkeys(self._stages, committed)

    def stand_at(self, iteration: int) -> bool:
        """Whether every stage's last step was that of `iteration`."""
        return all(at == iteration for at in self._at.values())

    def ahead(self, committed: int) -> list[int]:
        """The stages whose last step is not committed."""
        return [index for index, at in self._at.items() if at == committed + 1]

    def way_to(self, committed: int) -> str:
        """What `settle` will do, as the heartbeat's name of the operation: each takes another time."""
        if self.ahead(committed):
            return "undo"
        return "settle" if all(at == committed for at in self._at.values()) else "roll-forward"

    def settle(self, committed: int, commit: Commit | None) -> None:
        """Bring every stage to the committed iteration.

        Args:
            commit: of that iteration, None before the first.

        Raises:
            RunError: a stage is further away than one step, or its gradient is gone; a bug.
        """
        self._undo.forget()
        for index in self.ahead(committed):
            self._undo.take_back(index)
            self._at[index] = committed
        for index, at in self._at.items():
            if at == committed:
                continue
            if commit is None or at != committed - 1 or self._reduced != committed:
                raise RunError(f"stage {index} is at iteration {at}, the register at {committed}")
            self.step(index, commit)
