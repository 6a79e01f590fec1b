"""What clients say to the server of their store on this machine: an agent's relay, or the launcher."""

from __future__ import annotations

from msgspec import Struct

SCHEME = "agent"
"""Of the URL by which a process finds the relay."""


class Put(Struct, frozen=True, tag=True, array_like=True):
    """Write a key; with `is_bundled` a relay may write it in one with those of other processes."""

    name: str
    value: bytes
    is_bundled: bool = False


class Swap(Struct, frozen=True, tag=True, array_like=True):
    """Write a key if it holds `expected`, None: if it was never written; answered by b"1" if it now holds the text."""

    name: str
    expected: str | None
    text: str


class Read(Struct, frozen=True, tag=True, array_like=True):
    """The values of these keys."""

    names: list[str]


class Delete(Struct, frozen=True, tag=True, array_like=True):
    """Forget these keys."""

    names: list[str]


class Await(Struct, frozen=True, tag=True, array_like=True):
    """Answer when this key has been written, after so many seconds at the latest."""

    name: str
    seconds: float


class Follow(Struct, frozen=True, tag=True, array_like=True):
    """Send all keys that a process follows, and then every change: `Changes`, again and again."""


LauncherRequest = Put | Swap | Read | Delete | Await
RelayRequest = Put | Swap | Read | Delete | Follow


class RelayAnswer(Struct, frozen=True, array_like=True):
    """The answer to a request, or why there is none."""

    values: list[bytes | None] = []
    error: str = ""


class Changes(Struct, frozen=True, array_like=True):
    """Names with their new values, None where they were deleted; None in place of all when there will be no more."""

    changes: list[tuple[str, bytes | None]] | None
