"""A generation from its proposal to its first iteration, and connections that break while it runs.

First all workers acknowledge the generation, then all form their groups. A worker that sends heartbeats and does not
answer before a deadline is fenced, unless it is the last host of a unit; so is a worker that fails twice to form its
groups although the others could. Of two workers that cannot reach each other although both live, one is fenced. After
any other failure the same workers form again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from recycle.exec.leader.actions import Outbox
from recycle.exec.leader.detector import FailureDetector, whom_to_fence
from recycle.exec.leader.heard import Heard
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.verdict import Fence
from recycle.exec.members import split_member
from recycle.exec.protocol import Copied, Formed, GenerationRecord
from recycle.job.sections import MembershipSection
from recycle.job.shape import Worker

FAILURES = 2
"""Times that a worker may fail to form its groups before it is fenced."""
GRACE_SECONDS = 1.0
"""How long the leader waits for a death that explains a failure, before the same workers form again."""


@dataclass(frozen=True)
class RetryFormation:
    """The same workers are to form another generation; why."""

    cause: str


@dataclass(frozen=True)
class AllAcknowledged:
    """All have acknowledged; how many workers have taken back a step."""

    undone: int


class Forming:
    """Judges how the generations of one run form, one after the other.

    Args:
        heard: what the processes of the generation have said.
        limits: deadlines.
        outbox: has the time.
        holdings: who holds what.
    """

    def __init__(self, heard: Heard, limits: MembershipSection, outbox: Outbox, holdings: Holdings) -> None:
        self._heard, self._limits, self._outbox, self._holdings = heard, limits, outbox, holdings
        self._failures: Counter[Worker] = Counter()
        self._blamed: set[Worker] = set()
        self._failed_since: float | None = None
        self._trouble_since: float | None = None
        self._judges_from = 0.0

    def begin(self) -> None:
        """Another generation is proposed."""
        self._failed_since = self._trouble_since = None

    def follow(self) -> None:
        """Follow another leader: who is silent is not known before heartbeats could have come for a while."""
        self._judges_from = self._outbox.now + self._limits.dead_after / 2 + 2 * self._limits.heartbeat

    def forgive(self) -> None:
        """Forget who has failed: the cause may have been another one."""
        self._failures.clear()

    def acknowledged(
        self, waited: float, holders: Collection[Worker], detector: FailureDetector
    ) -> AllAcknowledged | Fence | RetryFormation | None:
        """Whether all have acknowledged; None as long as that is not known.

        Args:
            waited: seconds since the proposal.
            holders: the live workers that have state.
            detector: knows how long their operations take.
        """
        if self._heard.is_complete(self._heard.undone):
            undone = (member for member, took_back in self._heard.undone.items() if took_back)
            return AllAcknowledged(len({split_member(member)[0] for member in undone}))
        limit = self._limits.form_timeout
        if waited <= limit:
            return None
        # A worker may be in the middle of an operation that nothing can interrupt.
        missing = _workers(self._heard.missing(self._heard.undone))
        late = {worker for worker in missing if waited > limit + detector.patience_with(worker)}
        return self._fence_late(late, f"generation {self._heard.generation} was not acknowledged", waited, holders)

    def copied(self) -> list[tuple[str, Copied]]:
        """What each worker has copied, as its first process says."""
        formed = self._heard.formed
        return [
            (member, copied)
            for member in self._heard.members
            if member in formed and split_member(member)[1] == 0
            for copied in formed[member].copied
        ]

    def formed(
        self, record: GenerationRecord, waited: float, holders: Collection[Worker]
    ) -> bool | Fence | RetryFormation:
        """Whether the groups of all stand.

        Args:
            waited: seconds since all have acknowledged.
            holders: as for `acknowledged`.
        """
        answers, failed = self._heard.formed, dict[str, Formed]()
        if self._heard.failed:
            failed = {member: answers[member] for member in self._heard.members if member in self._heard.failed}
        if own := {member: answer.error for member, answer in failed.items() if not answer.expired}:
            return self._blame(own, holders)
        if not self._heard.is_complete(answers):
            # A worker that waits for a late one answers after `form_timeout`, or that of a copy's transfers.
            limit = 2 * self._limits.form_timeout + (self._limits.transport_timeout if record.copies else 0.0)
            late = _workers(self._heard.missing(answers)) if waited > limit else set()
            what = f"groups of generation {record.generation} did not form"
            return self._fence_late(late, what, waited, holders) or False
        if failed:
            member, answer = next(iter(failed.items()))
            return RetryFormation(f"worker {member} could not form generation {record.generation}: {answer.error}")
        return True

    def _blame(self, errors: dict[str, str], holders: Collection[Worker]) -> bool | Fence | RetryFormation:
        """Form again, without the worker that was the first to fail twice.

        The workers that fail first are noted, and a death that explains it is waited for: others fail in consequence.
        """
        failed = {Worker.parse(split_member(member)[0]): error for member, error in errors.items()}
        if self._failed_since is None:
            self._failed_since, self._blamed = self._outbox.now, set(failed)
        if self._outbox.now - self._failed_since <= GRACE_SECONDS:
            return False
        self._failures.update(self._blamed)
        often = [worker for worker in self._blamed if self._failures[worker] >= FAILURES]
        fenced = whom_to_fence(often, holders, hosts=self._holdings.fewest_hosts(often, holders))
        reason = f"could not form generation {self._heard.generation}: {failed[fenced or min(self._blamed)]}"
        if fenced is None:
            return RetryFormation(f"worker {min(self._blamed)} {reason}")
        return Fence({fenced: reason})

    def _fence_late(
        self, late: set[Worker], what: str, waited: float, holders: Collection[Worker]
    ) -> Fence | RetryFormation | None:
        if not late:
            return None
        cause = f"{what} within {waited:.0f} s"
        if not self._holdings.lost(set(holders) - late):
            return Fence(dict.fromkeys(late, cause))
        return RetryFormation(f"{cause} by workers {' '.join(map(str, sorted(late)))}")

    def cut(self, holders: Collection[Worker], detector: FailureDetector) -> Fence | RetryFormation | None:
        """Which of two workers to fence that cannot reach each other although both live; None if there are no such two.

        Args:
            holders: the live workers that have state.
            detector: knows who is silent.
        """
        if self._heard.cut is None or self._outbox.now < self._judges_from:
            return None
        pair = [Worker.parse(name) for name in self._heard.cut]
        silent = [worker for worker in pair if detector.is_silent(worker, self._outbox.now)]
        fenced = whom_to_fence(pair, holders, silent, self._holdings.fewest_hosts(pair, holders))
        if fenced is None:
            return RetryFormation(
                f"workers {pair[0]} and {pair[1]} cannot reach each other, and each is its stage's last host"
            )
        (other,) = (worker for worker in pair if worker != fenced)
        return Fence({fenced: f"cut off from worker {other}"})

    def trouble(self, holders: Collection[Worker], detector: FailureDetector) -> Fence | RetryFormation | None:
        """What follows from connections that broke while the generation ran; None as long as nothing does.

        Args:
            holders, detector: as for `cut`.
        """
        if (cut := self.cut(holders, detector)) is not None:
            return cut
        if not self._heard.trouble:
            return None
        if self._trouble_since is None:
            self._trouble_since = self._outbox.now
        if self._outbox.now - self._trouble_since <= GRACE_SECONDS:
            return None
        return RetryFormation(self._heard.trouble)


def _workers(members: Iterable[str]) -> set[Worker]:
    return {Worker.parse(split_member(member)[0]) for member in members}
