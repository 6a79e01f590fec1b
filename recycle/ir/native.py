"""The native schedule file: versioned JSON with the programs as text, one line per worker, readable and diffable.

    {"format": "recycle-schedule", "version": 1, "shape": {...}, "optimizer": "staggered", "failed": ["1.2"],
     "placement": null, "ties": [], "metadata": {...}, "programs": {"0.0": "0F0.0 0F0.1 ...", ...}}

`placement` is null when chunk c of rank r is on stage c * P + r, else worker -> stages. In `shape`, `cut` lists the
units of each stage where these are not P * V stages alike, and is left out else. `"buckets": N` stands behind
`ties` where the gradients of each stage are reduced in N buckets, and is left out where they are in one;
`"gathers": true` stands there where hosts gather parameters after their steps, and `"forward_only": true` in a schedule
that evaluates; in no other. This module knows the file's text and
what it must hold; `Schedule.dumps` and `Schedule.loads` turn a schedule into it and back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from recycle.errors import ScheduleError
from recycle.files import entries
from recycle.ir.columns import MOST_INSTRUCTIONS, require_few
from recycle.job.shape import Shape

FORMAT, VERSION = "recycle-schedule", 1
_SHORTEST = len("0F0 ")
"""Characters of an instruction at least, with the blank behind it."""
_MOST_BYTES_BESIDE = 2**25
"""Bytes of all but the programs: more than the placement of a million workers. In memory, small values take many times
their text."""


class NativeFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a file holds, in its own words: `shape` by the names of `Shape`, workers as text."""

    format: str = FORMAT
    version: int = VERSION
    shape: dict[str, int | list[int]]
    optimizer: Literal["staggered", "barrier"] = "staggered"
    failed: list[str] = []
    placement: dict[str, list[int]] | None = None
    ties: list[list[int]] = []
    buckets: int = 1
    gathers: bool = False
    forward_only: bool = False
    metadata: dict[str, Any] = {}
    programs: dict[str, str]


def encode(file: NativeFile, programs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The file's text in parts, with these programs in place of its own: (worker, text), so that one is held at a time.

    Raises:
        ScheduleError: the metadata holds what JSON cannot.
    """
    head = {key: value for key, value in msgspec.structs.asdict(file).items() if key != "programs"}
    if file.buckets == 1:
        del head["buckets"]  # who knows no buckets reads the file too
    for flag in ("gathers", "forward_only"):
        if not head[flag]:
            del head[flag]
    try:
        lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}," for key, value in head.items()]
    except (TypeError, ValueError, RecursionError) as error:
        raise ScheduleError(f"metadata: only finite JSON values can be written ({error})") from None
    yield "{\n" + "\n".join(lines) + '\n  "programs": {\n'
    between = ""
    for worker, text in programs:
        yield f"{between}    {json.dumps(worker)}: {json.dumps(text)}"
        between = ",\n"
    yield "\n  }\n}\n"


def decode(text: str | bytes, most: int | None = None) -> NativeFile:
    """What `text` holds; the programs in it are unread. Raises ScheduleError, also for over `most` instructions."""
    try:
        head = entries(text, ScheduleError)
        version = _value(head, "version")
        if _value(head, "format") != FORMAT:
            raise ScheduleError(f'is not a schedule: "format" must be "{FORMAT}"')
        if version != VERSION:
            raise ScheduleError(f"version {version!r} is not known; this recycle reads version {VERSION}")
        _refuse_ambiguous_or_bloated(head)
        file = msgspec.json.decode(text, type=NativeFile)
    except msgspec.ValidationError as error:
        raise ScheduleError(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ScheduleError(f"not valid JSON, perhaps truncated: {error}") from None
    unknown = set(file.shape) - set(Shape.__slots__)
    if unknown:
        raise ScheduleError(f"shape: unknown key {sorted(unknown)[0]!r}; known are {', '.join(Shape.__slots__)}")
    missing = {"pipelines", "ranks", "micro_batches"} - set(file.shape)
    if missing:
        raise ScheduleError(f"shape: {sorted(missing)[0]} is missing")
    if sum(map(len, file.programs.values())) > _SHORTEST * (MOST_INSTRUCTIONS if most is None else most):
        require_few(sum(map(_words, file.programs.values())), "programs: ", most)
    return file


def _words(text: str) -> int:
    """How many words there are, without making them."""
    if text.isascii() and "  " not in text and text.isprintable():
        return text.strip().count(" ") + 1
    return sum(1 for _ in re.finditer(r"\S+", text))


def _value(head: dict[str, msgspec.Raw], name: str) -> Any:
    try:
        return msgspec.json.decode(head.get(name, b"null"))
    except msgspec.ValidationError as error:
        raise ScheduleError(f"{name}: {error}") from None


def _refuse_ambiguous_or_bloated(head: dict[str, msgspec.Raw]) -> None:
    """Raise ScheduleError when an object has a key twice, or when all but the programs is larger than any job's."""
    beside = {name: len(memoryview(value)) for name, value in head.items() if name != "programs"}
    if sum(beside.values()) > _MOST_BYTES_BESIDE:
        largest = max(beside, key=beside.__getitem__)
        raise ScheduleError(
            f"{largest}: {beside[largest]} bytes; all but the programs may take {_MOST_BYTES_BESIDE} bytes together"
        )
    for name, value in head.items():
        if memoryview(value)[:1].tobytes() == b"{":
            entries(value, ScheduleError, f"{name}: ")


def recognises(content: bytes) -> bool:
    """Whether a file that begins so is a native schedule file."""
    return f'"{FORMAT}"'.encode() in content[:4096]
