"""What becomes of an iteration whose workers began with different states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recycle import MicroBatch, RunError, Worker
from recycle.exec.checksums import Checksum, MicroBatchChecksums
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.replay_votes import replayed_as
from recycle.exec.leader.report_columns import ReportColumns
from recycle.exec.leader.verdict import Fence, GoBack, Judge, Repeat, Rewind, Verdict
from recycle.exec.members import member_name
from recycle.exec.protocol import Commit, GenerationRecord, Report, Verified
from recycle.ir.replays import Checked
from recycle.plans.hosting import Hosts
from tests.exec.runs import job

LAST = 7
"""The committed iteration."""
COMMIT = Commit(LAST, 2.0, 0.5, 1.0)
Judged = Callable[..., Verdict]


def judge_of(pipelines: int) -> tuple[Judged, list[dict[str, Any]]]:
    """(judged, events): judged(verified, *states of stage 1's hosts) is the verdict on the iteration behind LAST."""
    of = job(pipelines, 2, 2)
    workers, events = list(of.shape.workers()), list[dict[str, Any]]()
    judge = Judge(
        of,
        100,
        lambda kind, **details: events.append({"kind": kind, **details}),
        lambda step, is_last: False,
        Holdings(Hosts.at_start(of, None)),
        lambda bits: [{"worker": bit.worker, "word": bit.place.word} for bit in bits],
    )
    names = [str(worker) for worker in workers]

    def judged(verified: Verified | None, *states: int) -> Verdict:
        record = GenerationRecord(
            3, names, {n: n for n in names}, "plan", committed=LAST, commit=COMMIT, verified=verified
        )
        reports = {
            str(w): Report(
                {w.rank: [1.0]},
                1.0 if w.rank else None,
                checksums={w.rank: 1},
                states={w.rank: (states[w.pipeline] if w.rank else 0, 0)},
            )
            for w in workers
        }
        return judge.judge(record, ReportColumns.of(reports), workers, lambda step: [])

    return judged, events


def test_of_three_the_odd_one_is_fenced_and_the_others_go_back_to_where_all_agreed() -> None:
    judged, events = judge_of(3)
    verdict = judged(Verified(4, COMMIT), 5, 6, 5)
    assert isinstance(verdict, Rewind)
    assert {str(worker): why for worker, why in verdict.workers.items()} == {
        "1.1": "it holds another state of stage 1 than workers 0.1 and 2.1"
    }
    (corrupt,) = events
    assert (corrupt["kind"], corrupt["step"], corrupt["workers"]) == ("corrupt", LAST + 1, ["1.1"])


def test_where_that_is_the_state_at_hand_nobody_else_goes_back() -> None:
    for verified in (Verified(LAST, COMMIT), None):
        judged, _ = judge_of(3)
        verdict = judged(verified, 5, 6, 5)
        assert isinstance(verdict, Fence)
        assert list(map(str, verdict.workers)) == ["1.1"]


def test_two_go_back_together_then_to_a_checkpoint_and_then_the_run_ends() -> None:
    judged, events = judge_of(2)
    first = judged(Verified(4, COMMIT), 5, 6)
    assert first == Rewind("workers 0.1 and 1.1 hold different states of stage 1", {})
    second = judged(Verified(4, COMMIT), 5, 6)
    assert isinstance(second, GoBack)
    assert "also when repeated" in second.cause
    with pytest.raises(RunError, match="also when repeated and from a checkpoint"):
        judged(Verified(4, COMMIT), 5, 6)
    assert [event["workers"] for event in events] == [[]] * 3


def test_two_that_differ_where_they_had_agreed_need_a_checkpoint_at_once() -> None:
    judged, _ = judge_of(2)
    assert isinstance(judged(Verified(LAST, COMMIT), 5, 6), GoBack)


def test_three_that_all_differ_go_back_together() -> None:
    judged, _ = judge_of(3)
    verdict = judged(Verified(-1, None), 5, 6, 7)
    assert isinstance(verdict, Rewind)
    assert verdict.workers == {}
    assert isinstance(judged(Verified(-1, None), 5, 5, 5), Commit)


def test_tensor_ranks_that_differ_on_all_hosts_are_settled_by_what_all_replay_then() -> None:
    """Nobody is accused of what has spread; a micro-batch that all hosts replay in the repetition says who is wrong."""
    of = job(3, 1, 2, integrity={"every": 2}, train={"checkpoint_every": 0})
    workers, events = list(of.shape.workers()), list[dict[str, Any]]()
    log = lambda kind, **details: events.append({"kind": kind, **details})  # noqa: E731
    judge = Judge(of, 100, log, lambda step, is_last: False, Holdings(Hosts.at_start(of, None)))
    names, checked = [str(worker) for worker in workers], Checked(0, MicroBatch(0, 0))
    record = GenerationRecord(
        3, names, {n: n for n in names}, "plan", committed=LAST, commit=COMMIT, verified=Verified(4, COMMIT)
    )

    def judged(is_replayed: bool) -> Verdict:
        reports = {}
        for name in names:
            for rank in (0, 1):
                made = MicroBatchChecksums(Checksum(11 if name == "1.0" else 10, 0))
                votes = [replayed_as(checked, made, name == "0.0")] if is_replayed else []
                process = member_name(name, rank)
                reports[process] = Report({0: [1.0]}, 1.0, replicated={0: [4.0 + rank]}, replayed=votes)
        return judge.judge(record, ReportColumns.of(reports), workers, lambda step: [])

    first = judged(is_replayed=False)
    assert isinstance(first, Repeat)
    assert first.disputed == (checked,)
    assert events[0]["workers"] == []
    second = judged(is_replayed=True)
    assert isinstance(second, Rewind)
    assert list(map(str, second.workers)) == ["1.0"]
    assert events[-1]["workers"] == ["1.0"]


def test_worker_that_computed_wrong_and_has_died_since_is_accused_and_not_fenced() -> None:
    of = job(3, 1, 2, integrity={"every": 2}, train={"checkpoint_every": 0})
    events = list[dict[str, Any]]()
    log = lambda kind, **details: events.append({"kind": kind, **details})  # noqa: E731
    judge = Judge(of, 100, log, lambda step, is_last: False, Holdings(Hosts.at_start(of, None)))

    def judged(*names: str) -> Verdict:
        record = GenerationRecord(
            3, [*names], {n: n for n in names}, "plan", committed=LAST, commit=COMMIT, verified=Verified(4, COMMIT)
        )
        reports = {}
        for name in names:
            made = MicroBatchChecksums(Checksum(11 if name == "1.0" else 10, 0))
            votes = [replayed_as(Checked(0, MicroBatch(0, 0)), made, name == "0.0")]
            reports[name] = Report({0: [1.0]}, 1.0, checksums={0: 1}, replayed=votes)
        return judge.judge(record, ReportColumns.of(reports), [*map(Worker.parse, names)], lambda step: [])

    assert isinstance(judged("0.0", "1.0"), Repeat)
    verdict = judged("0.0", "2.0")
    assert isinstance(verdict, Rewind)
    assert verdict.workers == {}
    assert events[-1]["workers"] == ["1.0"]
