"""Links exchange messages only with the key and the own user; altered frames end the link."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import pytest

from recycle import RunError
from recycle.exec import links
from recycle.exec.links import Hub, Link, LinkClosed, connect_locally, connect_to
from recycle.exec.members import joined_digests
from recycle.exec.protocol import GetKeys, Leave, SetKey, Stop, Values
from tests.exec.keys import KeyServer

KEY, OTHER = secrets.token_bytes(32), secrets.token_bytes(32)
SOON = 60.0
Message = Stop | Leave
THREADS = ThreadPoolExecutor(16)
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


def exactly(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        assert part
        received += part
    return received


def frame_from(connection: socket.socket) -> bytes:
    length = exactly(connection, 4)
    return length + exactly(connection, *struct.unpack("!I", length))


def arrived(link: Link):
    """What a link makes of the bytes that come next. Raises LinkClosed."""
    assert select.select([link.socket], [], [], SOON)[0]
    return link.read()


def accepted_stranger() -> tuple[socket.socket, Link]:
    """A connection to the leader, and the leader's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = socket.create_connection(listener.getsockname())
        link = Link(listener.accept()[0], Message, KEY, is_server=True)
    stranger.settimeout(SOON)
    return stranger, link


class Middle:
    """A man in the middle between agent and leader: passes on the handshake, then what a test sends."""

    def __init__(self, client_key: bytes = KEY, server_key: bytes = KEY):
        with socket.create_server(("127.0.0.1", 0)) as at_client, socket.create_server(("127.0.0.1", 0)) as at_server:
            port = at_client.getsockname()[1]
            self.client = THREADS.submit(connect_to, "127.0.0.1", port, client_key, Message)
            self.to_client = at_client.accept()[0]
            self.to_server = socket.create_connection(at_server.getsockname())
            self.server = Link(at_server.accept()[0], Message, server_key, is_server=True)
        for connection in (self.to_client, self.to_server):
            connection.settimeout(SOON)
        self.challenge = exactly(self.to_server, 32)
        self.to_client.sendall(self.challenge)
        self.answer = exactly(self.to_client, 64)
        self.to_server.sendall(self.answer)

    def complete(self) -> Middle:
        while not self.server.is_trusted:
            assert arrived(self.server) == []
        self.to_client.sendall(exactly(self.to_server, 32))
        self.client.result(SOON)
        return self

    def frames(self, *messages: Message | bytes) -> list[bytes]:
        """What the agent sends for each of these messages."""
        sent = []
        for message in messages:
            self.client.result().send(message)
            sent.append(frame_from(self.to_client))
        return sent

    def leader_reads(self, *frames: bytes):
        """What the leader makes of what comes over the network. Raises LinkClosed."""
        got = []
        for frame in frames:
            self.to_server.sendall(frame)
            got += arrived(self.server)
        return got

    def close(self):
        self.to_client.close()
        self.to_server.close()


@pytest.fixture
def middle():
    middle = Middle().complete()
    yield middle
    middle.close()


@pytest.mark.parametrize("keys", [(OTHER, KEY), (KEY, OTHER)])
def test_leader_refuses_a_client_with_another_key_and_tells_it_nothing(keys):
    middle = Middle(*keys)
    with pytest.raises(LinkClosed):
        arrived(middle.server)
    middle.server.close()
    assert middle.to_server.recv(1) == b""
    middle.close()
    with pytest.raises((LinkClosed, OSError)):
        middle.client.result(SOON)


def test_agent_refuses_a_leader_that_does_not_know_the_key(middle):
    """Neither random bytes prove it, nor the agent's own proof sent back."""
    for proof in (secrets.token_bytes(32), None):
        stranger = Middle()
        stranger.to_client.sendall(stranger.answer[32:] if proof is None else proof)
        with pytest.raises(LinkClosed):
            stranger.client.result(SOON)
        stranger.close()


@pytest.mark.parametrize("said", [b"", b"\0" * 96, b"GET / HTTP/1.1\r\n" * 6, secrets.token_bytes(200)])
def test_leader_refuses_a_client_without_a_key(said):
    stranger, link = accepted_stranger()
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkClosed):
        assert arrived(link) == []
    link.close()
    assert len(exactly(stranger, 32)) == 32
    assert stranger.recv(1) == b""


def test_handshake_that_was_recorded_opens_no_other_connection(middle):
    stranger, link = accepted_stranger()
    assert exactly(stranger, 32) != middle.challenge
    stranger.sendall(middle.answer)
    with pytest.raises(LinkClosed):
        arrived(link)


@pytest.mark.parametrize("place", [4, 19, 20, -1])
def test_frame_with_a_changed_bit_ends_the_link(middle, place):
    (frame,) = middle.frames(Stop(1))
    changed = bytearray(frame)
    changed[place] ^= 1
    with pytest.raises(LinkClosed):
        middle.leader_reads(bytes(changed))


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (0, 2)])
def test_frames_out_of_order_repeated_or_without_one_between_end_the_link(middle, order):
    frames = middle.frames(Stop(1), Stop(2), Stop(3))
    with pytest.raises(LinkClosed):
        middle.leader_reads(*(frames[place] for place in order))


