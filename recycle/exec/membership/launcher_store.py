"""The default store: a torch TCPStore that lives in the launcher, and goes with it."""

from __future__ import annotations

import builtins
import contextlib
import re
import socket
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from recycle.errors import RunError, first_line
from recycle.exec.membership.schema import Content, Decision, Folder, Key, generation_folder
from recycle.exec.membership.store import RunStore

_POSTS = "posts"
"""Queue of names of what was written in the folder `posts`."""
_ABSENT = "\0"
"""A text that no key holds."""


class LauncherStore(RunStore):
    """A client of the launcher's server."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    def host(cls) -> tuple[LauncherStore, int]:
        """Start the server in this process, on a free port of the loopback interface; returns (store, port).

        It listens on a socket of ours: torch's own would listen on all interfaces, and would look up the name of
        every client in the DNS, for which all clients wait.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        port = listener.getsockname()[1]
        descriptor = listener.detach()
        server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        return cls(server), port

    @classmethod
    def connect(cls, address: str, port: int, seconds: float = 30.0) -> LauncherStore:
        """A client of the launcher's server. Raises RunError when it does not answer."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            return cls(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds)))
        except RuntimeError as error:
            raise RunError(f"the launcher's store at {address}:{port} does not answer: {first_line(error)}") from None

    def _put(self, key: Key[Any], text: str) -> None:
        self._try(partial(self._client.set, key.name, text))
        self._announce(key)

    def _swap(self, key: Key[Any], expected: str | None, text: str) -> bool:
        if self._try(partial(self._client.compare_set, key.name, expected or "", text)).decode() != text:
            return False
        self._announce(key)
        # This is answered when the announcement has arrived: the caller may be about to end its own process.
        return self._has([key.name])

    def _announce(self, key: Key[Any]) -> None:
        if key.folder is Folder.POSTS:
            self._try(partial(self._client.queue_push, _POSTS, key.name))

    def _texts(self, names: list[str]) -> list[str | None]:
        if len(names) > 1 and self._has(names):
            return [raw.decode() for raw in self._try(partial(self._client.multi_get, names))]
        # Unlike `get`, a comparison that fails returns at once for a key that is not there or was just deleted.
        texts = [self._try(partial(self._client.compare_set, name, _ABSENT, _ABSENT)).decode() for name in names]
        return [None if text == _ABSENT else text for text in texts]

    def _has(self, names: list[str]) -> bool:
        return bool(self._try(partial(self._client.check, names)))

    def _below(self, folder: str, leaves: Collection[str]) -> dict[str, str]:
        texts = self._texts([f"{folder}/{leaf}" for leaf in leaves]) if leaves else []
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
        there = self._try(self._client.list_keys) if folders else []
        self._delete([*names, *(name for name in there if name.startswith(folders))])
        return True

    def _await(self, name: str, seconds: float) -> None:
        self._within(partial(self._client.wait, [name], timedelta(seconds=seconds)))

    def _delete(self, names: list[str]) -> None:
        for name in (name for name in names if not name.endswith("/")):
            self._try(partial(self._client.delete_key, name))

    def wait_for_change(self, seconds: float) -> bool:
        self._client.set_timeout(timedelta(seconds=seconds))
        return self._within(partial(self._client.queue_pop, _POSTS))

    def forget_before(self, generation: int) -> None:
        first = generation_folder(generation)
        of_generation = re.compile(rf"(?:{'|'.join(Folder)})/(generation\d+)/")
        found = {name: of_generation.match(name) for name in self._try(self._client.list_keys)}
        self._delete([name for name, match in found.items() if match is not None and match[1] < first])

    def clone(self) -> LauncherStore:
        return LauncherStore(self._try(self._client.clone))

    def erase(self) -> None:
        """It goes with the server."""

    def close(self) -> None:
        """End the wait for a change. The server goes with its last client of this process."""
        with contextlib.suppress(RunError):  # a client of its own, because this one may be waiting
            self._try(lambda: self._client.clone().queue_push(_POSTS, ""))

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        return set()  # its connections are made before any group forms, once

    @property
    def torch_store(self) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(Folder.GROUPS.value, self._client)

    @staticmethod
    def _within(wait: Callable[[], Any]) -> bool:
        """Whether a wait ended with what it waited for, and not with its timeout."""
        import torch.distributed as dist

        try:
            wait()
        except dist.DistStoreError:
            return False
        except RuntimeError as error:
            raise RunError(f"the launcher's store is gone: {first_line(error)}") from None
        return True

    @staticmethod
    def _try(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            raise RunError(f"the launcher's store is gone: {first_line(error)}") from None
