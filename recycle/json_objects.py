"""JSON read strictly: into a type, or an object key by key, where a key that is there twice is an error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from recycle.errors import RecycleError

T = TypeVar("T")
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


def decoded(content: str | bytes, kind: type[T], refusal: type[RecycleError]) -> T:
    """The JSON in `content` as `kind`, a type that msgspec knows. Raises `refusal` where it is not."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise refusal(str(error).replace("`$.", "`")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(f"not valid JSON, perhaps truncated: {error}") from None
