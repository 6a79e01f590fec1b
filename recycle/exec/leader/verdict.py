"""What the reports of an iteration come to: its commit, a repetition, workers to fence, or a way back to a checkpoint.

An iteration whose gradient is not finite, or that stepped ahead of a norm which has to be clipped, is repeated. Where
hosts disagree, whoever is odd is fenced if a peer is left. Else the iteration is repeated once, and then training goes
back to a checkpoint, once for each iteration. Where states disagree, what was computed since they last agreed may be
wrong, so training goes back to then. Where hosts made different things of one micro-batch, the iteration is repeated to
see who is wrong, and then likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from recycle.errors import RunError
from recycle.exec.checksums import StateTensor, described
from recycle.exec.leader.commit import ReportColumns, decide, is_right, soonest_end
from recycle.exec.leader.disagreement import Bit, Disagreement, Votes, count_votes, votes_of
from recycle.exec.leader.state import RunState
from recycle.exec.protocol import Commit, StateTensors
from recycle.ir.replays import Checked
from recycle.job.shape import MicroBatch, Worker


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
        state: of the run.
    """

    def __init__(self, state: RunState) -> None:
        self._state, self._job, self._steps = state, state.job, state.run.steps
        self._last, self._ends_early = self._steps - 1, False
        self._tensors: dict[tuple[int, int, str], Sequence[tuple[str, int, int, int]]] = {}
        self._retried = self._disagreed = self._gone_back = -1
        self._voted = -1
        self._votes: Votes = {}

    def start_over(self) -> None:
        """Training has gone back to a checkpoint: iterations behind it may be repeated once more."""
        self._retried = self._disagreed = self._voted = -1

    def end_early(self) -> None:
        """The run ends with the next iteration after which all workers can stop together."""
        self._ends_early = True

    def take_tensors(self, member: str, layout: StateTensors) -> None:
        """A process has told where the tensors of a compared state lie in it."""
        self._tensors[layout.number, layout.tensor_rank, layout.plan] = layout.tensors

    def judge(self, reports: ReportColumns, changes: Callable[[int], Sequence[int]]) -> Verdict:
        """What the next iteration comes to. Raises RunError when the run cannot go on.

        Args:
            reports: of all its processes.
            changes: called with the iteration once it is right; gives iterations before which other workers or plans
                are to take over: all stop after the one before, or as soon as they can.
        """
        record = self._state.record
        step, before, mode = self._state.next_step, record.commit, record.mode
        soonest = soonest_end(step, mode, before)
        is_announced = before is not None and before.last == step  # whoever announced it: workers will leave
        if self._ends_early:
            self._last = min(self._last, soonest)
        is_last = step >= self._last
        votes = votes_of(reports.replayed)
        replays = count_votes(step, votes, self._votes if self._voted == step else None)
        try:
            commit = decide(self._job, step, reports, before.recent if before is not None else ())
        except Disagreement as sums:
            # What has spread through the sums does not say who computed wrong; replays may.
            if replays is None or not sums.ranks or self._to_fence(sums.odd):
                return self._settle(sums)
        if replays is not None:
            if not replays.odd and self._voted != step:
                self._voted, self._votes = step, votes
                cause = f"{replays.what}; it is seen who is wrong when they do it again"
                return Repeat(cause, tuple(replays.disputed))
            return self._settle(replays)
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
            checkpoint=self._state.checkpoints.due(step, is_last),
            evaluate=self._job.is_evaluated(step, step + 1 >= self._steps),
        )

    def _to_fence(self, odd: Mapping[str, str]) -> dict[Worker, str]:
        """Those of the odd workers that live, each with why; none unless those that are left hold everything."""
        holders = self._state.holders
        found = {worker: why for name, why in odd.items() if (worker := Worker.parse(name)) in holders}
        return {} if self._state.holdings.lost(holders.difference(found)) else found

    def _settle(self, found: Disagreement) -> Fence | Repeat | Rewind | GoBack:
        """Fence who differs from its peers, if somebody can say who does and a peer is left.

        All go back to the state that they agreed on where what was computed since may be wrong, as after replays and
        states that differ. Other iterations are repeated once.
        """
        step, odd, verified = found.step, self._to_fence(found.odd), self._state.record.verified
        is_first, self._voted = self._disagreed != step, -1
        parts = [*found.parts, *self._name_bits(found.bits)]
        bits = {"bits": parts} if found.parts or found.bits else {}
        accused = [] if found.ranks and not odd else list(found.odd)
        self._state.log("corrupt", step=step, workers=accused, what=found.what, held=found.held, **bits)
        if found.is_of_state or found.is_of_replays:
            if verified is not None and verified.step < step - 1 and (odd or is_first):
                self._disagreed, self._retried = step, -1  # each discarded step may be repeated once more
                return Rewind(found.what, odd)
        elif not odd and is_first:
            self._disagreed = step
            return Repeat(found.what, self._disputed_in(found.ranks))
        if odd:
            return Fence(odd)
        again = f"{found}, also when repeated"
        if self._gone_back == step:
            raise RunError(f"{again} and from a checkpoint; one of their devices or networks is broken")
        self._gone_back = step
        return GoBack(again)

    def _disputed_in(self, numbers: Sequence[int]) -> tuple[Checked, ...]:
        """What all hosts of these stages are to replay, to see who computes wrong all the time: a micro-batch each."""
        stages = sorted({self._state.holdings.stage_of(number) for number in numbers})
        return tuple(Checked(stage, MicroBatch(0, 0)) for stage in stages) if self._job.integrity.every else ()

    def _name_bits(self, bits: Sequence[Bit]) -> list[dict[str, Any]]:
        """Bits of states by the names of their tensors, as the hosts of the stages have told them."""
        named, holdings = [], self._state.holdings
        for bit in bits:
            tensors = self._tensors.get((bit.stage, bit.tensor_rank, holdings.layout), ())
            place = described(bit.place, [StateTensor(*tensor) for tensor in tensors])
            if place is not None:
                tensor, index, number = place
                worker, stage = self._state.members(bit.worker)[bit.tensor_rank], holdings.stage_of(bit.stage)
                named.append({"worker": worker, "stage": stage, "tensor": tensor, "index": index, "bit": number})
        return named
