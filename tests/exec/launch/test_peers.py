"""The leader's listening socket: agents connect, reconnect and leave; strangers delay no agent."""

import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from recycle.exec.launch import peers
from recycle.exec.launch.peers import AgentServer
from recycle.exec.launch.runtime import Peer
from recycle.exec.links import HANDSHAKE_SECONDS, Hub, Link, connect_to
from recycle.exec.protocol import (
    Batch,
    Drain,
    Drained,
    FromWorker,
    Hello,
    Order,
    Ready,
    Refused,
    Rejected,
    Stop,
    Trouble,
)
from tests.waiting import ManualTime

KEY = secrets.token_bytes(32)
SOON = 60.0
BATCH = Batch([FromWorker("0.0", Trouble("broke"), 1)])


class Runtime:
    """Stands for the leader's runtime; it has a place for one agent of each node."""

    def __init__(self):
        self.agents = {}
        self.log = []

    def connect_agent(self, peer: Peer, hello: Hello) -> bool:
        if hello.node in self.agents:
            peer(Rejected(), None)
            return False
        self.agents[hello.node] = peer
        self.log.append(("greet", hello.node, hello.session))
        return True

    def disconnect_agent(self, node: int, peer: Peer):
        assert self.agents.pop(node) is peer
        self.log.append(("part", node))

    def take(self, node: int, batch: Batch):
        self.log.append(("take", node, batch))

    def close(self):
        self.log.append(("close",))

    def drain(self, request: Drain, answer: Callable[[Drained | Refused], None]):
        answer(Drained([request.target]))


class Leader:
    """The server in a leader's hub."""

    def __init__(self):
        self.hub, self.runtime = Hub(), Runtime()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.server = AgentServer(self.runtime, self.hub, listener, KEY)
        self._threads = ThreadPoolExecutor(8)

    def connect(self, key: bytes = KEY) -> Future[Link]:
        return self._threads.submit(connect_to, *self.address, key, Order | Drained | Refused)

    def agent(self, *messages) -> Link:
        """A connected agent that has said this."""
        asked = self.connect()
        self.until(asked.done)
        for message in messages:
            asked.result().send(message)
        asked.result().socket.settimeout(SOON)
        return asked.result()

    def answers(self, link: Link):
        """What comes next on a link."""
        asked = self._threads.submit(link.read)
        self.until(asked.done)
        return asked.result()

    def until(self, condition: Callable[[], object]):
        deadline = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < deadline
            self.hub.dispatch(0.01)
            self.server.close_strangers()

    def logs(self, *entries):
        """Serve until this was logged, and nothing else."""
        self.until(lambda: len(self.runtime.log) >= len(entries))
        assert self.runtime.log == list(entries)
        self.runtime.log.clear()


@pytest.fixture
def leader():
    leader = Leader()
    yield leader
    leader.hub.close()


def test_agent_messages_count_after_its_hello(leader):
    link = leader.agent(BATCH, Hello(1, "one"), BATCH)
    leader.logs(("greet", 1, "one"), ("take", 1, BATCH))
    assert not leader.server.is_empty
    leader.runtime.agents[1](Stop(4), None)
    assert link.read() == [Stop(4)]
    link.close()
    leader.logs(("part", 1))
    other = leader.agent(Hello(2, "two"))
    leader.logs(("greet", 2, "two"))
    other.close()
    leader.logs(("part", 2))
    assert leader.server.is_empty


def test_reconnected_agent_replaces_its_old_connection(leader):
    """It noticed first that the old one broke; what still comes there does not count, nor does its end."""
    old = leader.agent(Hello(1, "one"))
    leader.logs(("greet", 1, "one"))
    new = leader.agent(Hello(1, "one", said=[FromWorker("0.0", Ready(0))]))
    leader.logs(("part", 1), ("greet", 1, "one"))
    old.send(BATCH)
    old.close()
    new.send(Batch())
    leader.logs(("take", 1, Batch()))
    for _ in range(10):
        leader.hub.dispatch(0.01)
    assert leader.runtime.log == []
    leader.runtime.agents[1](Stop(4), None)
    assert new.read() == [Stop(4)]


def test_stranger_whose_bytes_come_slowly_is_let_go_at_a_deadline(leader, monkeypatch):
    clock = ManualTime()
    monkeypatch.setattr(peers, "time", clock)
    stranger = socket.create_connection(leader.address)

    def is_let_go():
        clock.now += HANDSHAKE_SECONDS / 8
        try:
            stranger.sendall(b"x")
        except OSError:
            return True
        return False

    leader.until(is_let_go)
    link = leader.agent(Hello(1, "one"), BATCH)
    leader.logs(("greet", 1, "one"), ("take", 1, BATCH))
    clock.now += 2 * HANDSHAKE_SECONDS
    link.send(BATCH)
    leader.logs(("take", 1, BATCH))
    stranger.close()
