"""Connections between two processes: found by their ends, cut without a word, and given up by the kernel."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recycle.exec.transport.connections import cut, give_up_after, open_sockets, own_connections


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
