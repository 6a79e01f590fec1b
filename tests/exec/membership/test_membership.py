"""Membership on the real store: one decision per key, and interrupts that reach their own generation only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from recycle import RunError
from recycle.exec.membership.launcher_store import LauncherStore
from recycle.exec.membership.member import GenerationOver, Member
from recycle.exec.membership.messages import GO, VOID, Commit, GenerationRecord, Report, decode, encode
from recycle.exec.membership.store import Store
from recycle.exec.membership.stores import host_store, open_store
from recycle.sections import MembershipSection


@pytest.fixture(params=["launcher", "etcd"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Store, str, str]]:
    """The coordinator's client, and what workers connect with; the server outlives the threads of members."""
    settings = MembershipSection()
    if request.param == "etcd":
        settings = MembershipSection(store=request.getfixturevalue("etcd").url)
    hosted = host_store(settings)
    yield hosted
    hosted[0].erase()
    hosted[0].close()


@pytest.fixture
def store(served: tuple[Store, str, str]) -> Store:
    return served[0]


@pytest.fixture
def theirs(served: tuple[Store, str, str]) -> Iterator[Store]:
    """A worker's client."""
    opened = open_store(served[1], served[2], MembershipSection())
    yield opened
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
    assert store.compare_set("commit/1/3", "", "commit")
    assert not store.compare_set("commit/1/3", "", VOID)
    assert store.read("commit/1/3") == "commit"


def test_the_register_changes_only_for_who_knows_its_content(store: Store) -> None:
    old, new, late = (encode(record(g, "0.0")) for g in (1, 2, 1))
    store.set("register", old)
    assert store.compare_set("register", old, new)
    assert not store.compare_set("register", old, late + " ")
    assert store.read("register") == new


def test_a_key_that_nobody_wrote_is_none_and_a_wait_for_it_ends(store: Store) -> None:
    assert store.read("nothing") is None
    assert store.wait("nothing", 0.05) is None
    assert not store.has_all(["nothing"])


def test_every_post_wakes_its_listener_once(store: Store, theirs: Store) -> None:
    listener = store.clone()
    for key in ("ready/0.0", "ready/0.1"):
        theirs.clone().post(key, "1")
    assert listener.wait_for_post()
    assert listener.wait_for_post()
    assert store.has_all(["ready/0.0", "ready/0.1"])


def test_what_is_deleted_is_as_if_never_written(store: Store) -> None:
    store.set("report/1/0/0.0", "text")
    store.delete(["report/1/0/0.0", "report/1/0/0.1"])
    assert store.read_all(["report/1/0/0.0", "report/1/0/0.2"]) == [None, None]


def test_many_keys_are_read_at_once_in_their_order(store: Store, theirs: Store) -> None:
    for worker in ("0.0", "0.1", "1.0"):
        theirs.set(f"beat/{worker}", f"1 {worker}")
    assert store.read_all(["beat/1.0", "beat/0.0"]) == ["1 1.0", "1 0.0"]
    assert store.read_all(["beat/1.0", "beat/1.1", "beat/0.0"]) == ["1 1.0", None, "1 0.0"]


def test_only_the_first_claim_counts(store: Store, theirs: Store) -> None:
    claims = [theirs.first("fault/0"), theirs.first("fault/0"), theirs.clone().first("fault/0"), store.first("fault/0")]
    assert claims == [True, False, False, False]
    assert store.has_all(["fault/0"])


def test_a_store_that_does_not_answer_is_a_clear_error() -> None:
    with pytest.raises(RunError, match=r"127\.0\.0\.1:1 does not answer"):
        LauncherStore.connect("127.0.0.1", 1, seconds=0.5)


def test_a_worker_takes_up_only_generations_that_it_is_in_and_that_are_not_over(store: Store, member: Member) -> None:
    store.set("proposal/1", encode(record(1, "0.0", "0.1")))
    store.set("stop/1", "1")
    store.set("proposal/2", encode(record(2, "0.0")))
    store.set("proposal/3", encode(record(3, "0.0", "0.1")))
    assert member.next_record().generation == 3


def test_the_end_of_a_generation_interrupts_until_the_worker_has_left_it(
    store: Store, member: Member, interrupts: Interrupts
) -> None:
    store.set("proposal/1", encode(record(1, "0.1")))
    member.next_record()
    assert not member.over.is_set()
    store.set("stop/1", "1")
    assert interrupts.happened.wait(10)
    assert member.over.is_set()
    before = interrupts.count
    while interrupts.count <= before:
        time.sleep(0.005)
    store.set("proposal/2", encode(record(2, "0.1")))
    assert member.next_record().generation == 2
    assert not member.over.is_set()
    after = interrupts.count
    time.sleep(0.1)
    assert interrupts.count == after


def test_a_void_commit_is_the_end_of_the_generation(store: Store, member: Member) -> None:
    store.set("proposal/1", encode(record(1, "0.1")))
    member.next_record()
    commit = Commit(0, 1.5, 0.25, 1.0)
    store.set("commit/1/0", encode(commit))
    store.set("commit/1/1", VOID)
    assert member.decision(0) == commit
    with pytest.raises(GenerationOver):
        member.decision(1)


def test_permission_is_go_or_nothing(store: Store, member: Member) -> None:
    store.set("proposal/1", encode(record(1, "0.1")))
    member.next_record()
    store.set("form/1", GO)
    store.set("run/1", VOID)
    assert member.permitted("form")
    assert not member.permitted("run")


def test_floats_of_a_report_survive_to_the_last_bit(store: Store, member: Member) -> None:
    store.set("proposal/1", encode(record(1, "0.1")))
    member.next_record()
    report = Report({1: [0.1 + 0.2]}, 5.542490005493164 / 3)
    member.report(4, report)
    assert decode(store.wait("report/1/4/0.1", 10) or "", Report) == report


def test_the_heartbeat_beats_and_tells_progress(store: Store, member: Member) -> None:
    first = store.wait("beat/0.1", 10)
    member.progress.set_waiting(False)
    deadline = time.monotonic() + 10
    while (last := store.read("beat/0.1") or "").split()[1:3] != ["1", "working"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first is not None
    assert last.split()[1:3] == ["1", "working"]
    assert int(last.split()[0]) > int(first.split()[0])


def test_a_worker_that_waits_for_a_commit_says_so_in_its_heartbeat(store: Store, member: Member) -> None:
    """Running ahead of the commit is not hanging."""
    store.set("proposal/1", encode(record(1, "0.1")))
    member.next_record()
    member.progress.set_waiting(False)
    decided: list[Commit] = []
    waiting = threading.Thread(target=lambda: decided.append(member.decision(0)))
    waiting.start()
    deadline = time.monotonic() + 10
    while (store.read("beat/0.1") or "").split()[2:3] != ["waiting"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (store.read("beat/0.1") or "").split()[2:3] == ["waiting"]
    store.set("commit/1/0", encode(Commit(0, 1.5, 0.25, 1.0)))
    waiting.join(10)
    assert [commit.step for commit in decided] == [0]
    assert not member.progress.waiting
