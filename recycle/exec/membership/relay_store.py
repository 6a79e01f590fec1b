"""Clients of a store that another process of this machine serves: the launcher, or an agent's relay (relay.py).

A client of the launcher asks it for everything. What a client of the relay follows it has a copy of, which the agent
keeps current, so that it reads and waits without a request. All other keys are asked of the agent. A write in what it
follows, which only groups that form make, may reach the process's own copy a moment later.
"""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Collection
from typing import Any, ClassVar

from recycle.errors import RunError
from recycle.exec.membership.copied import CopiedKeys, FormingKeys
from recycle.exec.membership.local_socket import Closed, connect, receive, send
from recycle.exec.membership.relay_messages import (
    Await,
    Changes,
    Delete,
    Follow,
    LauncherRequest,
    Put,
    Read,
    RelayAnswer,
    Swap,
)
from recycle.exec.membership.schema import Folder, Key
from recycle.exec.membership.store import Store

FOLLOWED = (f"{Folder.GROUPS}/", f"{Folder.ORDERS}/")
LOOK_SECONDS = 0.05
"""Between two looks at a key that is waited for and not followed."""


class SocketStore(Store):
    """A client of the launcher, for one thread.

    Args:
        name: of the server's socket.

    Raises:
        RunError: the server does not answer, or is another user's.
    """

    server: ClassVar[str] = "the launcher's store"

    def __init__(self, name: str) -> None:
        self._name = name
        self._connection, self._lock = connect(name, self.server), threading.Lock()

    def _call(self, request: LauncherRequest) -> list[bytes | None]:
        try:
            with self._lock:  # a thread that an earlier generation has left behind may still form its groups
                send(self._connection, request)
                answer: RelayAnswer = receive(self._connection, RelayAnswer)
        except (OSError, Closed):
            raise RunError(f"{self.server} is gone") from None
        if answer.error:
            raise RunError(answer.error)
        return answer.values

    def _put(self, key: Key[Any], text: str) -> None:
        self._call(Put(key.name, text.encode(), key.is_bundled()))

    def _swap(self, key: Key[Any], expected: str | None, text: str) -> bool:
        return self._call(Swap(key.name, expected, text)) == [b"1"]

    def _texts(self, names: list[str]) -> list[str | None]:
        return [None if value is None else value.decode() for value in self._call(Read(names))]

    def _has(self, names: list[str]) -> bool:
        return None not in self._texts(names)

    def _below(self, folder: str, leaves: Collection[str]) -> dict[str, str]:
        texts = self._texts([f"{folder}/{leaf}" for leaf in leaves]) if leaves else []
        return {leaf: text for leaf, text in zip(leaves, texts, strict=True) if text is not None}

    def _await(self, name: str, seconds: float) -> None:
        self._call(Await(name, seconds))

    def _delete(self, names: list[str]) -> None:
        self._call(Delete(names))

    def clone(self) -> Store:
        return SocketStore(self._name)

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        return set()  # its sockets have none

    @property
    def torch_store(self) -> FormingKeys:
        store = SocketStore(self._name)
        return FormingKeys(lambda name: store._call(Read([name]))[0], store.put_name)

    def put_name(self, name: str, value: str | bytes) -> None:
        """Write a key by its name."""
        self._call(Put(name, value.encode() if isinstance(value, str) else value))


class RelayStore(SocketStore):
    """A client of the relay, for one thread.

    Args:
        name: of the relay's socket.
        keys: shared with all clones.
    """

    server = "the agent of this node"

    def __init__(self, name: str, keys: CopiedKeys) -> None:
        super().__init__(name)
        self._keys = keys

    @classmethod
    def connect(cls, name: str) -> RelayStore:
        """The first client of a process. Raises RunError when the agent does not answer."""
        keys, connection = CopiedKeys(), connect(name, cls.server)

        def follow() -> None:
            try:
                while take():
                    pass
            except (OSError, Closed):
                pass
            keys.end(f"{cls.server} is gone")

        def take() -> bool:
            changes = receive(connection, Changes).changes
            if changes is not None:
                keys.apply(changes)
            return changes is not None

        try:
            send(connection, Follow())
            take()
        except (OSError, Closed):
            raise RunError(f"{cls.server} does not answer") from None
        threading.Thread(target=follow, daemon=True).start()
        return cls(name, keys)

    def _texts(self, names: list[str]) -> list[str | None]:
        if all(name.startswith(FOLLOWED) for name in names):
            values = [self._keys.get(name) for name in names]
            return [None if value is None else value.decode() for value in values]
        return super()._texts(names)

    def _await(self, name: str, seconds: float) -> None:
        if name.startswith(FOLLOWED):
            self._keys.wait(lambda: self._keys.get(name) is not None, seconds)
            return
        deadline = time.monotonic() + seconds
        while not self._has([name]) and time.monotonic() < deadline:
            time.sleep(min(LOOK_SECONDS, seconds))

    def clone(self) -> RelayStore:
        return RelayStore(self._name, self._keys)

    @property
    def torch_store(self) -> FormingKeys:
        return FormingKeys(self._keys.get, self.clone().put_name)
