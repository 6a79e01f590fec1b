"""Connections that break in a generation: what follows where a death has not explained it for a while.

Of two workers that cannot reach each other though both live, one is fenced. A transport that broke otherwise has the
same workers form again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from recycle.exec.leader.detector import FailureDetector, whom_to_fence
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.verdict import Fence
from recycle.exec.membership import schema
from recycle.exec.membership.forming import GRACE_SECONDS, Again
from recycle.exec.membership.store import RunStore
from recycle.shape import Worker


class Trouble:
    """Looks for what the workers of a generation say of their connections.

    Args:
        store: of the run.
        now: monotonic seconds.
        holdings: who holds what.
    """

    def __init__(self, store: RunStore, now: Callable[[], float], holdings: Holdings) -> None:
        self._store, self._now, self._holdings = store, now, holdings
        self._since: float | None = None

    def begin(self) -> None:
        """A generation begins to run: forget what broke in the one before."""
        self._since = None

    def cut(self, generation: int, holders: Collection[Worker], detector: FailureDetector) -> Fence | Again | None:
        """Which of two workers to fence that cannot reach each other though both live; None if there are no such two.

        Args:
            holders: the live workers that have state.
            detector: knows who is silent.
        """
        names = self._store.read(schema.CutKey(generation))
        if names is None:
            return None
        pair = [Worker.parse(name) for name in names]
        silent = [worker for worker in pair if detector.is_silent(worker, self._now())]
        fenced = whom_to_fence(pair, holders, silent, self._holdings.fewest_hosts(pair, holders))
        if fenced is None:
            return Again(f"workers {pair[0]} and {pair[1]} cannot reach each other, and each is its stage's last host")
        (other,) = (worker for worker in pair if worker != fenced)
        return Fence({fenced: f"cut off from worker {other}"})

    def look(self, generation: int, holders: Collection[Worker], detector: FailureDetector) -> Fence | Again | None:
        """What follows from all that broke while the generation ran; None as long as nothing does.

        Args:
            holders, detector: as for `cut`.
        """
        if (cut := self.cut(generation, holders, detector)) is not None:
            return cut
        if self._since is None:
            if self._store.has_all([schema.TroubleKey(generation)]):
                self._since = self._now()
        elif self._now() - self._since > GRACE_SECONDS:
            return Again(self._store.read(schema.TroubleKey(generation)) or "")
        return None
