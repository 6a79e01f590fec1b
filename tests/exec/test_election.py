"""The leader's role and the register: one candidate leads, and a leader that has lost the role writes nothing."""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from recycle import JobError
from recycle.exec.election import Election, LeaderAddress, RoleLost
from recycle.exec.etcd import EtcdClient, open_client, put
from recycle.exec.leader.actions import Persist
from recycle.exec.protocol import Commit, Cursor, Evaluated, GenerationRecord, Progress, RunInfo, Verified
from recycle.job.sections import MembershipSection
from tests.exec.etcd_server import EtcdServer, keys
from tests.waiting import until

LIVE = ["0.0", "1.0"]
COMMIT = Commit(4, 0.1 + 0.2, 5e-324, 1.0, "staggered", "barrier", [0.1, math.inf])
RECORD = GenerationRecord(3, LIVE, {w: w for w in LIVE}, "plan", ["1.0"], {"barrier": 7.0}, committed=2)
PROGRESS = Progress(committed=4, commit=COMMIT, mode="staggered", evaluated=Evaluated(4, 2.5, 96.0))
CURSOR = Cursor(3, "running", {0: "0.0"}, {"1.0": 2}, **PROGRESS.progress())
INFO = RunInfo(identity="first", job="hash", steps=9, faults=["kill:0.0@3"], started=1.5)
SOON = 30.0


def address(node: int) -> LeaderAddress:
    return LeaderAddress(node, f"session {node}", "127.0.0.1", 5000 + node)


class Run:
    """A run in etcd, and its agents' views of it."""

    def __init__(self, server: EtcdServer):
        self.name, self._server = f"run-{os.urandom(4).hex()}", server

    def agent(self, **settings) -> Election:
        limits = MembershipSection(store=self._server.url, **settings)
        return Election(open_client(self._server.url, limits), self.name, limits)

    def client(self) -> EtcdClient:
        return open_client(self._server.url, MembershipSection(store=self._server.url))

    def keys(self) -> set[str]:
        """The run's keys."""
        prefix = f"/recycle/{self.name}/"
        return {name.removeprefix(prefix) for name in keys(self._server) if name.startswith(prefix)}


@pytest.fixture
def run(etcd):
    run = Run(etcd)
    yield run
    last = run.agent()
    if run.keys() and last.campaign(address(9)):
        last.erase()
        last.resign()


def test_one_of_five_candidates_leads_each_time(run):
    candidates = [run.agent() for _ in range(5)]
    for _ in range(3):
        with ThreadPoolExecutor(5) as threads:
            won = list(threads.map(lambda node: candidates[node].campaign(address(node)), range(5)))
        (winner,) = (node for node in range(5) if won[node])
        assert {candidate.leader() for candidate in candidates} == {address(winner)}
        for node, candidate in enumerate(candidates):
            if node != winner:
                with pytest.raises(RoleLost):
                    candidate.persist(Persist(CURSOR))
        candidates[winner].persist(Persist(CURSOR))
        candidates[winner].resign()
        assert candidates[0].leader() is None


def test_leader_that_has_lost_the_role_writes_nothing(run):
    old, new = run.agent(), run.agent()
    assert old.campaign(address(0))
    old.persist(Persist(CURSOR, RECORD))
    old.resign()
    for is_vacant in (True, False):
        assert is_vacant or new.campaign(address(1))
        for write in (
            lambda: old.persist(Persist(msgspec.structs.replace(CURSOR, committed=5), RECORD)),
            lambda: old.end("done"),
            lambda: old.erase(),
            lambda: old.erase(Persist(CURSOR)),
        ):
            with pytest.raises(RoleLost):
                write()
    assert new.register() == (RECORD, CURSOR)
    assert (new.outcome(), new.leader()) == (None, address(1))
    new.resign()


