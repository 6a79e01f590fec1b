"""What membership needs of a store: typed keys (schema.py) on top of a few operations on names and texts.

A `Store` is what every process of a run has of it, a `RunStore` what whoever coordinates has: it follows what all
others write, decides, and forgets.
"""

from __future__ import annotations

import builtins
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from recycle.exec.membership.schema import Content, Decision, Key, Note


@dataclass
class Seen:
    """What a store has seen of a folder."""

    version: int = 0
    values: dict[str, bytes] = field(default_factory=dict)


class Store(ABC):
    """A client of one run's part of a store, for one thread. Every method raises RunError when the store is gone."""

    def set(self, key: Note[Content], value: Content) -> None:
        """Write `value`. In the folder `posts` this wakes whoever waits for changes."""
        self._put(key, key.encode(value))

    def compare_set(self, key: Decision[Content], expected: Content | None, value: Content) -> bool:
        """Write `value` if `key` holds `expected` (None: if it was never written); whether it now holds `value`."""
        return self._swap(key, None if expected is None else key.encode(expected), key.encode(value))

    def claim(self, key: Decision[str]) -> bool:
        """True for the first caller with this key, False for every later one, the same client included."""
        return self.compare_set(key, None, uuid.uuid4().hex)

    def read(self, key: Key[Content]) -> Content | None:
        """The value of `key`, None when it was never written."""
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[Key[Content]]) -> list[Content | None]:
        """The value of each key."""
        texts = self._texts([key.name for key in keys]) if keys else []
        return [None if text is None else key.decode(text) for key, text in zip(keys, texts, strict=True)]

    def has_all(self, keys: Collection[Key[Any]]) -> bool:
        """Whether every key was written."""
        return not keys or self._has([key.name for key in keys])

    def answers(self, key: Key[Content], members: Collection[str]) -> dict[str, Content]:
        """Member -> the value of its key, of those members whose key was written; in the order of `members`.

        Args:
            key: with `EVERYBODY` in the member's place.
        """
        found = self._below(key.name[:-1], members)
        return {member: key.decode(found[member]) for member in members if member in found}

    def gathering(self, key: Key[Content], members: Collection[str], partly: bool = False) -> Gathering[Content]:
        """What these members write under `key`, which has `EVERYBODY` in the member's place, each of them once.

        Args:
            partly: whether it counts before all have written theirs.
        """
        return Gathering(self, key, members, partly)

    def wait(self, key: Key[Content], seconds: float) -> Content | None:
        """The value of `key` as soon as it is written; None when it is not within `seconds`."""
        self._await(key.name, seconds)
        return self.read(key)

    def delete(self, keys: Collection[Key[Any]]) -> None:
        """Forget keys that nobody will read again."""
        if keys:
            self._delete([key.name for key in keys])

    @abstractmethod
    def _put(self, key: Key[Any], text: str) -> None: ...

    @abstractmethod
    def _swap(self, key: Key[Any], expected: str | None, text: str) -> bool: ...

    @abstractmethod
    def _texts(self, names: list[str]) -> list[str | None]: ...

    @abstractmethod
    def _has(self, names: list[str]) -> bool: ...

    @abstractmethod
    def _below(self, folder: str, leaves: Collection[str]) -> Mapping[str, str]:
        """Last part of a name -> text, of those of the keys right below `folder` that were written."""

    def _come(self, folder: str, leaves: Collection[str], seen: Seen, partly: bool) -> Mapping[str, str]:
        """Last part of a name -> text, of `leaves` right below `folder`, perhaps with others, that have come since the
        last look; nothing, unless `partly`, before all have come.

        Args:
            leaves: that had not come.
            seen: in earlier looks.
        """
        is_due = partly or self._has([f"{folder}/{leaf}" for leaf in leaves])
        return self._below(folder, leaves) if is_due else {}

    @abstractmethod
    def _await(self, name: str, seconds: float) -> None: ...

    @abstractmethod
    def _delete(self, names: list[str]) -> None: ...

    @abstractmethod
    def clone(self) -> Store:
        """Another client, for another thread."""

    @property
    @abstractmethod
    def addresses(self) -> builtins.set[tuple[str, int]]:
        """Where connections made later go to, which a worker must not shut."""

    @property
    @abstractmethod
    def torch_store(self) -> Any:
        """The torch store behind this client, for process groups to form on: names lie in the folder `groups`."""


class RunStore(Store):
    """A client that follows a whole run."""

    @abstractmethod
    def advance(
        self,
        register: Decision[Content],
        before: Content | None,
        after: Content,
        decided: tuple[Decision[Any], Any],
        forget: Sequence[Key[Any]],
    ) -> bool:
        """Write `after` to the register if it holds `before`; if so write what follows from it, and forget keys.

        Args:
            decided: a decision that the register now holds, and its value.
            forget: keys that nobody will read again; one with `EVERYBODY` stands for all members' keys.

        Returns:
            whether the register now holds `after`.
        """

    @abstractmethod
    def wait_for_change(self, seconds: float) -> bool:
        """Wait for the next change of what this client follows; whether there was one. For one thread only.

        Changes since the last call count, too. On the launcher's store only writes in the folder `posts` are followed.
        """

    @abstractmethod
    def forget_before(self, generation: int) -> None:
        """Delete all keys of generations before this one, and what their process groups formed on."""

    @abstractmethod
    def clone(self) -> RunStore:
        """Another client, for another thread."""

    @abstractmethod
    def erase(self) -> None:
        """Forget the whole run."""

    @abstractmethod
    def close(self) -> None:
        """Give back what this client and its clones hold, and end their waits for a change."""


class Gathering(Generic[Content]):
    """What members write under one key, each once, as it comes: nothing is looked at or decoded twice.

    Attributes:
        members: names of all.
        texts: member -> what it wrote, of those that have come by the last look.
    """

    def __init__(self, store: Store, key: Key[Content], members: Collection[str], partly: bool) -> None:
        self._store, self._key, self._partly = store, key, partly
        self.members, self._missing = members, set(members)
        self.texts: dict[str, str] = {}
        self._seen = Seen()
        self._distinct: set[str] = set()

    def look(self) -> bool:
        """See who has come; whether all have."""
        if self._missing:
            come = self._store._come(self._key.name[:-1], self._missing, self._seen, self._partly)
            self.texts.update((member, text) for member, text in come.items() if member in self._missing)
            self._distinct.update(come.values())
            self._missing -= come.keys()
        return not self._missing

    @property
    def missing(self) -> set[str]:
        """Who had not come by the last look."""
        return self._missing

    def other_than(self, usual: Content) -> dict[str, Content]:
        """Member -> what it wrote, of those that have come, in their order, with another value than this."""
        text = self._key.encode(usual)
        if self._distinct <= {text}:
            return {}
        others = {member: self._key.decode(self.texts[member]) for member in self.members if member in self.texts}
        return {member: value for member, value in others.items() if value != usual}
