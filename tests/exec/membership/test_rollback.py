"""A rollback discards all that belongs to the discarded steps: they are run again as they are without the rollback."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Job
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.report_columns import ReportColumns
from recycle.exec.leader.verdict import Judge, Repeat, Rewind
from recycle.exec.leader.verified_states import verified_after
from recycle.exec.membership.going_back import gone_back
from recycle.exec.membership.interfaces import Ready
from recycle.exec.membership.packed_record import pack_record, unpack_record
from recycle.exec.membership.proposal import proposed
from recycle.exec.protocol import Commit, Evaluated, GenerationRecord, Report, Verified
from recycle.plans.hosting import Hosts
from recycle.shape import Worker
from tests.exec.runs import Run, figures, job

STEPS = 14
PLAIN = job(2, 1, 2, train={"checkpoint_every": 0, "clip": 1e9, "non_finite": "skip"})


class Training:
    """The records of a run of two hosts of one stage, from the functions that the coordinator makes them with.

    Args:
        of: the job.
        every: iterations between checkpoints.
        rounds: iterations in which everything is replayed once; 0 where nothing is.
        infinite: steps whose gradient is not finite when they run for the first time since the state gone back to.
        differ_at: the step at whose begin the states of the hosts differ, once; -1 for never.
    """

    def __init__(self, of: Job, every: int, rounds: int, infinite: frozenset[int], differ_at: int) -> None:
        self._job, self._rounds, self._infinite, self._differ_at = of, rounds, infinite, differ_at
        self._holdings = Holdings(Hosts.at_start(of, None))
        self._live = list(of.shape.workers())
        keeps = lambda step, is_last: (step + 1) % every == 0  # noqa: E731
        self._judge = Judge(of, STEPS, lambda kind, **details: None, keeps, self._holdings)
        self._tried = dict[int, int]()
        self.record = GenerationRecord(0, [], {}, "")
        self.rewinds = 0
        self.steps: list[tuple[Any, ...]] = []
        self._propose()

    def _propose(self) -> None:
        roles: dict[Worker, Worker] = {worker: worker for worker in self._live}
        plan = Ready("plan", "text", roles, {"barrier": 9.0, "staggered": 8.0}, rounds=self._rounds)
        self.record = proposed(self.record, plan, self._live, set(), self._holdings, None, [])
        self._first = self.record.committed + 1

    def run(self) -> list[tuple[Any, ...]]:
        while self.record.committed < STEPS - 1 or self.record.is_evaluation_due:
            assert unpack_record(pack_record(self.record)) == self.record
            if self.record.is_evaluation_due:
                step = self.record.committed
                self.record = msgspec.structs.replace(self.record, evaluated=Evaluated(step, float(step), 1.0))
                self.steps.append(("evaluated", step))
            else:
                self._iterate()
        return self.steps

    def _iterate(self) -> None:
        step = self.record.committed + 1
        every = self._rounds or self._job.integrity.digests
        is_compared = step == self._first or step % every == 0
        self._tried[step] = self._tried.get(step, 0) + 1
        differ = step == self._differ_at and is_compared and not self.rewinds
        norm = float("inf") if step in self._infinite and self._tried[step] == 1 else 1e-6 * (step + 1)
        reports = {
            str(worker): Report(
                {0: [norm]},
                float(step),
                checksums={0: 1},
                states={0: (int(differ) * worker.pipeline, 0)} if is_compared else {},
            )
            for worker in self._live
        }
        columns = ReportColumns.of(reports)
        verdict = self._judge.judge(self.record, columns, self._live, lambda step: [])
        if isinstance(verdict, Rewind):
            verified = self.record.verified
            assert verified is not None
            self.record = gone_back(self.record, verified, self._live, [])
            assert self.record.evaluated is None or self.record.evaluated.step <= verified.step
            self.rewinds += 1
            self._tried = {step: count for step, count in self._tried.items() if step <= verified.step}
            self.steps = [entry for entry in self.steps if entry[1] <= verified.step]
            self._propose()
            return
        if isinstance(verdict, Repeat):
            self._propose()
            return
        assert isinstance(verdict, Commit), verdict
        state, candidate = verified_after(self.record, columns.has_states)
        self.record = msgspec.structs.replace(
            self.record, committed=step, commit=verdict, mode=verdict.next_mode, verified=state, candidate=candidate
        )
        said = (verdict.loss, verdict.grad_norm, verdict.clip_factor, verdict.recent, verdict.next_mode)
        self.steps.append(("committed", step, *said, verdict.checkpoint, verdict.evaluate, verdict.finished))


@settings(max_examples=60, deadline=None)
@given(
    digests=st.integers(1, 4),
    evaluated=st.integers(1, 5),
    kept=st.integers(1, 4),
    rounds=st.integers(0, 3),
    infinite=st.frozensets(st.integers(0, STEPS - 1), max_size=3),
    differ_at=st.integers(1, STEPS - 1),
)
def test_all_steps_after_the_state_gone_back_to_are_run_evaluated_and_kept_again(
    digests: int, evaluated: int, kept: int, rounds: int, infinite: frozenset[int], differ_at: int
) -> None:
    of = PLAIN.with_sections(
        integrity=msgspec.structs.replace(PLAIN.integrity, digests=digests),
        evaluation=msgspec.structs.replace(PLAIN.evaluation, every=evaluated),
    )
    calm = Training(of, kept, rounds, infinite, -1).run()
    assert all(entry[4] is not None for entry in calm if entry[0] == "committed")
    assert [entry[1] for entry in calm if entry[0] == "evaluated"] == [
        step for step in range(STEPS) if of.is_evaluated(step, step == STEPS - 1)
    ]
    assert Training(of, kept, rounds, infinite, differ_at).run() == calm


def test_a_record_gone_back_to_keeps_the_evaluation_of_an_earlier_step_only() -> None:
    of = job(2, 1, 1)
    commit = Commit(6, 1.0, 1.0, 1.0)
    record = GenerationRecord(3, [], {}, "plan", 6, commit, evaluated=Evaluated(4, 1.0, 1.0))
    for step, left in ((3, None), (4, 4), (5, 4)):
        after = gone_back(record, Verified(step, commit), list(of.shape.workers()), []).evaluated
        assert (None if after is None else after.step) == left


@pytest.mark.process
def test_an_evaluation_between_the_state_gone_back_to_and_a_flip_is_done_again(launch: Run) -> None:
    """The flip at step 6 shows there, and all go back to the state after step 2: step 3, evaluated before, is again."""
    of = job(
        2,
        1,
        2,
        model={"layers": 1},
        planner={"seconds": 0.3},
        train={"checkpoint_every": 0},
        integrity={"digests": 3},
        eval={"every": 4},
    )
    struck, calm = launch(of, 10, "flip=moment:0.0@6"), launch(of, 10)
    assert figures(struck) == figures(calm)
    assert struck.evaluations == calm.evaluations
    assert sorted(struck.evaluations) == [3, 7, 9]
    assert struck.digests == calm.digests
