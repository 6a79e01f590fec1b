"""JSON objects read key by key: a key that is there twice is an error, not the last one's silent win."""

from __future__ import annotations

import msgspec

from recycle.errors import RecycleError

MOST_KEYS = 2**20
"""Keys of one object: as many as a job may have workers."""


class _Key:
    """Equal to no other, so that the object keeps every key."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def entries(content: str | bytes | msgspec.Raw, refusal: type[RecycleError], where: str = "") -> dict[str, msgspec.Raw]:
    """The entries of the JSON object in `content`, their values unread.

    Args:
        where: begins the messages of `refusal`.

    Raises:
        `refusal`: a key is there twice, or there are more than `MOST_KEYS`.
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: the content is no JSON object.
    """
    seen: set[str] = set()

    def key(cls: type[_Key], text: str) -> _Key:
        if text in seen:
            raise refusal(f"{where}{text!r} is there twice: keep one of the two")
        if len(seen) == MOST_KEYS:
            raise refusal(f"{where}more than {MOST_KEYS} keys")
        seen.add(text)
        return cls(text)

    found = msgspec.json.decode(content, type=dict[_Key, msgspec.Raw], dec_hook=key)
    return {key.text: value for key, value in found.items()}
