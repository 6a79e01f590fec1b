"""A coordinator that follows another: what the register says is completed, what it does not say is void."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from recycle import JobError, RunError
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.membership.coordinator import END_SECONDS, Coordinator, GenerationPhase
from recycle.exec.membership.interfaces import Ready
from recycle.exec.membership.register import Register
from recycle.exec.membership.schema import (
    CommitKey,
    EvaluatedKey,
    PermissionKey,
    ProposalKey,
    RegisterKey,
    ReportKey,
    StopKey,
)
from recycle.exec.membership.store import Store
from recycle.exec.membership.stores import host_store
from recycle.exec.protocol import (
    GO,
    VOID,
    Commit,
    Copy,
    Evaluated,
    GenerationRecord,
    Report,
    RunInfo,
    Verified,
)
from recycle.sections import MembershipSection
from recycle.shape import Worker
from tests.exec.runs import job

LIVE = ["0.0", "1.0"]
FACTS = Commit(4, 1.5, 0.25, 1.0)


class Still:
    """Processes of which none ends."""

    def start(self, worker: Worker) -> None:
        raise AssertionError("nobody is to be started")

    def gone(self) -> dict[Worker, str]:
        return {}

    def kill(self, worker: Worker) -> None:
        raise AssertionError("nobody is to be killed")

    def running(self, worker: Worker) -> bool:
        return True

    def incarnation(self, worker: Worker) -> int:
        return 0


class OnePlan:
    """The same plan for everyone."""

    def ready(self, failed: frozenset[Worker]) -> Ready | None:
        return Ready("next", "text", {Worker.parse(w): Worker.parse(w) for w in LIVE}, {"barrier": 9.0})

    def observe(self, failed: frozenset[Worker], step: int, times: ComputeTimes) -> None:
        pass

    def has_better(self, failed: frozenset[Worker]) -> bool:
        return False


@pytest.fixture(params=["launcher", pytest.param("etcd", marks=pytest.mark.etcd)])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    settings = MembershipSection()
    if request.param == "etcd":
        settings = MembershipSection(store=request.getfixturevalue("etcd").url)
    hosted, _, _ = host_store(settings)
    yield hosted
    hosted.erase()
    hosted.close()


def follow(store: Store, record: GenerationRecord) -> tuple[Coordinator, list[tuple[int, float]]]:
    """A coordinator that finds this in the register."""
    store.compare_set(RegisterKey(), None, record)
    commits: list[tuple[int, float]] = []
    coordinator = Coordinator(
        job=job(2, 1, 1),
        steps=9,
        live=set(),
        store=store,
        processes=Still(),
        plans=OnePlan(),
        log=lambda kind, **details: None,
        committed=lambda commit, record: commits.append((commit.step, record.periods[commit.mode])),
        now=time.monotonic,
    )
    coordinator.take_over(record)
    return coordinator, commits


def record(commit: Commit = FACTS, joins: Sequence[str] = ()) -> GenerationRecord:
    return GenerationRecord(
        3, LIVE, {w: w for w in LIVE}, "plan", commit.step, commit, list(joins), periods={"barrier": 7.0}
    )


def test_a_commit_that_came_no_further_than_the_register_stands_for_all(store: Store) -> None:
    coordinator, commits = follow(store, record())
    assert store.read(CommitKey(3, 4)) == FACTS
    assert store.read(CommitKey(3, 5)) == VOID
    assert store.has_all([StopKey(3)])
    assert commits == [(4, 7.0)]
    coordinator.tick()
    after = store.read(RegisterKey())
    assert (after.generation, after.committed, after.commit, after.live) == (4, 4, FACTS, LIVE)
    assert store.read(ProposalKey(4)) == after


def test_a_generation_that_came_no_further_than_the_register_is_announced_and_over(store: Store) -> None:
    follow(store, record())
    assert store.read(ProposalKey(3)) == record()
    assert [store.read(PermissionKey(3, what)) for what in ("form", "run")] == [VOID, VOID]


def test_what_was_decided_before_is_not_decided_again(store: Store) -> None:
    announced = record(joins=["1.0"])
    decided = {
        ProposalKey(3): record(),
        PermissionKey(3, "form"): GO,
        PermissionKey(3, "run"): GO,
        CommitKey(3, 4): Commit(4, 99.0, 0.25, 1.0),
    }
    for key, value in decided.items():
        store.compare_set(key, None, value)
    follow(store, announced)
    assert {key: store.read(key) for key in decided} == decided


@pytest.mark.parametrize("is_over", [False, True])
def test_a_generation_that_runs_goes_on_unless_something_of_it_is_void(store: Store, is_over: bool) -> None:
    for what in ("form", "run"):
        store.compare_set(PermissionKey(3, what), None, GO)
    if is_over:  # as far as the other had come when it died
        store.compare_set(CommitKey(3, 5), None, VOID)
    coordinator, _ = follow(store, record(joins=["1.0"]))
    coordinator.tick()
    after = store.read(RegisterKey())
    assert coordinator.phase is (GenerationPhase.PROPOSED if is_over else GenerationPhase.RUNNING)
    assert (after.generation, after.joins) == ((4, []) if is_over else (3, ["1.0"]))
    assert store.has_all([StopKey(3)]) == is_over


def test_an_iteration_that_another_coordinator_began_counts_from_the_takeover_on(store: Store) -> None:
    """The machine's clock has run for longer than any iteration takes."""
    for what in ("form", "run"):
        store.compare_set(PermissionKey(3, what), None, GO)
    coordinator, _ = follow(store, record())
    for name in LIVE:
        store.set(ReportKey(3, 5, name), Report({0: [1e-6]}, 1.0, checksums={0: 1}))
    coordinator.tick()
    assert coordinator.record.committed == 5
    assert coordinator.end_patience == END_SECONDS


