"""Connections between two processes: cut, broken by the kernel, and listed; delays of emulated and faulty links."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recycle import Worker
from recycle.exec.transport.connections import cut, give_up_after, open_sockets, own_connections
from recycle.exec.transport.outgoing import LOST_SECONDS, PacedLinks
from tests.exec.runs import job


def _echo(listener: socket.socket) -> int:
    """Fork a process that accepts two connections and echoes messages until the first is closed.

    On "cut ENDS" it cuts its connections to these ends, and answers with their number and its own ends.
    """
    child = os.fork()
    if child:
        return child
    os.closerange(3, listener.fileno())  # sockets of other tests do not belong to this process
    os.closerange(listener.fileno() + 1, 4096)
    accepted = [listener.accept()[0] for _ in range(2)]
    while word := accepted[0].recv(4096):
        if word.startswith(b"cut "):
            own = own_connections([end.fileno() for end in accepted])
            word = " ".join(map(str, [cut(word.decode().split()[1:]), *own])).encode()
        accepted[0].sendall(word)
    os._exit(0)


@pytest.mark.process
def test_cut_connections_are_silent_until_the_kernel_breaks_them_and_others_work():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as elsewhere:
        child = _echo(listener)
        ends = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        other = socket.create_connection(elsewhere.getsockname())
        other_end = elsewhere.accept()[0]
        try:
            ends[0].sendall(b"whole")
            assert ends[0].recv(16) == b"whole"
            own = own_connections([end.fileno() for end in (*ends, listener)])
            assert {connection.descriptor for connection in own} == {end.fileno() for end in ends}
            for connection in own:
                give_up_after(connection, 1.0)
            ends[0].sendall(f"cut {own[0]} {own[1]}".encode())
            count, *theirs = ends[0].recv(4096).decode().split()
            assert cut(theirs) == int(count) == len(theirs) == 2
            began = time.monotonic()
            ends[0].sendall(b"lost")
            for end in ends:
                with pytest.raises(TimeoutError, match="timed out"):
                    end.recv(16)
                assert time.monotonic() - began > 0.9
            other.sendall(b"whole")
            assert other_end.recv(16) == b"whole"
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
            for end in (*ends, other, other_end):
                end.close()


def test_threads_that_list_connections_do_not_see_duplicates_of_each_other():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()) for _ in range(8)]
        wanted = {end.fileno() for end in ends}
        before = {*open_sockets().values()} - wanted
        with ThreadPoolExecutor(4) as threads:
            lists = threads.map(lambda _: own_connections(open_sockets().values()), range(400))
            listed = {connection.descriptor for connections in lists for connection in connections}
        for end in ends:
            end.close()
    assert wanted <= listed <= wanted | before


def test_slow_link_multiplies_delays_between_two_workers_for_an_iteration():
    emulated = job(2, 2, 2, times={"link": 0.5}, model={"seconds_per_unit": 0.01})
    first, second, other = Worker(1, 0), Worker(1, 1), Worker(0, 1)
    for process, peer in ((first, second), (second, first)):
        paced, real = PacedLinks.for_job(emulated, process), PacedLinks.for_job(job(2, 2, 2, kind="gpt"), process)
        for links in (paced, real):
            links.begin_iteration()
            links.slow_down(first, second, 4.0)
        assert (paced.delay(peer, network=0.001), paced.delay(other, network=0.001)) == (0.02, 0.005)
        assert (real.delay(peer, network=0.001), real.delay(other, network=0.001)) == (pytest.approx(0.003), 0.0)
        paced.begin_iteration()
        assert paced.delay(peer, network=0.001) == 0.005


def test_flaky_link_delays_its_share_of_messages():
    links, peer = PacedLinks(Worker(0, 0)), Worker(0, 1)
    links.make_flaky(Worker(0, 0), peer, 0.25, "seed")
    delays = [links.delay(peer, network=0.001) for _ in range(400)]
    assert set(delays) == {0.0, LOST_SECONDS}
    assert 70 <= sum(seconds > 0 for seconds in delays) <= 130
    assert links.delay(Worker(1, 1), network=0.001) == 0.0
