"""A generation from its proposal to its first iteration, and connections that break while it runs.

First all workers acknowledge the generation, then all form their groups. A worker that sends heartbeats and does not
answer before a deadline is fenced, unless it is the last host of a unit; so is a worker that fails twice to form its
groups although the others could. Of two workers that cannot reach each other although both live, one is fenced. After
any other failure the same workers form again.
"""

from __future__ import annotations

from collections import Counter

from recycle.errors import RunError
from recycle.exec.leader.detector import whom_to_fence
from recycle.exec.leader.state import RunState
from recycle.exec.leader.verdict import Fence
from recycle.exec.members import worker_of
from recycle.exec.protocol import Acknowledged, CutOff, Formed, Trouble, Value
from recycle.job.shape import Worker

ATTEMPTS = 5
"""Times that the same live set may fail to form or run before the run is given up."""
FAILURES = 2
"""Times that a worker may fail to form its groups before it is fenced."""
GRACE_SECONDS = 1.0
"""How long the leader waits for a death that explains a failure, before the same workers form again."""


class RetryFormation(Value):
    """The same workers are to form another generation; why."""

    cause: str


class Forming:
    """Judges how the generations of one run form, one after the other. Answers are None as long as nothing follows."""

    def __init__(self, state: RunState) -> None:
        self._state, self._limits = state, state.job.membership
        self._attempts = 0
        self._failures: Counter[Worker] = Counter()
        self._blamed: set[Worker] = set()
        self._since: float | None = None
        self._judges_from = 0.0

    def begin(self) -> None:
        """Another generation is proposed."""
        self._since = None

    def follow(self) -> None:
        """Follow another leader: who is silent is not known before heartbeats could have come for a while."""
        self._judges_from = self._state.now + self._limits.dead_after / 2 + 2 * self._limits.heartbeat

    def forgive(self) -> None:
        """Forget who has failed, and how often: the cause may have been another one."""
        self._attempts = 0
        self._failures.clear()

    def count_attempt(self, cause: str) -> None:
        """The same workers form again. Raises RunError when they have tried often enough."""
        self._attempts += 1
        if self._attempts >= ATTEMPTS:
            raise RunError(f"gave up after {ATTEMPTS} attempts with the same workers: {cause}")

    def not_acknowledged(self) -> Fence | RetryFormation | None:
        """What follows as long as not all have acknowledged the generation."""
        state, limit = self._state, self._limits.form_timeout
        if state.waited <= limit:
            return None
        # A worker may be in the middle of an operation that nothing can interrupt.
        missing = state.heard.silent(Acknowledged)
        late = {worker for worker in missing if state.waited > limit + state.detector.patience_with(worker)}
        return self._fence_late(late, f"generation {state.record.generation} was not acknowledged")

    def not_formed(self) -> Fence | RetryFormation | None:
        """What follows as long as the groups of all do not stand."""
        state, heard = self._state, self._state.heard
        answers, generation = heard.of(Formed), state.record.generation
        failed = [member for member in heard.members if member in heard.failed] if heard.failed else []
        if own := {worker_of(name): answers[name].error for name in failed if not answers[name].expired}:
            return self._blame(own)
        if heard.all_said(Formed):
            cause = f"worker {failed[0]} could not form generation {generation}: {answers[failed[0]].error}"
            return RetryFormation(cause)
        # A worker that waits for a late one answers after `form_timeout`, or that of a copy's transfers.
        limit = 2 * self._limits.form_timeout + (self._limits.transport_timeout if state.record.copies else 0.0)
        late = heard.silent(Formed) if state.waited > limit else set()
        return self._fence_late(late, f"groups of generation {generation} did not form")

    def _blame(self, failed: dict[Worker, str]) -> Fence | RetryFormation | None:
        """Form again, without the worker that was the first to fail twice.

        The workers that fail first are noted, and a death that explains it is waited for: others fail in consequence.
        """
        state = self._state
        if self._since is None:
            self._blamed = set(failed)
        if self._may_be_explained():
            return None
        self._failures.update(self._blamed)
        often = [worker for worker in self._blamed if self._failures[worker] >= FAILURES]
        fenced = whom_to_fence(often, state.holders, hosts=state.holdings.fewest_hosts(often, state.holders))
        reason = f"could not form generation {state.record.generation}: {failed[fenced or min(self._blamed)]}"
        return Fence({fenced: reason}) if fenced else RetryFormation(f"worker {min(self._blamed)} {reason}")

    def _may_be_explained(self) -> bool:
        """Whether a death may follow that explains what the generation has failed with a moment ago."""
        self._since = self._state.now if self._since is None else self._since
        return self._state.now - self._since <= GRACE_SECONDS

    def _fence_late(self, late: set[Worker], what: str) -> Fence | RetryFormation | None:
        if not late:
            return None
        cause = f"{what} within {self._state.waited:.0f} s"
        if not self._state.lost_unit(self._state.holders - late):
            return Fence(dict.fromkeys(late, cause))
        return RetryFormation(f"{cause} by workers {' '.join(map(str, sorted(late)))}")

    def cut(self) -> Fence | RetryFormation | None:
        """Which of the first two workers to fence that cannot reach each other although both live."""
        state, now = self._state, self._state.now
        if now < self._judges_from or not (cuts := state.heard.of(CutOff)):
            return None
        member, message = next(iter(cuts.items()))
        pair = [worker_of(member), Worker.parse(message.peer)]
        silent = [worker for worker in pair if state.detector.is_silent(worker, now)]
        fenced = whom_to_fence(pair, state.holders, silent, state.holdings.fewest_hosts(pair, state.holders))
        if fenced is None:
            return RetryFormation(
                f"workers {pair[0]} and {pair[1]} cannot reach each other, and each is its stage's last host"
            )
        (other,) = (worker for worker in pair if worker != fenced)
        return Fence({fenced: f"cut off from worker {other}"})

    def trouble(self) -> Fence | RetryFormation | None:
        """What follows from connections that broke while the generation ran."""
        if (cut := self.cut()) is not None:
            return cut
        troubles = self._state.heard.of(Trouble)
        if not troubles or self._may_be_explained():
            return None
        return RetryFormation(next(iter(troubles.values())).message)
