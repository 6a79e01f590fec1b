"""The processes of a node reach the store by its agent: what is written in one, what is passed on, and who may come."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from recycle import RunError
from recycle.exec.membership.bundles import bundle_name, bundled, unbundled
from recycle.exec.membership.etcd_store import EtcdStore
from recycle.exec.membership.local_socket import Closed, receive, send
from recycle.exec.membership.relay import Relay
from recycle.exec.membership.relay_messages import Put
from recycle.exec.membership.relay_store import RelayStore
from recycle.exec.membership.schema import (
    EVERYBODY,
    BegunKey,
    CommitKey,
    EndedKey,
    FormedKey,
    HeartbeatKey,
    ProposalKey,
    RegisterKey,
    ReportKey,
    SavedKey,
    TroubleKey,
)
from recycle.exec.membership.stores import open_store
from recycle.exec.protocol import Commit, Formed, GenerationRecord, Heartbeat, Report
from recycle.sections import MembershipSection
from recycle.shape import Worker
from tests.exec.etcd_server import EtcdServer

NAMES = ["0.0", "0.1", "0.2"]
HEARTBEAT = 2.0
"""What is held is held for a twentieth of it."""


class Node:
    """A coordinator's client of a run, and the relay of node 3 with three processes."""

    def __init__(self, server: EtcdServer, name: str) -> None:
        self.settings = MembershipSection(store=server.url)
        self.coordinator = EtcdStore.connect(server.url, name, self.settings, "coordinator")
        self.agent = EtcdStore.connect(server.url, name, self.settings)
        self.relay = Relay(self.agent, 3, HEARTBEAT)
        self.processes = [self.come() for _ in NAMES]
        self._prefix = f"/recycle/{name}/"

    def come(self) -> RelayStore:
        store = open_store(self.relay.url, "", self.settings)
        assert isinstance(store, RelayStore)
        return store

    def keys(self) -> list[str]:
        found, _ = self.coordinator.client.range(self._prefix, self._prefix[:-1] + "0")
        return [name.removeprefix(self._prefix) for name in found]

    def revision(self) -> int:
        """How many writes the cluster has taken."""
        return self.coordinator.client.range(self._prefix)[1]

    def reported(self, step: int) -> dict[str, Report] | None:
        key, deadline = ReportKey(1, step, EVERYBODY), time.monotonic() + 30
        gathering = self.coordinator.gathering(key, NAMES)
        while not gathering.look() and time.monotonic() < deadline:
            self.coordinator.wait_for_change(1.0)
        return self.coordinator.answers(key, NAMES) if not gathering.missing else None