def test_a_worker_whose_copy_may_not_be_complete_copies_again(store: Store) -> None:
    store.compare_set(PermissionKey(3, "form"), None, GO)
    coordinator, _ = follow(store, record(joins=["1.0"]))
    coordinator.tick()
    assert store.read(RegisterKey()).joins == ["1.0"]
    assert store.read(RegisterKey()).copies == [Copy("1.0", "0.0", 0, 4)]


def test_whoever_finds_that_all_go_back_goes_on_from_there_and_who_has_not_kept_that_state_copies_it(
    store: Store,
) -> None:
    """The generation of such a record is over from the start."""
    back = msgspec.structs.replace(record(joins=["1.0"]), verified=Verified(4, FACTS, ["1.0"]))
    store.set(StopKey(3), True)
    coordinator, _ = follow(store, back)
    coordinator.tick()
    after = store.read(RegisterKey())
    assert (after.generation, after.committed, after.commit, after.joins) == (4, 4, FACTS, ["1.0"])
    assert after.verified == Verified(4, FACTS, ["1.0"])
    assert after.copies == [Copy("1.0", "0.0", 0, 4)]


def test_who_joins_now_has_not_kept_the_state_that_all_may_go_back_to(store: Store) -> None:
    store.compare_set(PermissionKey(3, "form"), None, GO)
    coordinator, _ = follow(store, msgspec.structs.replace(record(joins=["1.0"]), verified=Verified(2, None)))
    coordinator.tick()
    assert store.read(RegisterKey()).verified == Verified(2, None, ["1.0"])


def test_a_run_whose_last_step_is_committed_is_finished(store: Store) -> None:
    last = Commit(8, 1.5, 0.25, 1.0, finished=True)
    coordinator, commits = follow(store, record(last))
    assert coordinator.phase is GenerationPhase.FINISHED
    assert store.read(CommitKey(3, 8)) == last
    assert commits == [(8, 7.0)]
    assert not store.has_all([StopKey(3)])


def evaluated(commit: Commit, result: Evaluated | None) -> GenerationRecord:
    return msgspec.structs.replace(record(msgspec.structs.replace(commit, evaluate=True)), evaluated=result)


def test_an_evaluation_that_is_in_the_register_is_announced_and_no_other_follows(store: Store) -> None:
    last, result = Commit(8, 1.5, 0.25, 1.0, finished=True), Evaluated(8, 2.5, 96.0)
    coordinator, _ = follow(store, evaluated(last, result))
    assert coordinator.phase is GenerationPhase.FINISHED
    assert store.read(EvaluatedKey(3, 8)) == result


@pytest.mark.parametrize("earlier", [None, Evaluated(2, 2.5, 96.0)])
def test_an_evaluation_that_is_not_done_is_void_and_due_in_the_next_generation(
    store: Store, earlier: Evaluated | None
) -> None:
    coordinator, _ = follow(store, evaluated(Commit(8, 1.5, 0.25, 1.0, last=8, finished=True), earlier))
    assert store.read(EvaluatedKey(3, 8)) == VOID
    coordinator.tick()
    after = store.read(RegisterKey())
    assert (after.generation, after.committed, after.evaluated) == (4, 8, earlier)
    assert after.is_evaluation_due
    assert after.commit.last is None


def test_a_coordinator_whose_register_another_one_has_changed_commits_nothing(store: Store) -> None:
    store.compare_set(RegisterKey(), None, record())
    earlier, later = Register(store), Register(store)
    for register in (earlier, later):
        register.take_over(record())
    decided = record(Commit(5, 2.5, 0.25, 1.0))
    later.commit(decided)
    with pytest.raises(RunError):
        earlier.commit(record(Commit(5, 99.0, 0.25, 1.0)))
    assert store.read(RegisterKey()) == decided
    assert store.read(CommitKey(3, 5)) == decided.commit


def test_a_step_has_one_line_of_metrics_whoever_writes_it(tmp_path: Path) -> None:
    of = job(2, 1, 1)
    info = RunInfo(identity="identity", job="", steps=9, faults=[], started=time.time())
    one, two = (RunDirectory(tmp_path, of, shared=info) for _ in range(2))
    assert [one.metric({"step": 0}), two.metric({"step": 0}), two.metric({"step": 1})] == [True, False, True]
    assert [one.metric({"step": 1}), one.metric({"step": 0}), one.metric({"step": 2})] == [False, False, True]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    with pytest.raises(JobError, match="holds another run"):
        RunDirectory(tmp_path, of, shared=msgspec.structs.replace(info, identity="another"))
    one.close()
    two.close()
