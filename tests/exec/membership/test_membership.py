"""Membership on the real store: one decision per key, and interrupts that reach their own generation only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from recycle import RunError
from recycle.exec.membership.etcd_store import EtcdStore
from recycle.exec.membership.member import LOOK_SECONDS, GenerationOver, Member
from recycle.exec.membership.relay import Relay
from recycle.exec.membership.schema import (
    BegunKey,
    CommitKey,
    HeartbeatKey,
    PermissionKey,
    ProposalKey,
    ReachedKey,
    ReadyKey,
    RegisterKey,
    ReportKey,
    StopKey,
    TroubleKey,
)
from recycle.exec.membership.store import RunStore, Store
from recycle.exec.membership.stores import host_store, open_store
from recycle.exec.protocol import GO, VOID, Commit, GenerationRecord, Heartbeat, Report
from recycle.sections import MembershipSection

COMMIT = Commit(3, 1.5, 0.25, 1.0)


ON_ETCD = [pytest.param(name, marks=pytest.mark.etcd) for name in ("etcd", "relay")]


@pytest.fixture(params=["launcher", *ON_ETCD])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Store, str, str]]:
    """The coordinator's client, and what workers connect with; the server outlives the threads of members."""
    settings = MembershipSection()
    if request.param != "launcher":
        settings = MembershipSection(store=request.getfixturevalue("etcd").url)
    store, url, name = host_store(settings)
    if request.param != "relay":
        yield store, url, name
    else:
        followed = EtcdStore.connect(url, name, settings)
        relay = Relay(followed, 0, 0.05)
        yield store, relay.url, name
        relay.close()
        followed.close()
    store.erase()
    store.close()


@pytest.fixture
def store(served: tuple[Store, str, str]) -> Store:
    return served[0]


@pytest.fixture
def theirs(served: tuple[Store, str, str]) -> Iterator[Store]:
    """A worker's client."""
    opened = open_store(served[1], served[2], MembershipSection())
    yield opened
    if isinstance(opened, RunStore):
        opened.close()


def record(generation: int, *live: str) -> GenerationRecord:
    return GenerationRecord(generation, list(live), {worker: worker for worker in live}, "plan")


class Interrupts:
    """Counts interrupts."""

    def __init__(self) -> None:
        self.count = 0
        self.happened = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self.happened.set()


@pytest.fixture
def interrupts() -> Interrupts:
    return Interrupts()


@pytest.fixture
def member(theirs: Store, interrupts: Interrupts) -> Member:
    return Member(theirs.clone(), "0.1", 0.05, interrupts, lambda _: None)


def test_of_two_decisions_on_one_key_the_first_stands(store: Store) -> None:
    assert store.compare_set(CommitKey(1, 3), None, COMMIT)
    assert not store.compare_set(CommitKey(1, 3), None, VOID)
    assert store.read(CommitKey(1, 3)) == COMMIT


def test_the_register_changes_only_for_who_knows_its_content(store: Store) -> None:
    old, new, late = (record(g, "0.0") for g in (1, 2, 3))
    assert store.compare_set(RegisterKey(), None, old)
    assert store.compare_set(RegisterKey(), old, new)
    assert not store.compare_set(RegisterKey(), old, late)
    assert store.read(RegisterKey()) == new


def test_a_key_that_nobody_wrote_is_none_and_a_wait_for_it_ends(store: Store) -> None:
    assert store.read(TroubleKey(9)) is None
    assert store.wait(TroubleKey(9), 0.05) is None
    assert not store.has_all([TroubleKey(9)])


def test_every_post_wakes_its_listener_once(store: Store, theirs: Store) -> None:
    listener = store.clone()
    for key in (ReadyKey("0.0", 0), ReadyKey("0.1", 0)):
        theirs.clone().set(key, True)
        assert listener.wait_for_change(60.0)
    assert store.has_all([ReadyKey("0.0", 0), ReadyKey("0.1", 0)])
    assert not listener.wait_for_change(0.05)
    theirs.set(HeartbeatKey("0.0"), Heartbeat(0, 0, True, "start", None))
    assert not listener.wait_for_change(0.05)
    assert theirs.claim(ReachedKey(0))
    assert listener.wait_for_change(60.0)


def test_what_is_deleted_is_as_if_never_written(store: Store) -> None:
    store.set(TroubleKey(1), "text")
    store.delete([TroubleKey(1), TroubleKey(2)])
    assert store.read_all([TroubleKey(1), TroubleKey(3)]) == [None, None]


def test_many_keys_are_read_at_once_in_their_order(store: Store, theirs: Store) -> None:
    for worker in ("0.0", "0.1", "1.0"):
        theirs.set(HeartbeatKey(worker), Heartbeat(1, 1, True, worker, 0.5))
    assert store.wait(HeartbeatKey("1.0"), 10) is not None
    keys = [HeartbeatKey(worker) for worker in ("1.0", "0.0", "1.1")]
    assert [heartbeat.doing for heartbeat in store.read_all(keys[:2])] == ["1.0", "0.0"]
    assert [heartbeat and heartbeat.doing for heartbeat in store.read_all(keys)] == ["1.0", "0.0", None]


