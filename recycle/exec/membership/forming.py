"""A generation on its way from its proposal to its first iteration: who has answered, who is late, who fails.

First all acknowledge it, then all form their groups. Whoever beats, but does not answer until a deadline, is fenced,
unless it is a unit's last host, and so is who fails twice to form its groups though others came. What fails
otherwise is tried again with the same workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from recycle.exec.leader.detector import FailureDetector, whom_to_fence
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.verdict import Fence
from recycle.exec.members import split_member
from recycle.exec.membership import schema
from recycle.exec.membership.store import Gathering, RunStore
from recycle.exec.protocol import Copied, Formed, GenerationRecord
from recycle.sections import MembershipSection
from recycle.shape import Worker

FAILURES = 2
"""Times that a worker may fail to form its groups before it is fenced."""
GRACE_SECONDS = 1.0
"""How long something broken may go unexplained by a death before the same live set is simply formed again."""


@dataclass(frozen=True)
class Again:
    """The same workers are to form another generation; why."""

    cause: str


@dataclass(frozen=True)
class TookBack:
    """All have acknowledged; how many workers have taken back a step for that."""

    workers: int


class Forming:
    """Watches the generations of one run form, one after the other.

    Args:
        store: of the run.
        limits: deadlines.
        now: monotonic seconds.
        holdings: who holds what.
    """

    def __init__(
        self, store: RunStore, limits: MembershipSection, now: Callable[[], float], holdings: Holdings
    ) -> None:
        self._store, self._limits, self._now, self._holdings = store, limits, now, holdings
        self._failures: Counter[Worker] = Counter()
        self._blamed: set[Worker] = set()
        self._failed_since: float | None = None

    def begin(self, record: GenerationRecord, members: Collection[str]) -> None:
        """This generation, with these processes, is proposed."""
        self._record = record
        g, self._failed_since = record.generation, None
        self._acknowledged: Gathering[bool] = self._store.gathering(
            schema.AcknowledgedKey(g, schema.EVERYBODY), members
        )
        self._formed: Gathering[Formed] = self._store.gathering(
            schema.FormedKey(g, schema.EVERYBODY), members, partly=True
        )

    def forgive(self) -> None:
        """What could not form may have been due to something else."""
        self._failures.clear()

    def acknowledged(
        self, waited: float, holders: Collection[Worker], detector: FailureDetector
    ) -> TookBack | Fence | Again | None:
        """Whether all have acknowledged; None as long as that is not known.

        Args:
            waited: seconds since the proposal.
            holders: the live workers that have state.
            detector: knows how long their operations take.
        """
        if self._acknowledged.look():
            took_back = self._acknowledged.other_than(False)
            return TookBack(len({split_member(name)[0] for name in took_back}))
        limit = self._limits.form_timeout
        if waited <= limit:
            return None
        key, answered = schema.AcknowledgedKey(self._record.generation, schema.EVERYBODY), set[str]()
        answered |= self._store.answers(key, self._acknowledged.missing).keys()
        # It may be in the middle of an operation that nothing can interrupt.
        late = {
            worker
            for worker in _workers(self._acknowledged.missing - answered)
            if waited > limit + detector.patience_with(worker)
        }
        what = f"generation {self._record.generation} was not acknowledged"
        return self._fence_late(late, what, waited, holders)

    def copied(self) -> list[tuple[str, Copied]]:
        """What each worker has copied, by its first process; to be asked once all groups stand."""
        return [
            (name, copied)
            for name, answer in self._formed.other_than(Formed()).items()
            if split_member(name)[1] == 0
            for copied in answer.copied
        ]

    def formed(self, waited: float, holders: Collection[Worker]) -> bool | Fence | Again:
        """Whether the groups of all stand.

        Args:
            waited: seconds since all have acknowledged.
            holders: as for `acknowledged`.
        """
        is_complete = self._formed.look()
        g, failed = self._record.generation, self._formed.other_than(Formed())
        if own := {name: answer.error for name, answer in failed.items() if answer.error and not answer.expired}:
            return self._blame(own, holders)
        if not is_complete:
            # Who waits for one that is late has an answer after `form_timeout`, or that of a copy's transfers.
            limit = 2 * self._limits.form_timeout + (self._limits.transport_timeout if self._record.copies else 0.0)
            late = _workers(self._formed.missing) if waited > limit else set()
            return self._fence_late(late, f"groups of generation {g} did not form", waited, holders) or False
        if expired := {name: answer.error for name, answer in failed.items() if answer.error}:
            name, error = next(iter(expired.items()))
            return Again(f"worker {name} could not form generation {g}: {error}")
        return True

    def _blame(self, errors: dict[str, str], holders: Collection[Worker]) -> bool | Fence | Again:
        """Some have failed to form their groups: form the same set again, without who was the first to do so twice.

        Whoever failed first is noted, and a death that explains it is waited for: the others fail in consequence.
        """
        failed = {Worker.parse(split_member(name)[0]): error for name, error in errors.items()}
        if self._failed_since is None:
            self._failed_since, self._blamed = self._now(), set(failed)
        if self._now() - self._failed_since <= GRACE_SECONDS:
            return False
        self._failures.update(self._blamed)
        often = [worker for worker in self._blamed if self._failures[worker] >= FAILURES]
        fenced = whom_to_fence(often, holders, hosts=self._holdings.fewest_hosts(often, holders))
        reason = f"could not form generation {self._record.generation}: {failed[fenced or min(self._blamed)]}"
        return Again(f"worker {min(self._blamed)} {reason}") if fenced is None else Fence({fenced: reason})

    def _fence_late(
        self, late: set[Worker], what: str, waited: float, holders: Collection[Worker]
    ) -> Fence | Again | None:
        """Fence workers that live and do not answer, unless a unit has no others; then form the same set again."""
        if not late:
            return None
        cause, left = f"{what} within {waited:.0f} s", set(holders) - late
        if not self._holdings.lost(left):
            return Fence(dict.fromkeys(late, cause))
        return Again(f"{cause} by workers {' '.join(map(str, sorted(late)))}")


def _workers(members: Iterable[str]) -> set[Worker]:
    """Whose processes these are."""
    return {Worker.parse(split_member(name)[0]) for name in members}
