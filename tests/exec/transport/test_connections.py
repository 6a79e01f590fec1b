"""Connections between two processes, cut or slow: found by their ends, given up by the kernel, paced as a link is."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recycle.exec.transport.base import TransportError
from recycle.exec.transport.connections import cut, give_up_after, open_sockets, own_connections
from recycle.exec.transport.gloo import GlooTransport
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.outgoing import LOST_SECONDS, PacedLinks
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Receive, Send
from recycle.ir.lower import lower
from recycle.job.shape import Shape, Worker
from tests.exec.runs import job


def _echo(listener: socket.socket) -> int:
    """A process that accepts two connections and sends back what it is sent; ends with its first one.

    Told to cut its connections to some ends, it answers with how many it has cut, and with the ends of its own.
    """
    child = os.fork()
    if child:
        return child
    os.closerange(3, listener.fileno())  # what other tests left open here is not this process's
    os.closerange(listener.fileno() + 1, 4096)
    accepted = [listener.accept()[0] for _ in range(2)]
    while word := accepted[0].recv(4096):
        if word.startswith(b"cut "):
            own = own_connections([end.fileno() for end in accepted])
            word = " ".join(map(str, [cut(word.decode().split()[1:]), *own])).encode()
        accepted[0].sendall(word)
    os._exit(0)


@pytest.mark.process
def test_a_cut_connection_is_silent_until_the_kernel_gives_it_up_and_another_one_lives_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as elsewhere:
        child = _echo(listener)
        ends = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        other = socket.create_connection(elsewhere.getsockname())
        other_end = elsewhere.accept()[0]
        try:
            ends[0].sendall(b"whole")
            assert ends[0].recv(16) == b"whole"
            own = own_connections([end.fileno() for end in (*ends, listener)])
            assert [connection.descriptor for connection in own] == sorted(
                (end.fileno() for end in ends), key=lambda fd: own_connections([fd])[0]
            )
            for connection in own:
                give_up_after(connection, 1.0)
            ends[0].sendall(f"cut {own[0]} {own[1]}".encode())
            count, *theirs = ends[0].recv(4096).decode().split()
            assert len(theirs) == 2
            assert cut(theirs) == int(count) == 2
            began = time.monotonic()
            ends[0].sendall(b"lost")
            with pytest.raises(TimeoutError, match="timed out"):
                ends[0].recv(16)
            assert time.monotonic() - began > 0.9
            with pytest.raises(TimeoutError, match="timed out"):
                ends[1].recv(16)
            other.sendall(b"whole")
            assert other_end.recv(16) == b"whole"
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
            for end in (*ends, other, other_end):
                end.close()


def test_threads_that_look_for_connections_do_not_meet_the_duplicates_of_each_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()) for _ in range(8)]
        wanted = {end.fileno() for end in ends}
        before = {*open_sockets().values()} - wanted

        def look(_: int) -> set[int]:
            found: set[int] = set()
            for _ in range(100):
                found |= {connection.descriptor for connection in own_connections(open_sockets().values())}
            return found

        with ThreadPoolExecutor(4) as threads:
            found = set[int]().union(*threads.map(look, range(4)))
        for end in ends:
            end.close()
    assert wanted <= found <= wanted | before


PAIR = lower(one_f_one_b(Shape(1, 2, 4)))
FIRST, LAST = PAIR.live
LATE = 20.0
HOP = 0.05


@pytest.fixture
def transports() -> Iterator[dict[Worker, GlooTransport]]:
    """Both workers of a pipeline, in threads of this process, in iteration 0; the first one's link takes `HOP`."""
    made = {}
    store = HashStore()
    for role in PAIR.live:
        links = PacedLinks(role, lambda peer: HOP) if role == FIRST else PacedLinks(role)
        groups = GroupsOfGeneration("g", role, PAIR.live, {}, ((4,), torch.float32), over=threading.Event())
        made[role] = GlooTransport(TransportSettings(store, links=links), groups)
    with ThreadPoolExecutor(2) as both:
        list(both.map(GlooTransport.form, made.values(), timeout=LATE))
    for role, transport in made.items():
        transport.begin(PAIR.program(role), 0)
    yield made
    for transport in made.values():
        transport.close()


def messages(transports: dict[Worker, GlooTransport]) -> Iterator[float]:
    """Send all messages of the iteration at once; seconds until each is there."""
    began = time.monotonic()
    for place, send in enumerate(one for one in PAIR.program(FIRST) if isinstance(one, Send)):
        transports[FIRST].send(send, torch.full((4,), float(place)))
    for place, receive in enumerate(one for one in PAIR.program(LAST) if isinstance(one, Receive)):
        assert float(transports[LAST].receive(receive)()[0]) == place
        yield time.monotonic() - began


def test_a_lane_carries_one_message_at_a_time_each_for_as_long_as_its_link_takes(
    transports: dict[Worker, GlooTransport],
) -> None:
    arrived = list(messages(transports))
    assert all(seconds >= (place + 1) * HOP for place, seconds in enumerate(arrived))
    deadline = time.monotonic() + LATE
    told = transports[FIRST].messaged()
    while sum(one.sent for one in told) < 4:
        assert time.monotonic() < deadline
        told += transports[FIRST].messaged()
    assert {one.process for one in told} == {LAST}
    assert all(HOP <= one.seconds <= arrived[-1] for one in told)
    (waited,) = transports[LAST].messaged()
    assert (waited.process, waited.sent) == (FIRST, 0)
    assert HOP <= waited.waited <= arrived[-1]
    assert transports[LAST].messaged() == []


def test_a_message_that_is_held_back_when_its_generation_ends_is_not_sent(
    transports: dict[Worker, GlooTransport],
) -> None:
    transports[FIRST].send(next(one for one in PAIR.program(FIRST) if isinstance(one, Send)), torch.zeros(4))
    transports[FIRST]._over.set()
    with pytest.raises(TransportError, match="the generation is over"):
        transports[FIRST].begin(PAIR.program(FIRST), 2)  # waits for what was sent two iterations ago


def test_links_are_slow_for_an_iteration_between_two_workers_in_both_directions() -> None:
    emulated = job(2, 2, 2, times={"link": 0.5}, model={"seconds_per_unit": 0.01})
    here, there, other = Worker(1, 0), Worker(1, 1), Worker(0, 1)
    for process, peer in ((here, there), (there, here)):
        paced, real = PacedLinks.of(emulated, process), PacedLinks.of(job(2, 2, 2, kind="gpt"), process)
        for links in (paced, real):
            links.begin()
            links.slow_down(here, there, 4.0)
        assert (paced.hold(peer, usual=0.001), paced.hold(other, usual=0.001)) == (0.02, 0.005)
        assert (real.hold(peer, usual=0.001), real.hold(other, usual=0.001)) == (pytest.approx(0.003), 0.0)
        paced.begin()
        assert paced.hold(peer, usual=0.001) == 0.005


def test_a_flaky_link_holds_back_the_share_of_messages_that_it_is_told_to() -> None:
    links, peer = PacedLinks(Worker(0, 0)), Worker(0, 1)
    links.make_flaky(Worker(0, 0), peer, 0.25, "seed")
    held = [links.hold(peer, usual=0.001) for _ in range(400)]
    assert set(held) == {0.0, LOST_SECONDS}
    assert 70 <= sum(seconds > 0 for seconds in held) <= 130
    assert links.hold(Worker(1, 1), usual=0.001) == 0.0
