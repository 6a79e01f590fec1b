"""What becomes of an iteration whose workers began with different states, or made different things of their work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from recycle import MicroBatch, RunError, Worker
from recycle.exec.checksums import Checksum, MicroBatchChecksums
from recycle.exec.leader.actions import Event
from recycle.exec.leader.commit import ReportColumns
from recycle.exec.leader.disagreement import replayed_as
from recycle.exec.leader.state import RunState
from recycle.exec.leader.verdict import Fence, GoBack, Judge, Repeat, Rewind, Verdict
from recycle.exec.members import member_name, parse_workers
from recycle.exec.protocol import Commit, GenerationRecord, Report, Verified
from recycle.ir.replays import Checked
from recycle.job import PricedJob
from tests.exec.leader.driver import run_of
from tests.exec.runs import job

LAST = 7
"""The committed iteration."""
COMMIT = Commit(LAST, 2.0, 0.5, 1.0)
AGREED = Verified(4, COMMIT)
CHECKED = Checked(0, MicroBatch(0, 0))
REPLAYING = job(3, 1, 2, integrity={"every": 2}, train={"checkpoint_every": 0})


class Judged:
    """Verdicts on the iteration behind LAST."""

    def __init__(self, of: PricedJob) -> None:
        self.state = RunState(run_of(of, 100), 0.0)
        self._judge = Judge(self.state)

    def of(self, reports: Mapping[str, Report], verified: Verified | None = AGREED) -> Verdict:
        self.state.live = parse_workers(reports)
        live = sorted(map(str, self.state.live))
        self.state.record = GenerationRecord(3, live, {}, "plan", committed=LAST, commit=COMMIT, verified=verified)
        return self._judge.judge(ReportColumns.of(reports), lambda step: [])

    def of_states(self, verified: Verified | None, *states: int) -> Verdict:
        """Of two stages, the hosts of whose last one began with these states."""
        reports = {}
        for worker in self.state.everybody:
            state = states[worker.pipeline] if worker.rank else 0
            loss = 1.0 if worker.rank else None
            checksums, compared = {worker.rank: 1}, {worker.rank: (state, 0)}
            reports[str(worker)] = Report({worker.rank: [1.0]}, loss, checksums=checksums, states=compared)
        return self.of(reports, verified)

    @property
    def corrupt(self) -> list[tuple[int, list[str]]]:
        """Step and accused workers of all events `corrupt`."""
        events: list[Any] = [a.fields for a in self.state.actions if isinstance(a, Event) and a.kind == "corrupt"]
        return [(event["step"], event["workers"]) for event in events]


@pytest.mark.parametrize("verified", [AGREED, Verified(LAST, COMMIT), None])
def test_of_three_the_odd_one_is_fenced_and_the_others_go_back_to_where_all_agreed(verified: Verified | None) -> None:
    """Where that is the state at hand nobody else goes back."""
    judged = Judged(job(3, 2, 2))
    verdict = judged.of_states(verified, 5, 6, 5)
    assert isinstance(verdict, Rewind if verified is AGREED else Fence)
    assert verdict.workers.keys() == {Worker(1, 1)}
    assert judged.corrupt == [(LAST + 1, ["1.1"])]


def test_two_go_back_together_then_to_a_checkpoint_and_then_the_run_ends() -> None:
    judged = Judged(job(2, 2, 2))
    first = judged.of_states(AGREED, 5, 6)
    assert (isinstance(first, Rewind), getattr(first, "workers", None)) == (True, {})
    assert isinstance(judged.of_states(AGREED, 5, 6), GoBack)
    with pytest.raises(RunError, match="also when repeated and from a checkpoint"):
        judged.of_states(AGREED, 5, 6)
    assert judged.corrupt == [(LAST + 1, [])] * 3


def test_two_that_differ_where_they_had_agreed_need_a_checkpoint_at_once() -> None:
    assert isinstance(Judged(job(2, 2, 2)).of_states(Verified(LAST, COMMIT), 5, 6), GoBack)


def test_three_that_all_differ_go_back_together() -> None:
    judged = Judged(job(3, 2, 2))
    verdict = judged.of_states(Verified(-1, None), 5, 6, 7)
    assert (isinstance(verdict, Rewind), getattr(verdict, "workers", None)) == (True, {})
    assert isinstance(judged.of_states(Verified(-1, None), 5, 5, 5), Commit)


def of_one_that_computes_wrong(*processes: str, is_replayed: bool = True) -> dict[str, Report]:
    """What these processes report, of which those of worker 1.0 make something else of a micro-batch."""
    reports = {}
    for process in processes:
        made = MicroBatchChecksums(Checksum(11 if process.startswith("1.0") else 10, 0))
        votes = [replayed_as(CHECKED, made, process.startswith("0.0"))] if is_replayed else []
        replicated = {0: [4.0 + process.endswith("t1")]}
        reports[process] = Report({0: [1.0]}, 1.0, replicated=replicated, checksums={0: 1}, replayed=votes)
    return reports


def test_tensor_ranks_that_differ_on_all_hosts_are_settled_by_what_all_replay_then() -> None:
    """Nobody is accused of what has spread; a micro-batch that all hosts replay in the repetition says who is wrong."""
    judged = Judged(REPLAYING)
    processes = [member_name(f"{pipeline}.0", rank) for pipeline in range(3) for rank in (0, 1)]
    first = judged.of(of_one_that_computes_wrong(*processes, is_replayed=False))
    assert isinstance(first, Repeat)
    assert first.disputed == (CHECKED,)
    second = judged.of(of_one_that_computes_wrong(*processes))
    assert isinstance(second, Rewind)
    assert second.workers.keys() == {Worker(1, 0)}
    assert [workers for _, workers in judged.corrupt] == [[], ["1.0"]]


def test_worker_that_computed_wrong_and_has_died_since_is_accused_and_not_fenced() -> None:
    judged = Judged(REPLAYING)
    assert isinstance(judged.of(of_one_that_computes_wrong("0.0", "1.0")), Repeat)
    verdict = judged.of(of_one_that_computes_wrong("0.0", "2.0"))
    assert (isinstance(verdict, Rewind), getattr(verdict, "workers", None)) == (True, {})
    assert judged.corrupt[-1] == (LAST + 1, ["1.0"])