def test_frame_of_another_connection_or_of_the_other_direction_ends_the_link(middle):
    other = Middle().complete()
    with pytest.raises(LinkClosed):
        middle.leader_reads(*other.frames(Stop(1)))
    other.server.send(Stop(1))
    with pytest.raises(LinkClosed):
        other.leader_reads(frame_from(other.to_server))
    other.close()


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\x40\x00\x00\x01", b"\0\0\0\0", b"\0\0\0\x0f" + b"x" * 15])
def test_frame_of_an_impossible_length_ends_the_link_at_once(middle, frame):
    with pytest.raises(LinkClosed):
        middle.leader_reads(frame)


def test_unknown_message_ends_the_link(middle):
    frames = middle.frames(msgspec.msgpack.encode(SetKey("name", b"value")))
    with pytest.raises(LinkClosed):
        middle.leader_reads(*frames)


def test_slow_handshake_ends_at_its_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        late = THREADS.submit(connect_to, *listener.getsockname(), KEY, Message, 0.3)
        began, slow = time.monotonic(), listener.accept()[0]
        while not late.done() and time.monotonic() - began < SOON:
            with contextlib.suppress(OSError):
                slow.sendall(b"x")
            time.sleep(0.05)
    with pytest.raises(OSError, match="timed out"):
        late.result(0)
    slow.close()


# A hub.


class Pair:
    """A link in a hub, and its other end."""

    def __init__(self, hub: Hub):
        own, self.other = socket.socketpair()
        self.link, self.far = Link(own, Message), Link(self.other, Message)
        self.heard = []
        self.link.owner = lambda link, messages: self.heard.extend([None] if messages is None else messages)
        hub.add(self.link)


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


def test_unread_messages_wait_without_delaying_other_links(hub):
    slow, quick = Pair(hub), Pair(hub)
    large = Leave("x" * (1 << 20), 1)
    for number in range(8):
        hub.send(slow.link, large)
        hub.send(quick.link, Stop(number))
    assert slow.link.has_unsent
    assert quick.far.read() == [Stop(number) for number in range(8)]
    got = []
    while len(got) < 8:
        got += slow.far.read()
        hub.dispatch()
    assert got == [large] * 8
    assert not slow.link.has_unsent


@pytest.mark.parametrize("is_full", [False, True])
def test_last_messages_of_a_closed_peer_are_read(hub, is_full):
    pair = Pair(hub)
    if is_full:
        hub.send(pair.link, Leave("x" * (1 << 20), 1))
    pair.far.send(Stop(1))
    pair.far.close()
    hub.send(pair.link, Stop(2))
    while None not in pair.heard:
        assert hub.dispatch(SOON)
    assert pair.heard == [Stop(1), None]


def test_an_end_that_does_not_read_is_given_up(hub, monkeypatch):
    monkeypatch.setattr(links, "MOST_UNSENT_BYTES", 1_000_000)
    pair = Pair(hub)
    for _ in range(3):
        hub.send(pair.link, Leave("x" * (1 << 20), 1))
    assert hub.dispatch(SOON)
    assert pair.heard == [None]


def test_garbage_ends_its_own_link_only(hub):
    bad, good = Pair(hub), Pair(hub)
    bad.other.sendall(b"\0\0\0\4\xff\xff\xff\xff")
    good.far.send(Stop(1))
    while not (bad.heard and good.heard):
        assert hub.dispatch(SOON)
    assert (bad.heard, good.heard) == ([None], [Stop(1)])
    hub.send(bad.link, Stop(2))
    good.far.send(Stop(3))
    assert hub.dispatch(SOON)
    assert good.heard == [Stop(1), Stop(3)]


# Other users of the machine.


def as_another_user(action: Callable[[], bool]) -> bool:
    """What `action` returns in a process of another user; False where it fails."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setuid(65534)
            status = not action()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def is_answered(address: str, request, answers) -> bool:
    """Whether the socket of this name answers a request."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SOON)
        connection.connect(f"\0{address}")
        link = Link(connection, answers)
        try:
            link.send(request)
            return bool(link.read())
        except (OSError, LinkClosed):
            return False


@needs_root
@pytest.mark.process
def test_another_user_neither_reads_nor_writes_keys():
    server = KeyServer()
    own = connect_locally(server.address, Values, "the server")
    own.send(SetKey("name", b"value"))
    assert own.read() == [Values()]

    assert is_answered(server.address, GetKeys(["name"]), Values)
    for request in (GetKeys(["name"]), SetKey("name", b"other")):
        assert not as_another_user(partial(is_answered, server.address, request, Values))
    own.send(GetKeys(["name"]))
    assert own.read() == [Values([b"value"])]
    server.close()


@needs_root
@pytest.mark.process
def test_socket_of_another_user_receives_nothing():
    name, (reported, says) = f"recycle-{secrets.token_hex(16)}", os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(f"\0{name}")
                listener.listen()
                os.write(says, b"!")
                listener.accept()[0].recv(1)
        finally:
            os._exit(0)
    assert os.read(reported, 1) == b"!"
    with pytest.raises(RunError, match="another user"):
        connect_locally(name, Message, "the agent")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reported)
    os.close(says)


# Names of processes.


def test_a_workers_digest_is_of_all_its_processes_in_their_order():
    item, other = {0: "aa", 2: "bb"}, {0: "cc", 2: "dd"}
    assert joined_digests([item]) == item
    assert joined_digests([item, other]).keys() == {0, 2}
    assert joined_digests([item, other]) != joined_digests([other, item])
    assert joined_digests([item, {0: "cc", 2: "xx"}])[0] == joined_digests([item, other])[0]
    assert joined_digests([item, {0: "cc", 2: "xx"}])[2] != joined_digests([item, other])[2]
