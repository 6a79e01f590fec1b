"""A rollback discards all that belongs to the discarded steps: they are run again as they are without the rollback."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.exec.leader.actions import CompleteCheckpoint, Finish, Line, Persist, PreparedPlan, Question, Tell
from recycle.exec.leader.actions import Rewind as RewindAction
from recycle.exec.leader.state import Phase
from recycle.exec.protocol import (
    Committed,
    EvaluationReport,
    EvaluationResult,
    FinalState,
    Report,
    Saved,
    SavedPart,
    StepReport,
)
from recycle.job import PricedJob
from recycle.job.shape import Worker
from tests.exec.leader.driver import LeaderDriver
from tests.exec.runs import job

STEPS = 14
GENERATION_FIELDS = job(2, 1, 2, train={"checkpoint_every": 0, "clip": 1e9, "non_finite": "skip"})


class Training:
    """A run of two hosts of one stage.

    Args:
        job: the job.
        rounds: iterations in which everything is replayed once; 0 where nothing is.
        infinite: steps whose gradient is not finite when they run for the first time after the state gone back to.
        differ_at: the step at whose begin the states of the hosts differ, once; -1 for never.

    Attributes:
        driver: of the leader.
        rewinds: how often training has gone back.
    """

    def __init__(self, job: PricedJob, rounds: int, infinite: frozenset[int], differ_at: int) -> None:
        self._rounds, self._infinite, self._differ_at = rounds, infinite, differ_at
        self._every = rounds or job.integrity.digests
        self.driver = LeaderDriver(job, STEPS)
        self.driver.plan = self._plan
        self._tried = dict[int, int]()
        self._first = 0
        self.rewinds = 0

    def _plan(self, question: Question) -> PreparedPlan:
        roles: dict[Worker, Worker] = {worker: worker for worker in self.driver.job.shape.workers()}
        return PreparedPlan("plan", roles, {"barrier": 9.0, "staggered": 8.0}, rounds=self._rounds)

    def run(self) -> list[tuple[Any, ...]]:
        """What is written and told of each step, without what was taken back."""
        driver = self.driver
        while not driver.of_kind(Finish):
            if driver.phase is Phase.PROPOSED:
                assert driver.record.mode == "barrier"
                self._first = driver.record.committed + 1
                driver.acknowledge()
            elif driver.phase is Phase.FORMING:
                driver.form()
            elif driver.phase is Phase.RUNNING:
                self._iterate()
            else:
                for member in driver.record.live:
                    driver.say(member, FinalState({0: "digest"}))
                driver.tick()
        return self._steps()

    def _iterate(self) -> None:
        driver, step = self.driver, self.driver.record.committed + 1
        if driver.record.is_evaluation_due:
            self._say_all(lambda worker: StepReport(step - 1, EvaluationReport([float(step)], [1.0])))
        else:
            self._tried[step] = self._tried.get(step, 0) + 1
            is_compared = step == self._first or step % self._every == 0
            differ = step == self._differ_at and is_compared and not self.rewinds
            norm = float("inf") if step in self._infinite and self._tried[step] == 1 else 1e-6 * (step + 1)
            self._say_all(
                lambda worker: StepReport(
                    step,
                    Report(
                        {0: [norm]},
                        float(step),
                        checksums={0: 1},
                        states={0: (int(differ) * worker.pipeline, 0)} if is_compared else {},
                    ),
                )
            )
        driver.tick()
        rewinds = driver.of_kind(RewindAction)
        if len(rewinds) > self.rewinds:
            self.rewinds += 1
            self._tried = {step: count for step, count in self._tried.items() if step <= rewinds[-1].step}
        for at, stage, rank in driver.missing_parts():
            driver.say("0.0", SavedPart(at, stage, rank, Saved()))
        driver.tick()

    def _say_all(self, message: Any) -> None:
        for member in self.driver.record.live:
            self.driver.say(member, message(Worker.parse(member)))

    def _steps(self) -> list[tuple[Any, ...]]:
        steps: list[tuple[Any, ...]] = []
        for action in self.driver.actions:
            match action:
                case RewindAction(step=step):
                    steps = [entry for entry in steps if entry[1] <= step]
                case Tell(message=Committed(commit=commit)):
                    plain = msgspec.structs.replace(commit, mode="barrier", last=None)  # these say when it ran
                    steps.append(("commit", commit.step, plain))
                case Tell(message=EvaluationResult(evaluated=evaluated)):
                    steps.append(("evaluation", evaluated.step, evaluated))
                case Line(line=line):
                    steps.append(("line", line["step"], line["loss"], line.get("eval_loss")))
                case CompleteCheckpoint(commit=commit):
                    steps.append(("checkpoint", commit.step))
        return steps


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
    small = GENERATION_FIELDS.with_sections(
        train=msgspec.structs.replace(GENERATION_FIELDS.train, checkpoint_every=kept),
        integrity=msgspec.structs.replace(GENERATION_FIELDS.integrity, digests=digests),
        evaluation=msgspec.structs.replace(GENERATION_FIELDS.evaluation, every=evaluated),
    )
    calm = Training(small, rounds, infinite, -1).run()
    assert [entry[2].clip_factor for entry in calm if entry[0] == "commit"] == [1.0] * STEPS
    assert [entry[1] for entry in calm if entry[0] == "evaluation"] == [
        step for step in range(STEPS) if small.is_evaluated(step, step == STEPS - 1)
    ]
    assert [entry[1] for entry in calm if entry[0] == "line"] == list(range(STEPS))
    assert [entry[1] for entry in calm if entry[0] == "checkpoint"] == [
        step for step in range(STEPS) if (step + 1) % kept == 0 or step == STEPS - 1
    ]
    struck = Training(small, rounds, infinite, differ_at)
    assert struck.run() == calm
    every = rounds or digests
    assert struck.rewinds == (differ_at % every == 0 or differ_at in infinite)


@pytest.mark.parametrize(("evaluated", "differ_at", "left"), [(4, 6, None), (6, 9, 5)])
def test_record_after_a_rollback_keeps_the_evaluation_of_an_earlier_step_only(
    evaluated: int, differ_at: int, left: int | None
) -> None:
    small = GENERATION_FIELDS.with_sections(
        integrity=msgspec.structs.replace(GENERATION_FIELDS.integrity, digests=3),
        evaluation=msgspec.structs.replace(GENERATION_FIELDS.evaluation, every=evaluated),
    )
    training = Training(small, 0, frozenset(), differ_at)
    training.run()
    (record,) = (
        action.record
        for action in training.driver.of_kind(Persist)
        if action.cursor.phase == "abandoned" and action.record
    )
    assert record.committed == differ_at - 4
    assert (record.evaluated and record.evaluated.step) == left