def test_write_that_arrives_after_later_ones_changes_nothing(run, monkeypatch):
    """A member of etcd that was stopped carries out a request when another one has had its repetition for long."""
    leader, requests = run.agent(), []
    assert leader.campaign(address(0))
    post = EtcdClient._post

    def lose_answers(client, path, body, seconds):
        is_first = path == "/kv/txn" and body not in requests
        requests.append(body)
        answer = post(client, path, body, seconds)
        if is_first:
            raise TimeoutError
        return answer

    monkeypatch.setattr(EtcdClient, "_post", lose_answers)
    for step in (4, 5):
        leader.persist(Persist(msgspec.structs.replace(CURSOR, committed=step), RECORD))
    monkeypatch.undo()
    (first, *_) = (body for body in requests if "compare" in body)
    run.client().call("/kv/txn", first)
    assert leader.register() == (RECORD, msgspec.structs.replace(CURSOR, committed=5))
    leader.erase()
    leader.resign()


def test_role_ends_with_its_lease_and_another_agent_may_have_it(own_etcd):
    run = Run(own_etcd)
    old, new = run.agent(lease=2, dead_after=1.0), run.agent(lease=2, dead_after=1.0)
    assert old.campaign(address(0))
    own_etcd.freeze()
    time.sleep(3.0)
    assert not old.is_lost
    own_etcd.thaw()
    until(lambda: old.is_lost and new.campaign(address(1)))
    with pytest.raises(RoleLost):
        old.persist(Persist(CURSOR))
    old.resign()
    assert new.leader() == address(1)
    assert not old.campaign(address(0))
    new.resign()
    assert old.campaign(address(0))
    assert not old.is_lost
    old.resign()


def test_register_comes_back_to_the_last_bit(run):
    leader = run.agent()
    assert leader.register() == (None, None)
    assert leader.campaign(address(0))
    spoilt = msgspec.structs.replace(COMMIT, loss=math.nan, grad_norm=-math.inf)
    verified = Verified(1, spoilt, ["1.0"], "held")
    cursor = msgspec.structs.replace(CURSOR, commit=spoilt, verified=verified, evaluated=Evaluated(4, math.nan, 0.0))
    record = msgspec.structs.replace(RECORD, commit=spoilt, disputed=[(0, 1, 2)])
    leader.persist(Persist(cursor, record))
    assert repr(run.agent().register()) == repr((record, cursor))
    later = msgspec.structs.replace(CURSOR, committed=5)
    leader.persist(Persist(later))
    assert repr(run.agent().register()) == repr((record, later))
    leader.resign()


def test_description_by_another_version_is_refused(run):
    client = run.client()
    client.call("/kv/txn", {"success": [put(f"/recycle/{run.name}/run", msgspec.msgpack.encode({"name": "mine"}))]})
    with pytest.raises(JobError, match=rf"/recycle/{run.name}/run was written by another version of recycle"):
        run.agent().run()


def test_outcome_stays_until_the_run_is_erased(run):
    leader = run.agent()
    leader.agree(INFO)
    assert leader.campaign(address(0))
    assert leader.outcome() is None
    leader.persist(Persist(CURSOR, RECORD))
    leader.end("")
    assert run.agent().outcome() == ""
    assert run.keys() == {"run", "role", "record", "cursor", "outcome"}
    leader.erase()
    assert run.keys() == set()
    leader.resign()


def test_resumable_run_keeps_its_register_without_an_outcome(run):
    leader = run.agent()
    leader.agree(INFO)
    assert leader.campaign(address(0))
    leader.persist(Persist(CURSOR, RECORD))
    leader.end("ended early")
    resumable = Persist(
        msgspec.structs.replace(CURSOR, phase="abandoned"), msgspec.structs.replace(RECORD, generation=9)
    )
    leader.erase(resumable)
    leader.resign()
    assert run.keys() == {"run", "record", "cursor"}
    later = run.agent()
    assert (later.outcome(), later.run(), later.register()) == (None, INFO, (resumable.record, resumable.cursor))
