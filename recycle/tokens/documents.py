"""Documents in files: one in each line of JSON, or the whole of a text; in pieces, so that memory stays bounded."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from recycle.errors import JobError
from recycle.files import require_content

LINES = (".jsonl", ".ndjson")
"""Suffixes of files with a JSON object per line; also with `.gz` behind them. All else is text."""
PIECE_BYTES = 1 << 18
"""A text is cut into pieces of at most this, at the end of a line where there is one."""
MOST_LINE_BYTES = 1 << 26


class Piece(NamedTuple):
    """Some text of a document.

    Attributes:
        text: of it.
        ends: whether the document ends with it.
        read: bytes of the file, as it lies on the disk, that are read so far.
    """

    text: str
    ends: bool
    read: int


def documents(path: Path, key: str) -> Iterator[Piece]:
    """The documents of a file, piece by piece.

    Args:
        key: of the text in each line's object.

    Raises:
        JobError: the file cannot be read, or holds something else; names the line or the byte.
    """
    suffixes = path.suffixes
    is_packed = suffixes[-1:] == [".gz"]
    is_lines = (suffixes[-2:-1] if is_packed else suffixes[-1:]) in [[suffix] for suffix in LINES]
    try:
        require_content(path, JobError)
        with path.open("rb") as file, ExitStack() as unpacked:
            stream: Any = unpacked.enter_context(gzip.open(file)) if is_packed else file
            yield from (_lines(path, stream, file, key) if is_lines else _text(path, stream, file))
    except (OSError, EOFError) as error:  # gzip's own errors have no strerror
        raise JobError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _lines(path: Path, stream: IO[bytes], file: IO[bytes], key: str) -> Iterator[Piece]:
    line_type: Any = msgspec.defstruct("Line", [("text", str, msgspec.field(name=key))])
    decoder = msgspec.json.Decoder(line_type)
    number = 0
    while line := stream.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise JobError(f"{path}: line {number} is longer than {MOST_LINE_BYTES >> 20} MiB; cut it into documents")
        if line.isspace():
            continue
        try:
            found = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise JobError(
                f'{path}: line {number}: {error}; each is an object with a text under "{key}", or what --key names'
            ) from None
        yield Piece(found.text, True, file.tell())


def _text(path: Path, stream: IO[bytes], file: IO[bytes]) -> Iterator[Piece]:
    left, start = b"", 0
    while True:
        block = stream.read(PIECE_BYTES - len(left))
        content = left + block
        cut = _cut(content) if block else len(content)
        try:
            text = content[:cut].decode("utf-8")
        except UnicodeDecodeError as error:
            raise JobError(f"{path}: is not UTF-8 text (byte {start + error.start})") from None
        yield Piece(text, not block, file.tell())
        if not block:
            return
        left, start = content[cut:], start + cut


def _cut(content: bytes) -> int:
    """Where to cut: behind the last line end before which and behind which words end; or behind a whole character."""
    end = content.rfind(b"\n", 0, len(content) - 1)
    while end >= 0:
        if not content[end + 1 : end + 2].isspace():
            return end + 1
        end = content.rfind(b"\n", 0, end)
    for back in range(1, min(4, len(content)) + 1):
        first = content[-back]
        if first & 0xC0 != 0x80:  # the first byte of a character says how many it has
            length = 1 + (first >= 0xC0) + (first >= 0xE0) + (first >= 0xF0)
            return len(content) - (back if length > back else 0)
    return len(content)
