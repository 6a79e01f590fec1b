"""A process's client of the store by way of its node's agent (relay.py).

What the process follows it has a copy of, which the agent keeps current, so that it reads and waits without a request.
All other keys are asked of the agent. A write in what it follows, which only groups that form make, may reach the
process's own copy a moment later.
"""

from __future__ import annotations

import builtins
import socket
import threading
import time
from collections.abc import Collection
from typing import Any

from recycle.errors import RunError
from recycle.exec.membership.copied import CopiedKeys, FormingKeys
from recycle.exec.membership.relay_messages import (
    Changes,
    Closed,
    Delete,
    Follow,
    Put,
    Read,
    RelayAnswer,
    RelayRequest,
    Swap,
    receive,
    send,
)
from recycle.exec.membership.schema import Folder, Key
from recycle.exec.membership.store import Store

FOLLOWED = (f"{Folder.GROUPS}/", f"{Folder.ORDERS}/")
LOOK_SECONDS = 0.05
"""Between two looks at a key that is waited for and not followed."""


class RelayStore(Store):
    """A client, for one thread.

    Args:
        name: of the relay's socket.
        keys: shared with all clones.
    """

    def __init__(self, name: str, keys: CopiedKeys) -> None:
        self._name, self._keys = name, keys
        self._connection, self._lock = _connect(name), threading.Lock()

    @classmethod
    def connect(cls, name: str) -> RelayStore:
        """The first client of a process. Raises RunError when the agent does not answer."""
        keys, connection = CopiedKeys(), _connect(name)
        try:
            send(connection, Follow())
            _take(connection, keys)
        except (OSError, Closed):
            raise RunError("the agent of this node does not answer") from None
        threading.Thread(target=_follow, args=(connection, keys), daemon=True).start()
        return cls(name, keys)

    def _call(self, request: RelayRequest) -> list[str | None]:
        try:
            with self._lock:  # a thread that an earlier generation has left behind may still form its groups
                send(self._connection, request)
                answer: RelayAnswer = receive(self._connection, RelayAnswer)
        except (OSError, Closed):
            raise RunError("the agent of this node is gone") from None
        if answer.error:
            raise RunError(answer.error)
        return answer.texts

    def _put(self, key: Key[Any], text: str) -> None:
        self._call(Put(key.name, text.encode(), key.is_bundled()))

    def _swap(self, key: Key[Any], expected: str | None, text: str) -> bool:
        return self._call(Swap(key.name, expected, text)) == ["1"]

    def _texts(self, names: list[str]) -> list[str | None]:
        if all(name.startswith(FOLLOWED) for name in names):
            values = [self._keys.get(name) for name in names]
            return [None if value is None else value.decode() for value in values]
        return self._call(Read(names))

    def _has(self, names: list[str]) -> bool:
        return None not in self._texts(names)

    def _below(self, folder: str, leaves: Collection[str]) -> dict[str, str]:
        texts = self._texts([f"{folder}/{leaf}" for leaf in leaves]) if leaves else []
        return {leaf: text for leaf, text in zip(leaves, texts, strict=True) if text is not None}

    def _await(self, name: str, seconds: float) -> None:
        if name.startswith(FOLLOWED):
            self._keys.wait(lambda: self._keys.get(name) is not None, seconds)
            return
        deadline = time.monotonic() + seconds
        while not self._has([name]) and time.monotonic() < deadline:
            time.sleep(min(LOOK_SECONDS, seconds))

    def _delete(self, names: list[str]) -> None:
        self._call(Delete(names))

    def clone(self) -> RelayStore:
        return RelayStore(self._name, self._keys)

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        return set()  # its sockets have none

    @property
    def torch_store(self) -> FormingKeys:
        store = self.clone()
        return FormingKeys(self._keys, store.put_name)

    def put_name(self, name: str, value: str | bytes) -> None:
        """Write a key by its name."""
        self._call(Put(name, value.encode() if isinstance(value, str) else value))


def _connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
    except OSError as error:
        connection.close()
        raise RunError(f"the agent of this node does not answer ({error.strerror})") from None
    return connection


def _take(connection: socket.socket, keys: CopiedKeys) -> bool:
    """Take over the next changes; whether there will be more."""
    changes = receive(connection, Changes).changes
    if changes is not None:
        keys.apply(changes)
    return changes is not None


def _follow(connection: socket.socket, keys: CopiedKeys) -> None:
    try:
        while _take(connection, keys):
            pass
    except (OSError, Closed):
        pass
    keys.end("the agent of this node is gone")
