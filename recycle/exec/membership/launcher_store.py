"""The default store: the launcher's memory, and goes with it. Workers reach it over a socket (local_socket.py)."""

from __future__ import annotations

import builtins
import contextlib
import re
import socket
import threading
from collections.abc import Collection, Sequence
from typing import Any

from recycle.exec.membership.copied import FormingKeys
from recycle.exec.membership.local_socket import Closed, LocalServer, receive, send
from recycle.exec.membership.relay_messages import (
    Await,
    Delete,
    LauncherRequest,
    Put,
    Read,
    RelayAnswer,
    Swap,
)
from recycle.exec.membership.schema import Content, Decision, Folder, Key, generation_folder
from recycle.exec.membership.store import RunStore

SCHEME = "local"
"""Of the URL by which a process finds the launcher's store."""


class _Keys:
    """Names and values, safe from any thread; whoever waits for a key is woken by writes of that key only."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.posts, self.is_closed = 0, False
        self.lock = threading.RLock()
        self.posted = threading.Condition(self.lock)
        self._awaited: dict[str, threading.Condition] = {}

    def write(self, name: str, value: bytes) -> None:
        with self.lock:
            self.values[name] = value
            if (awaited := self._awaited.pop(name, None)) is not None:
                awaited.notify_all()
            if name.startswith(f"{Folder.POSTS}/"):
                self.posts += 1
                self.posted.notify_all()

    def swap(self, name: str, expected: bytes | None, value: bytes) -> bool:
        with self.lock:
            if self.values.get(name) == expected:
                self.write(name, value)
            return self.values.get(name) == value

    def read(self, names: Collection[str]) -> list[bytes | None]:
        with self.lock:
            return [self.values.get(name) for name in names]

    def delete(self, names: Collection[str]) -> None:
        with self.lock:
            for name in names:
                self.values.pop(name, None)

    def wait_for(self, name: str, seconds: float) -> None:
        with self.lock:
            if name not in self.values:
                self._awaited.setdefault(name, threading.Condition(self.lock)).wait(seconds)


class LauncherStore(RunStore):
    """The launcher's own client. Made by `host`."""

    def __init__(self, keys: _Keys, server: LocalServer) -> None:
        self._keys, self._server, self._seen = keys, server, keys.posts

    @classmethod
    def host(cls) -> tuple[LauncherStore, str]:
        """An empty store of this process, which others of this user reach at the URL; returns (store, URL)."""
        keys = _Keys()
        server = LocalServer(lambda connection: _serve(keys, connection))
        return cls(keys, server), f"{SCHEME}://{server.name}"

    def names(self) -> list[str]:
        """All keys that were written and not deleted."""
        with self._keys.lock:
            return list(self._keys.values)

    def _put(self, key: Key[Any], text: str) -> None:
        self._keys.write(key.name, text.encode())

    def _swap(self, key: Key[Any], expected: str | None, text: str) -> bool:
        return self._keys.swap(key.name, None if expected is None else expected.encode(), text.encode())

    def _texts(self, names: list[str]) -> list[str | None]:
        return [None if value is None else value.decode() for value in self._keys.read(names)]

    def _has(self, names: list[str]) -> bool:
        return None not in self._keys.read(names)

    def _below(self, folder: str, leaves: Collection[str]) -> dict[str, str]:
        texts = self._texts([f"{folder}/{leaf}" for leaf in leaves])
        return {leaf: text for leaf, text in zip(leaves, texts, strict=True) if text is not None}

    def advance(
        self,
        register: Decision[Content],
        before: Content | None,
        after: Content,
        decided: tuple[Decision[Any], Any],
        forget: Sequence[Key[Any]],
    ) -> bool:
        if not self.compare_set(register, before, after):
            return False
        key, value = decided
        self.compare_set(key, None, value)
        names = [key.name for key in forget]
        folders = tuple(name for name in names if name.endswith("/"))
        self._delete([*names, *(name for name in self.names() if name.startswith(folders))] if folders else names)
        return True

    def _await(self, name: str, seconds: float) -> None:
        self._keys.wait_for(name, seconds)

    def _delete(self, names: list[str]) -> None:
        self._keys.delete(names)

    def wait_for_change(self, seconds: float) -> bool:
        with self._keys.lock:
            self._keys.posted.wait_for(lambda: self._keys.is_closed or self._keys.posts > self._seen, seconds)
            seen, self._seen = self._seen, self._keys.posts
            return self._seen > seen

    def forget_before(self, generation: int) -> None:
        first = generation_folder(generation)
        of_generation = re.compile(rf"(?:{'|'.join(Folder)})/(generation\d+)/")
        found = {name: of_generation.match(name) for name in self.names()}
        self._delete([name for name, match in found.items() if match is not None and match[1] < first])

    def clone(self) -> LauncherStore:
        return LauncherStore(self._keys, self._server)

    def erase(self) -> None:
        """It goes with this process."""

    def close(self) -> None:
        """Serve nobody who comes later, and end the waits for a change."""
        self._server.close()
        with self._keys.lock:
            self._keys.is_closed = True
            self._keys.posted.notify_all()

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        return set()  # its sockets have none

    @property
    def torch_store(self) -> FormingKeys:
        keys = self._keys
        return FormingKeys(
            keys.values.get, lambda name, value: keys.write(name, value.encode() if isinstance(value, str) else value)
        )


def _serve(keys: _Keys, connection: socket.socket) -> None:
    """Answer a client's requests until its process has ended."""
    with connection, contextlib.suppress(Closed, OSError):
        while True:
            send(connection, RelayAnswer(_answer(keys, receive(connection, LauncherRequest))))


def _answer(keys: _Keys, request: LauncherRequest) -> list[bytes | None]:
    match request:
        case Put():
            keys.write(request.name, request.value)
        case Swap():
            expected = None if request.expected is None else request.expected.encode()
            return [b"%d" % keys.swap(request.name, expected, request.text.encode())]
        case Read():
            return keys.read(request.names)
        case Delete():
            keys.delete(request.names)
        case Await():
            keys.wait_for(request.name, request.seconds)
    return []
