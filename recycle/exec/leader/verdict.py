"""What the reports of an iteration come to: its commit, a repetition, workers to fence, or a way back to a checkpoint.

An iteration whose gradient is not finite, or that stepped ahead of a norm which has to be clipped, is repeated. Where
hosts disagree, whoever is odd is fenced if a peer is left. Else the iteration is repeated once, and then training goes
back to a checkpoint, once for each iteration. Where states disagree, what was computed since they last agreed may be
wrong, so training goes back to then. Where hosts made different things of one micro-batch, the iteration is repeated to
see who is wrong, and then likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from recycle.errors import RunError
from recycle.exec.checksums import MicroBatchChecksums
from recycle.exec.leader.commit import decide, is_right, soonest_end
from recycle.exec.leader.disagreement import Bit, Disagreement
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.replay_votes import Unlike, Voted, Votes, count, votes_of
from recycle.exec.leader.report_columns import ReportColumns
from recycle.exec.protocol import Commit, GenerationRecord, Verified
from recycle.ir.replays import Checked
from recycle.job import PricedJob
from recycle.shape import MicroBatch, Worker


@dataclass(frozen=True)
class Repeat:
    """The iteration is to be repeated in another generation of the same workers; why, and what more hosts are to replay
    then."""

    cause: str
    disputed: tuple[Checked, ...] = ()


@dataclass(frozen=True)
class Fence:
    """These workers are to be fenced, each for its reason."""

    workers: dict[Worker, str]


@dataclass(frozen=True)
class GoBack:
    """Only a checkpoint can help; why."""

    cause: str


@dataclass(frozen=True)
class Rewind:
    """All go back to the last state that they agreed on; why, and who is fenced before, each for its reason."""

    cause: str
    workers: dict[Worker, str]


Verdict = Commit | Repeat | Fence | Rewind | GoBack


class Judge:
    """Judges the iterations of one run; remembers which it has had repeated.

    Args:
        job: the job.
        steps: iterations to train.
        log: takes events.
        keeps: whether the state after (step, whether it is the last) goes to a checkpoint.
        holdings: who holds what.
        name_bits: what the event says of the bits in which states differ.
    """

    def __init__(
        self,
        job: PricedJob,
        steps: int,
        log: Callable[..., None],
        keeps: Callable[[int, bool], bool],
        holdings: Holdings,
        name_bits: Callable[[Sequence[Bit]], list[dict[str, Any]]] = lambda bits: [],
    ) -> None:
        self._holdings, self._name_bits = holdings, name_bits
        self._job, self._steps, self._log, self._keeps = job, steps, log, keeps
        self._last, self._ends_early = steps - 1, False
        self._retried = self._disagreed = self._gone_back = -1
        self._voted, self._votes = -1, dict[Voted, Mapping[str, MicroBatchChecksums]]()

    def start_over(self) -> None:
        """Training has gone back to a checkpoint: iterations behind it may be repeated once more."""
        self._retried = self._disagreed = self._voted = -1

    def end_early(self) -> None:
        """The run ends with the next iteration after which all workers can stop together."""
        self._ends_early = True

    def judge(
        self,
        record: GenerationRecord,
        reports: ReportColumns,
        holders: Collection[Worker],
        changes: Callable[[int], Sequence[int]],
    ) -> Verdict:
        """What the iteration behind the record comes to. Raises RunError when the run cannot go on.

        Args:
            reports: of all its processes.
            holders: the live workers that have state.
            changes: called with the iteration once it is right; gives iterations before which other workers or plans
                are to take over: all stop after the one before, or as soon as they can.
        """
        step, before, mode = record.committed + 1, record.commit, record.mode
        soonest = soonest_end(step, mode, before)
        is_announced = before is not None and before.last == step  # whoever announced it: workers will leave
        if self._ends_early:
            self._last = min(self._last, soonest)
        is_last = step >= self._last
        votes = votes_of(reports.replayed)
        unlike = count(votes, self._votes if self._voted == step else None)
        try:
            commit = decide(self._job, step, reports, before.recent if before is not None else ())
        except Disagreement as found:
            says_who = not found.ranks or self._is_right({*map(Worker.parse, found.odd)}, holders)
            if says_who or unlike is None:
                return self._settle(found, holders, record.verified)
        if unlike is not None:
            return self._settle_votes(step, votes, unlike, holders, record.verified)
        finite = commit.clip_factor is not None
        if not finite and self._retried != step:
            self._retried = step
            return Repeat("a gradient is not finite")
        if mode == "staggered" and not is_right(commit):
            return Repeat(f"its gradient, of norm {commit.grad_norm:.4g}, has to be clipped")
        if not finite and self._job.train.non_finite == "fatal":
            raise RunError(f"step {step}: a gradient is not finite, also when repeated ([train] non_finite = 'fatal')")
        ends = [max(change - 1, soonest) for change in changes(step)]  # observes the iteration in any case
        return msgspec.structs.replace(
            commit,
            mode=mode,
            next_mode=commit.next_mode if commit.next_mode in record.periods else "barrier",
            last=step if is_announced else min([self._last, *ends]),
            finished=is_last,
            checkpoint=self._keeps(step, is_last),
            evaluate=self._job.is_evaluated(step, step + 1 >= self._steps),
        )

    def _settle_votes(
        self, step: int, votes: Votes, unlike: Unlike, holders: Collection[Worker], verified: Verified | None
    ) -> Fence | Repeat | Rewind | GoBack:
        """Fence who computed wrong and go back; have the iteration repeated as long as nobody can say who did."""
        if not unlike.odd and self._voted != step:
            self._voted, self._votes = step, dict(votes)
            return Repeat(f"{unlike.what}; it is seen who is wrong when they do it again", unlike.disputed)
        parts = {"bits": list(unlike.parts)} if unlike.parts else {}
        self._log("corrupt", step=step, workers=list(unlike.odd), what=unlike.what, held=unlike.held, **parts)
        self._voted = -1
        odd = {worker: why for name, why in unlike.odd.items() if (worker := Worker.parse(name)) in holders}
        is_right = bool(unlike.odd) and self._is_right(odd, holders)
        if verified is not None and verified.step < step - 1 and (is_right or self._disagreed != step):
            return self._rewind(step, unlike.what, odd if is_right else {})
        return Fence(odd) if is_right else self._from_checkpoint(step, f"step {step}: {unlike.what}")

    def _is_right(self, odd: Collection[Worker], holders: Collection[Worker]) -> bool:
        """Whether there is somebody to fence, and those that are left hold everything."""
        return bool(odd) and not self._holdings.lost(set(holders) - set(odd))

    def _disputed_in(self, numbers: Sequence[int]) -> tuple[Checked, ...]:
        """What all hosts of these stages are to replay, to see who computes wrong all the time: a micro-batch each."""
        stages = sorted({self._holdings.stage_of(number) for number in numbers})
        return tuple(Checked(stage, MicroBatch(0, 0)) for stage in stages) if self._job.integrity.every else ()

    def _rewind(self, step: int, cause: str, workers: dict[Worker, str]) -> Rewind:
        """Each discarded step may be repeated once more; the step that hosts disagreed in may not rewind again."""
        self._disagreed, self._retried = step, -1
        return Rewind(cause, workers)

    def _from_checkpoint(self, step: int, cause: str) -> GoBack:
        """Once for each iteration; the run cannot go on after that."""
        again = f"{cause}, also when repeated"
        if self._gone_back == step:
            raise RunError(f"{again} and from a checkpoint; one of their devices or networks is broken")
        self._gone_back = step
        return GoBack(again)

    def _settle(
        self, found: Disagreement, holders: Collection[Worker], verified: Verified | None
    ) -> Fence | Repeat | Rewind | GoBack:
        """Fence who holds other numbers than its peers, if somebody can say who does and a peer is left."""
        step, odd = found.step, {Worker.parse(worker): why for worker, why in found.odd.items()}
        self._voted = -1
        where = {"bits": self._name_bits(found.bits)} if found.bits else {}
        is_right = self._is_right(odd, holders)
        accused = list(found.odd) if is_right or not found.ranks else []
        self._log("corrupt", step=step, workers=accused, what=found.what, held=found.held, **where)
        if found.is_of_state:
            is_newer = verified is not None and verified.step < step - 1
            if is_newer and (is_right or self._disagreed != step):
                return self._rewind(step, found.what, odd if is_right else {})
        elif not is_right and self._disagreed != step:
            self._disagreed = step
            return Repeat(found.what, self._disputed_in(found.ranks))
        if is_right:
            return Fence(odd)
        return self._from_checkpoint(step, str(found))