@pytest.fixture
def node(etcd: EtcdServer, request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(etcd, request.node.name)
    yield made
    made.relay.close()
    made.coordinator.erase()
    made.coordinator.close()
    made.agent.close()


def report(number: int) -> Report:
    return Report({0: [1.0 + number]}, float("nan") if number else 0.5)


def test_what_all_processes_of_a_node_say_is_one_write_and_is_read_as_each_ones(node: Node) -> None:
    before = node.revision()
    for step in range(3):
        for number, (store, name) in enumerate(zip(node.processes, NAMES, strict=True)):
            store.set(ReportKey(1, step, name), report(number))
        found = node.reported(step)
        assert found is not None
        assert repr(found) == repr({name: report(number) for number, name in enumerate(NAMES)})
    assert node.revision() - before == 3
    assert node.keys() == [f"posts/generation00000001/report/{step}/@3.{step}" for step in range(3)]


def test_who_says_nothing_keeps_the_others_waiting_for_a_moment_only(node: Node) -> None:
    before, began = node.revision(), time.monotonic()
    for store, name in zip(node.processes[:2], NAMES[:2], strict=True):
        store.set(FormedKey(1, name), Formed())
    while len(node.coordinator.answers(FormedKey(1, EVERYBODY), NAMES)) < 2:
        assert node.coordinator.wait_for_change(30.0)
    assert time.monotonic() - began >= 0.05 * HEARTBEAT
    assert node.revision() - before == 1


def test_what_is_held_stands_in_the_store_before_what_the_agent_says_next(node: Node) -> None:
    node.processes[0].set(ReportKey(1, 0, "0.0"), report(0))
    node.relay.flush()
    node.agent.set(EndedKey(Worker(0, 0)), (0, "killed by SIGKILL"))
    assert node.coordinator.wait(EndedKey(Worker(0, 0)), 30.0) is not None
    assert node.coordinator.answers(ReportKey(1, 0, EVERYBODY), NAMES).keys() == {"0.0"}


def test_heartbeats_of_all_processes_are_written_once_per_interval_and_never_those_of_the_dead(node: Node) -> None:
    before, beats = node.revision(), 0
    deadline = time.monotonic() + 2.2 * HEARTBEAT
    while time.monotonic() < deadline:
        beats += 1
        for store, name in zip(node.processes, NAMES, strict=True):
            store.set(HeartbeatKey(name), Heartbeat(beats, beats, False, "1F", 0.5))
        time.sleep(0.05)
    assert 2 <= node.revision() - before <= 4 < beats
    found = node.coordinator.answers(HeartbeatKey(EVERYBODY), NAMES)
    assert found.keys() == set(NAMES)
    assert all(0 < beat.beats <= beats for beat in found.values())
    node.relay.forget(["0.1"])
    node.processes[0].set(HeartbeatKey("0.0"), Heartbeat(9999, 1, False, "1F", None))
    deadline = time.monotonic() + 30
    while node.coordinator.answers(HeartbeatKey(EVERYBODY), ["0.1"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert node.coordinator.answers(HeartbeatKey(EVERYBODY), NAMES).keys() == {"0.0", "0.2"}


def test_a_commit_is_one_write_that_takes_the_reports_along(node: Node) -> None:
    record = GenerationRecord(1, NAMES, {name: name for name in NAMES}, "plan")
    after = GenerationRecord(1, NAMES, {name: name for name in NAMES}, "plan", 7)
    assert node.coordinator.compare_set(RegisterKey(), None, record)
    node.coordinator.compare_set(CommitKey(1, 5), None, Commit(5, 1.0, 1.0, 1.0))
    for number, (store, name) in enumerate(zip(node.processes, NAMES, strict=True)):
        store.set(ReportKey(1, 7, name), report(number))
    assert node.reported(7) is not None
    before, commit = node.revision(), Commit(7, 0.1, 0.2, 1.0)
    forget = [ReportKey(1, 7, EVERYBODY), CommitKey(1, 5)]
    assert node.coordinator.advance(RegisterKey(), record, after, (CommitKey(1, 7), commit), forget)
    assert node.revision() - before == 1
    assert [store.wait(CommitKey(1, 7), 30.0) for store in node.processes] == [commit] * 3
    assert [store.read(CommitKey(1, 5)) for store in node.processes] == [None] * 3
    assert node.coordinator.answers(ReportKey(1, 7, EVERYBODY), NAMES) == {}
    assert node.keys() == ["orders/generation00000001/commit/7", "register/register"]
    assert not node.coordinator.advance(RegisterKey(), record, record, (CommitKey(1, 8), commit), [])
    assert node.coordinator.read(CommitKey(1, 8)) is None


def test_a_process_that_comes_later_has_all_orders_and_follows_them(node: Node) -> None:
    node.coordinator.set(BegunKey(), 4)
    assert node.processes[0].wait(BegunKey(), 30.0) == 4
    late = node.come()
    assert late.read(BegunKey()) == 4
    node.coordinator.compare_set(ProposalKey(5), None, GenerationRecord(5, ["0.0"], {"0.0": "0.0"}, "plan"))
    proposed = late.wait(ProposalKey(5), 30.0)
    assert proposed is not None
    assert proposed.live == ["0.0"]
    node.coordinator.forget_before(6)
    deadline = time.monotonic() + 30
    while late.read(ProposalKey(5)) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_groups_form_on_comes_back_byte_for_byte(node: Node) -> None:
    value = bytes(range(256))
    node.processes[0].torch_store.set("generation00000001/world/0", value)
    other, deadline = node.processes[1].torch_store, time.monotonic() + 30
    while not other.check(["generation00000001/world/0"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert other.get("generation00000001/world/0") == value


def test_keys_that_nobody_follows_are_asked_of_the_store(node: Node) -> None:
    node.coordinator.set(TroubleKey(1), "a connection broke")
    assert node.processes[0].wait(TroubleKey(1), 30.0) == "a connection broke"
    assert not node.processes[0].has_all([SavedKey(3, 0)])
    node.processes[0].delete([TroubleKey(1)])
    assert node.coordinator.client.range(f"{node._prefix}posts/", f"{node._prefix}posts0")[0] == {}


def test_processes_learn_that_their_agent_is_gone(node: Node) -> None:
    node.relay.close()
    node.agent.close()
    with pytest.raises(RunError, match="the agent"):
        node.processes[0].set(TroubleKey(1), "a connection broke")
    with pytest.raises(RunError, match="the agent of this node is gone"):
        node.processes[1].wait(CommitKey(1, 0), 30.0)
    with pytest.raises(RunError, match="the agent of this node does not answer"):
        node.come()


def test_a_closed_relay_writes_nothing_more_so_that_the_run_can_be_erased(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all, begun = EtcdStore.put_all, threading.Event()

    def late(store: EtcdStore, values: dict[str, str | bytes]) -> None:
        begun.set()
        time.sleep(0.5)
        put_all(store, values)

    monkeypatch.setattr(EtcdStore, "put_all", late)
    node.processes[0].set(HeartbeatKey(NAMES[0]), Heartbeat(1, 1, False, "1F", 0.5))
    assert begun.wait(30)
    node.relay.close()
    node.coordinator.erase()
    time.sleep(1.0)
    assert node.keys() == []


def test_garbage_ends_its_own_connection_only(node: Node) -> None:
    address = "\0" + node.relay.url.partition("://")[2]
    for garbage in (b"\0\0\0\4\xff\xff\xff\xff", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(address)
            stranger.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b""
    node.processes[0].set(TroubleKey(1), "still served")
    assert node.coordinator.wait(TroubleKey(1), 30.0) == "still served"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_is_not_served(node: Node) -> None:
    address = "\0" + node.relay.url.partition("://")[2]
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(address)
                send(stranger, Put("posts/trouble", b"x"))
                receive(stranger, Put)
        except (Closed, OSError):
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert node.keys() == []


def test_a_bundle_stands_for_its_keys_and_any_other_key_for_itself() -> None:
    name = bundle_name("posts/generation00000001/report/3", 12, 5)
    texts = {"0.0": '{"loss":NaN}', "0.0t1": '"quoted \\" text"'}
    assert name == "posts/generation00000001/report/3/@12.5"
    assert unbundled({"@12.5": bundled(texts).encode(), "1.0": b"7"}) == {**texts, "1.0": "7"}
