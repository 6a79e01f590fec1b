"""The default store: it lives in the launcher, and goes with it."""

from __future__ import annotations

import builtins
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from recycle.errors import RunError


class LauncherStore:
    """The default store: a torch TCPStore that lives in the launcher."""

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
            raise RunError(f"the launcher's store at {address}:{port} does not answer: {error}") from None

    def set(self, key: str, text: str) -> None:
        self._try(lambda: self._client.set(key, text))

    def read(self, key: str) -> str | None:
        if not self.has_all([key]):
            return None
        return self._text(self._try(lambda: self._client.get(key)))

    def compare_set(self, key: str, expected: str, text: str) -> bool:
        return self._text(self._try(lambda: self._client.compare_set(key, expected, text))) == text

    def wait(self, key: str, seconds: float) -> str | None:
        import torch.distributed as dist

        try:
            self._client.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return None
        except RuntimeError as error:
            raise RunError(f"the launcher's store is gone: {error}") from None
        return self.read(key)

    def read_all(self, keys: list[str]) -> list[str | None]:
        if self.has_all(keys):
            return [self._text(raw) for raw in self._try(lambda: self._client.multi_get(keys))] if keys else []
        return [self.read(key) for key in keys]

    def has_all(self, keys: list[str]) -> bool:
        return bool(self._try(lambda: self._client.check(keys))) if keys else True

    def post(self, key: str, text: str) -> None:
        self.set(key, text)
        self._try(lambda: self._client.queue_push("posts", key))

    def wait_for_post(self) -> bool:
        import torch.distributed as dist

        try:
            self._client.queue_pop("posts")
        except dist.DistStoreError:
            return False
        except RuntimeError as error:
            raise RunError(f"the launcher's store is gone: {error}") from None
        return True

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._try(partial(self._client.delete_key, key))

    def first(self, key: str) -> bool:
        if int(self._try(lambda: self._client.add(f"{key}/claims", 1))) > 1:
            return False
        self.post(key, "1")
        self.read(key)  # answered only after the write was taken in: what the caller does next may end its process
        return True

    def clone(self) -> LauncherStore:
        return LauncherStore(self._try(self._client.clone))

    def delete_groups(self, generation: int) -> None:
        """They go with the server, too."""

    def erase(self) -> None:
        """It goes with the server."""

    def close(self) -> None:
        """The server goes with its last client of this process."""

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        return set()  # its connections are made before any group forms, once

    @property
    def torch_store(self) -> Any:
        return self._client

    @staticmethod
    def _text(raw: bytes) -> str:
        return raw.decode()

    @staticmethod
    def _try(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            raise RunError(f"the launcher's store is gone: {error}") from None