def test_only_the_first_claim_counts(store: Store, theirs: Store) -> None:
    claims = [client.claim(ReachedKey(0)) for client in (theirs, theirs, theirs.clone(), store)]
    assert claims == [True, False, False, False]
    assert store.has_all([ReachedKey(0)])


def test_a_store_that_does_not_answer_is_a_clear_error() -> None:
    with pytest.raises(RunError, match="does not answer"):
        open_store("local://nobody", "", MembershipSection())


def test_a_worker_takes_up_only_generations_that_it_is_in_and_that_are_not_over(store: Store, member: Member) -> None:
    store.compare_set(ProposalKey(1), None, record(1, "0.0", "0.1"))
    store.set(StopKey(1), True)
    store.compare_set(ProposalKey(2), None, record(2, "0.0"))
    store.compare_set(ProposalKey(3), None, record(3, "0.0", "0.1"))
    assert member.next_record().generation == 3


def test_a_worker_that_starts_late_waits_for_no_generation_whose_keys_are_gone(
    store: Store, theirs: Store, member: Member, interrupts: Interrupts
) -> None:
    store.set(BegunKey(), 7)
    store.compare_set(ProposalKey(7), None, record(7, "0.0"))
    theirs.wait(ProposalKey(7), 10)

    def change(store: Store) -> None:
        store.set(StopKey(7), True)
        store.compare_set(ProposalKey(8), None, record(8, "0.0", "0.1"))

    threading.Timer(0.2, change, (store.clone(),)).start()
    started = time.monotonic()
    assert member.next_record().generation == 8
    store.set(StopKey(8), True)
    assert interrupts.happened.wait(10)
    assert time.monotonic() - started < LOOK_SECONDS


def test_the_end_of_a_generation_interrupts_until_the_worker_has_left_it(
    store: Store, member: Member, interrupts: Interrupts
) -> None:
    store.compare_set(ProposalKey(1), None, record(1, "0.1"))
    member.next_record()
    assert not member.over.is_set()
    store.set(StopKey(1), True)
    assert interrupts.happened.wait(10)
    assert member.over.is_set()
    before = interrupts.count
    while interrupts.count <= before:
        time.sleep(0.005)
    store.compare_set(ProposalKey(2), None, record(2, "0.1"))
    assert member.next_record().generation == 2
    assert not member.over.is_set()
    after = interrupts.count
    time.sleep(0.1)
    assert interrupts.count == after


def test_a_void_commit_is_the_end_of_the_generation(store: Store, member: Member) -> None:
    store.compare_set(ProposalKey(1), None, record(1, "0.1"))
    member.next_record()
    commit = Commit(0, 1.5, 0.25, 1.0)
    store.compare_set(CommitKey(1, 0), None, commit)
    store.compare_set(CommitKey(1, 1), None, VOID)
    assert member.decision(0) == commit
    with pytest.raises(GenerationOver):
        member.decision(1)


def test_permission_is_go_or_nothing(store: Store, member: Member) -> None:
    store.compare_set(ProposalKey(1), None, record(1, "0.1"))
    member.next_record()
    store.compare_set(PermissionKey(1, "form"), None, GO)
    store.compare_set(PermissionKey(1, "run"), None, VOID)
    assert member.permitted("form")
    assert not member.permitted("run")


def test_floats_of_a_report_survive_to_the_last_bit(store: Store, member: Member) -> None:
    store.compare_set(ProposalKey(1), None, record(1, "0.1"))
    member.next_record()
    report = Report({1: [0.1 + 0.2]}, 5.542490005493164 / 3)
    member.report(4, report)
    assert store.wait(ReportKey(1, 4, "0.1"), 10) == report


def test_the_heartbeat_beats_and_tells_progress(store: Store, member: Member) -> None:
    first = store.wait(HeartbeatKey("0.1"), 10)
    member.progress.set_waiting(False)
    deadline = time.monotonic() + 10
    while (last := store.read(HeartbeatKey("0.1"))).waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first is not None
    assert (last.progress, last.waiting) == (1, False)
    assert last.beats > first.beats


def test_a_worker_that_waits_for_a_commit_says_so_in_its_heartbeat(store: Store, member: Member) -> None:
    """Running ahead of the commit is not hanging."""
    store.compare_set(ProposalKey(1), None, record(1, "0.1"))
    member.next_record()
    member.progress.set_waiting(False)
    decided: list[Commit] = []
    waiting = threading.Thread(target=lambda: decided.append(member.decision(0)))
    waiting.start()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not ((last := store.read(HeartbeatKey("0.1"))) and last.waiting):
        time.sleep(0.01)
    assert last.waiting
    store.compare_set(CommitKey(1, 0), None, Commit(0, 1.5, 0.25, 1.0))
    waiting.join(10)
    assert [commit.step for commit in decided] == [0]
    assert not member.progress.waiting
