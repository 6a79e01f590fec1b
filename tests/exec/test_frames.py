"""Frames over sockets: authenticated connections, frames that arrive in parts, and ends that do not behave."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from recycle.exec import links
from recycle.exec.launch import peers
from recycle.exec.launch.peers import AgentServer
from recycle.exec.links import Hub, Link, LinkClosed, connect_to

KEY = b"k" * 32


class Server:
    """A hub that accepts connections between nodes and keeps what arrives."""

    def __init__(self) -> None:
        self.hub, self.received = Hub(), list[Any]()
        self.accepted: list[Link] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.hub.listen(listener, self._accept)

    def _accept(self, connection: socket.socket) -> None:
        link = Link(connection, int, KEY, is_server=True)
        link.owner = lambda _, messages: self.received.extend([None] if messages is None else messages)
        self.accepted.append(link)
        self.hub.add(link)

    def until(self, count: int) -> list[Any]:
        """What has arrived, once it is so much; None stands for a connection that was closed."""
        deadline = time.monotonic() + 10
        while len(self.received) < count and time.monotonic() < deadline:
            self.hub.dispatch(0.05)
        return self.received

    def connect(self, key: bytes = KEY) -> Link:
        """A link from another thread, because the handshake needs the hub."""
        made: list[Link | LinkClosed] = []

        def run() -> None:
            try:
                made.append(connect_to("127.0.0.1", self.port, key, int))
            except LinkClosed as error:
                made.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            self.hub.dispatch(0.01)
        (link,) = made
        if isinstance(link, LinkClosed):
            raise link
        return link


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.hub.close()


def test_both_ends_know_the_key_and_messages_pass_both_ways(server: Server) -> None:
    client = server.connect()
    client.send(1)
    client.send(2)
    assert server.until(2) == [1, 2]
    server.hub.send(server.accepted[0], 3)
    assert client.read() == [3]


def test_an_end_with_another_key_is_refused_and_says_nothing(server: Server) -> None:
    with pytest.raises((LinkClosed, OSError)):
        server.connect(b"x" * 32)
    assert server.until(1) == [None]
    assert not server.accepted[0].is_trusted


def test_a_frame_that_was_changed_on_the_way_closes_the_connection(server: Server) -> None:
    client = server.connect()
    frame = msgspec.msgpack.encode(1)
    client.socket.sendall((len(frame) + 16).to_bytes(4, "big") + bytes(16) + frame)
    assert server.until(1) == [None]


def test_frames_that_arrive_in_parts_are_put_together() -> None:
    here, there = socket.socketpair()
    link, body = Link(here, str), msgspec.msgpack.encode("x" * 300)
    frames = 2 * (len(body).to_bytes(4, "big") + body)
    messages = []
    for first in range(0, len(frames), 100):
        there.sendall(frames[first : first + 100])
        messages += link.read()
    assert messages == ["x" * 300] * 2
    link.close()
    there.close()


def test_what_the_socket_does_not_take_is_sent_later_and_in_order() -> None:
    here, there = socket.socketpair()
    hub, link, reader = Hub(), Link(here, str), Link(there, str)
    hub.add(link)
    texts = [f"{number} " + "x" * 100_000 for number in range(20)]
    for text in texts:
        hub.send(link, text)
    assert link.has_unsent
    received: list[str] = []
    while len(received) < len(texts):
        hub.dispatch()
        received += reader.read()
    assert received == texts
    assert not link.has_unsent
    hub.close()
    there.close()


def test_an_end_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_UNSENT_BYTES", 1_000_000)
    here, there = socket.socketpair()
    hub, link, closed = Hub(), Link(here, str), list[bool]()
    link.owner = lambda _, messages: closed.append(messages is None)
    hub.add(link)
    for _ in range(20):
        hub.send(link, "x" * 100_000)
    hub.dispatch(1.0)
    assert closed == [True]
    hub.close()
    there.close()


def test_what_an_end_said_before_it_closed_is_read_although_nothing_can_be_sent_to_it() -> None:
    here, there = socket.socketpair()
    hub, link, received = Hub(), Link(here, str), list[Any]()
    link.owner = lambda _, messages: received.append(messages)
    hub.add(link)
    Link(there, str).send("the last word")
    there.close()
    hub.send(link, "too late")
    while None not in received:
        hub.dispatch(0.1)
    assert received == [["the last word"], None]
    hub.close()


def test_a_connection_that_proves_nothing_in_time_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HANDSHAKE_SECONDS", 0.0)
    hub, listener, runtime = Hub(), socket.create_server(("127.0.0.1", 0)), Mock()
    server = AgentServer(runtime, hub, listener, KEY)
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.settimeout(10)
        hub.dispatch(10)
        assert len(stranger.recv(100)) == 32
        server.look()
        assert stranger.recv(100) == b""
    assert runtime.mock_calls == []
    server.close()
    hub.close()
