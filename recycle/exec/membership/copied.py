"""A copy of a part of a store's keys in this process's memory, and waits for its changes.

Whoever follows the store keeps it current: a watch of etcd (etcd_mirror.py), or what an agent passes on (relay.py).
Names are paths; the copy is indexed by folder, so that all keys of one kind are found at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue

from recycle.errors import RunError
from recycle.exec.membership.schema import Folder

KeyChange = tuple[str, bytes | None]
"""A name and its new value; None when it was deleted."""


class CopiedKeys:
    """The keys; safe from any thread.

    Attributes:
        changes: how many there were so far.

    Raises:
        RunError: from every read and wait, once `end` was called.
    """

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, bytes]] = {}
        self._versions: dict[str, int] = {}
        self._followers: list[SimpleQueue[list[KeyChange] | None]] = []
        self.changed = threading.Condition()
        self.changes = 0
        self._ended: str | None = None

    def get(self, name: str) -> bytes | None:
        """The value of `name`, None when it has none."""
        self.check()
        folder, _, leaf = name.rpartition("/")
        return self._folders.get(folder, {}).get(leaf)

    def children_of(self, folder: str) -> Mapping[str, bytes]:
        """The keys right below `folder`, by the last part of their names. It changes under the reader."""
        self.check()
        return self._folders.get(folder, {})

    def version(self, folder: str) -> int:
        """A number that is another one when keys right below `folder` have changed; 0 when there are none."""
        return self._versions.get(folder, 0)

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for `condition` to hold, which is asked after every change; whether it does within `seconds`."""
        with self.changed:
            held = self.changed.wait_for(lambda: self._ended is not None or condition(), seconds)
        self.check()
        return held

    def apply(self, changes: Iterable[KeyChange]) -> None:
        """Take changes over, in their order."""
        with self.changed:
            applied = list(changes)
            for name, value in applied:
                folder, _, leaf = name.rpartition("/")
                self.changes += 1
                if value is not None:
                    self._folders.setdefault(folder, {})[leaf] = value
                    self._versions[folder] = self.changes
                elif (within := self._folders.get(folder)) is not None:
                    within.pop(leaf, None)
                    self._versions[folder] = self.changes
                    if not within:  # most folders are of one iteration
                        del self._folders[folder], self._versions[folder]
            for follower in self._followers:
                follower.put(applied)
            self.changed.notify_all()

    def replace(self, found: Mapping[str, bytes]) -> None:
        """Hold exactly these keys."""
        with self.changed:
            gone = [name for name in self.names() if name not in found]
            self.apply([*((name, None) for name in gone), *found.items()])
            self.changes += 1
            self.changed.notify_all()

    def names(self) -> list[str]:
        """All names."""
        return [f"{folder}/{leaf}" for folder, within in self._folders.items() for leaf in within]

    def follow(self) -> SimpleQueue[list[KeyChange] | None]:
        """A queue of what is here and of all changes behind that; None in it says that the copy has ended."""
        with self.changed:
            follower: SimpleQueue[list[KeyChange] | None] = SimpleQueue()
            follower.put([(name, self.get(name)) for name in self.names()])
            self._followers.append(follower)
            return follower

    def unfollow(self, follower: SimpleQueue[list[KeyChange] | None]) -> None:
        """End a queue that `follow` gave."""
        with self.changed:
            if follower in self._followers:
                self._followers.remove(follower)

    def end(self, why: str) -> None:
        """Nothing changes any more; reads and waits fail from now on. Only the first reason counts."""
        with self.changed:
            if self._ended is None:
                self._ended = why
                for follower in self._followers:
                    follower.put(None)
            self.changed.notify_all()

    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended is not None

    def check(self) -> None:
        """Raise RunError when the copy has ended."""
        if self._ended is not None:
            raise RunError(self._ended)


class FormingKeys:
    """The part of torch's store interface that process groups form on; names lie in the folder `groups`.

    Args:
        get: reads a key by its name; None where it was not written.
        put: writes a key by its name.
    """

    def __init__(self, get: Callable[[str], bytes | None], put: Callable[[str, str | bytes], None]) -> None:
        self._get, self._put = get, put

    def set(self, key: str, value: str | bytes) -> None:
        self._put(f"{Folder.GROUPS}/{key}", value)

    def get(self, key: str) -> bytes:
        value = self._get(f"{Folder.GROUPS}/{key}")
        if value is None:
            raise RuntimeError(f"{key} was not written")
        return value

    def check(self, keys: list[str]) -> bool:
        return all(self._get(f"{Folder.GROUPS}/{key}") is not None for key in keys)
