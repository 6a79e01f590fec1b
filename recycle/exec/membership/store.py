"""What membership needs of a store."""

from __future__ import annotations

import builtins
from typing import Any, Protocol


class Store(Protocol):
    """The few operations that membership needs. Texts only; every method raises RunError when the store is gone."""

    def set(self, key: str, text: str) -> None: ...

    def read(self, key: str) -> str | None:
        """The text of `key`, None when it was never written."""

    def compare_set(self, key: str, expected: str, text: str) -> bool:
        """Write `text` if `key` holds `expected` ("" also means never written); whether it now holds `text`."""

    def wait(self, key: str, seconds: float) -> str | None:
        """The text of `key` as soon as it is written; None when it is not within `seconds`."""

    def read_all(self, keys: list[str]) -> list[str | None]:
        """The text of each key."""

    def has_all(self, keys: list[str]) -> bool:
        """Whether every key was written."""

    def post(self, key: str, text: str) -> None:
        """Write `key` and wake whoever waits for posts."""

    def wait_for_post(self) -> bool:
        """Wait for the next post, in one thread only; False when there is none for some minutes."""

    def delete(self, keys: list[str]) -> None:
        """Forget keys that nobody will read again."""

    def first(self, key: str) -> bool:
        """True for the first caller with this key, False for every later one; the first also posts it."""

    def clone(self) -> Store:
        """Another client, for another thread."""

    def delete_groups(self, generation: int) -> None:
        """Forget what process groups of the generations before this one formed on."""

    def erase(self) -> None:
        """Forget the whole run."""

    def close(self) -> None:
        """Give back what this client and its clones hold; waits end with RunError."""

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        """Where connections made later go to, which a worker must not shut."""

    @property
    def torch_store(self) -> Any:
        """The torch store behind this client, for process groups to form on."""
