"""The agent of a node as its processes' way to the store: one client of etcd for all of them.

The relay passes on what the agent's own copy of the store learns, so that etcd has a watch per node and not per
process. What the processes write goes through it too. What each says for itself in a generation (its report, that it
has acknowledged) is held until all processes of the node have said it, or for a moment, and heartbeats until the next
is due; both are then written in one (bundles.py). All that waits goes in one transaction, and while that is under way
the next one gathers.

A write is answered when etcd has it; one that is held, when the relay has it: the relay's end is that of the processes.
Processes come over a socket of this machine, and must be of the same user (local_socket.py).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from itertools import count
from queue import Empty

from recycle.errors import RunError
from recycle.exec.membership.bundles import bundle_name, bundled
from recycle.exec.membership.etcd_store import EtcdStore
from recycle.exec.membership.local_socket import Closed, LocalServer, receive, send
from recycle.exec.membership.relay_messages import (
    SCHEME,
    Changes,
    Delete,
    Follow,
    Put,
    Read,
    RelayAnswer,
    RelayRequest,
    Swap,
)
from recycle.exec.membership.schema import Folder, HeartbeatKey

HELD_SHARE = 0.05
"""Share of the time between two heartbeats that what is said in a generation may be held."""
CLOSE_SECONDS = 5.0
"""How long the end waits for a write that is under way; the store may not answer any more."""
MOST_WRITES = 100
"""Keys of one transaction; etcd takes 128."""


class _Write:
    """A write that its process waits for."""

    def __init__(self) -> None:
        self.done, self.error = threading.Event(), ""


class Relay:
    """Serves the processes of a node until it is closed.

    Args:
        store: the agent's client, which follows what processes follow.
        node: of the agent.
        heartbeat: seconds between two writes of all heartbeats.

    Attributes:
        url: that processes open as their store.
    """

    def __init__(self, store: EtcdStore, node: int, heartbeat: float) -> None:
        self._store, self._node, self._heartbeat = store, node, heartbeat
        self._writer = store.clone()
        self._changed = threading.Condition()
        self._plain: dict[str, tuple[bytes, list[_Write]]] = {}
        self._held: dict[str, dict[str, str]] = {}
        self._held_since = 0.0
        self._beats: dict[str, str] = {}
        self._beats_due, self._has_beaten = 0.0, False
        self._barriers: list[_Write] = []
        self._numbers, self._processes = count(), 0
        self._ended: str | None = None
        self._server = LocalServer(self._serve)
        self.url = f"{SCHEME}://{self._server.name}"
        self._writing = threading.Thread(target=self._write, daemon=True)
        self._writing.start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one client's requests, until its process has ended or follows."""
        store: EtcdStore | None = None
        with connection:
            try:
                while True:
                    request = receive(connection, RelayRequest)
                    if isinstance(request, Follow):
                        self._pass_on(connection)
                        return
                    if isinstance(request, Put):
                        answer = self._put(request)
                    else:
                        store = store or self._store.clone()
                        answer = _answer(store, request)
                    send(connection, answer)
            except (Closed, OSError):
                return

    def _pass_on(self, connection: socket.socket) -> None:
        """Send the process all keys, and then every change."""
        changes = self._store.keys.follow()
        with self._changed:
            self._processes += 1
        try:
            while True:
                gathered = changes.get()
                while gathered is not None:
                    try:
                        further = changes.get_nowait()
                    except Empty:
                        break
                    gathered = None if further is None else [*gathered, *further]
                send(connection, Changes(None if gathered is None else gathered))
                if gathered is None:
                    return
        finally:
            self._store.keys.unfollow(changes)
            with self._changed:
                self._processes -= 1

    def _put(self, put: Put) -> RelayAnswer:
        """Write a key, at once or with others."""
        folder, _, leaf = put.name.rpartition("/")
        with self._changed:
            if self._ended is not None:
                return RelayAnswer(error=self._ended)
            if put.is_bundled:
                if put.name.startswith(Folder.BEATS):
                    self._beats[leaf] = put.value.decode()
                    self._has_beaten = True
                else:
                    if not self._held:
                        self._held_since = time.monotonic()
                    self._held.setdefault(folder, {})[leaf] = put.value.decode()
                self._changed.notify_all()
                return RelayAnswer()
            write = _Write()
            _, waiting = self._plain.get(put.name, (b"", []))
            self._plain[put.name] = put.value, [*waiting, write]
            self._changed.notify_all()
        write.done.wait()
        return RelayAnswer(error=write.error)

    def forget(self, members: Iterable[str]) -> None:
        """These processes have ended: they do not beat any more."""
        with self._changed:
            for member in members:
                self._beats.pop(member, None)

    def flush(self) -> None:
        """Write what is held; returns when etcd has it. Raises RunError when it does not answer."""
        with self._changed:
            self._check()
            barrier = _Write()
            self._barriers.append(barrier)
            self._changed.notify_all()
        barrier.done.wait()
        if barrier.error:
            raise RunError(barrier.error)

    def _check(self) -> None:
        if self._ended is not None:
            raise RunError(self._ended)

    def _due(self) -> float | None:
        """Seconds until something is to be written; None when nothing waits."""
        if self._plain or self._barriers:
            return 0.0
        now, waits = time.monotonic(), list[float]()
        if self._held:
            everybody = all(len(said) >= self._processes for said in self._held.values())
            waits.append(0.0 if everybody else self._held_since + HELD_SHARE * self._heartbeat - now)
        if self._has_beaten:
            waits.append(self._beats_due - now)
        return max(0.0, min(waits)) if waits else None

    def _write(self) -> None:
        """The thread that writes, one transaction after the other."""
        while True:
            with self._changed:
                while (due := self._due()) != 0.0 and self._ended is None:
                    self._changed.wait(due)
                if self._ended is not None:
                    return
                values, writes = self._gather()
            try:
                if values:
                    self._writer.put_all(values)
            except RunError as failure:
                self._end(str(failure), writes)
                return
            for write in writes:
                write.done.set()

    def _gather(self) -> tuple[dict[str, str | bytes], list[_Write]]:
        """All that is to be written now, and who waits for it."""
        values: dict[str, str | bytes] = {}
        writes, self._barriers = self._barriers, []
        for name in list(self._plain)[:MOST_WRITES]:
            values[name], waiting = self._plain.pop(name)
            writes += waiting
        for folder, said in self._held.items():
            values[bundle_name(folder, self._node, next(self._numbers))] = bundled(said)
        self._held = {}
        now = time.monotonic()
        if self._has_beaten and self._beats_due <= now:
            values[bundle_name(HeartbeatKey.parent(), self._node)] = bundled(self._beats)
            self._beats_due, self._has_beaten = now + self._heartbeat, False
        return values, writes

    def _end(self, why: str, writes: Iterable[_Write] = ()) -> None:
        with self._changed:
            self._ended = self._ended or why
            waiting = [*writes, *self._barriers, *(write for _, of in self._plain.values() for write in of)]
            for write in waiting:
                write.error = why
                write.done.set()
            self._changed.notify_all()

    def close(self) -> None:
        """Serve nobody any more, and write nothing from now on, so that the run can be erased from the store."""
        self._end("the agent ends")
        self._server.close()
        self._writing.join(CLOSE_SECONDS)


def _answer(store: EtcdStore, request: Swap | Read | Delete) -> RelayAnswer:
    """What a client of the store says to a request."""
    try:
        if isinstance(request, Swap):
            return RelayAnswer([b"%d" % store.swap(request.name, request.expected, request.text)])
        if isinstance(request, Read):
            return RelayAnswer([None if text is None else text.encode() for text in store.texts(request.names)])
        store.delete_names(request.names)
        return RelayAnswer()
    except RunError as error:
        return RelayAnswer(error=str(error))
