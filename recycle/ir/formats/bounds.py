"""What a file may cost before it is parsed: its bytes once unzipped, and the number of its values.

A value costs up to a hundred bytes in memory, and text of one or two; gzip makes a thousandth of such text. A file up
to `SMALL` bytes, zipped or not, is read and checked in less than 1 GB; what a larger one may hold grows with its size.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from recycle.errors import ScheduleError
from recycle.files import MOST_BYTES
from recycle.ir import columns

SMALL = 2**20
"""Bytes of a file that needs no more than others of its size; the limits below are per byte of larger ones."""
UNZIPPED, INSTRUCTIONS = 64, 1
"""Bytes unzipped, and instructions. Schedules and traces have 4 to 30 bytes in one of gzip, and less than half an
instruction, so that small files may have half as many."""
VALUES = (("JSON objects", b"{", 2, 2**24), ("JSON arrays", b"[", 2, 2**24), ("values", b",", 4, 2**29))
"""Name, character that there is one of for each, how many per byte of the file, and how many in the largest file."""
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Unpacked:
    """The content of a file.

    Attributes:
        text: its bytes, unzipped.
        most: instructions that a file of this size may hold.
    """

    text: bytes
    most: int


def is_gzip(content: bytes) -> bool:
    """Whether a file that begins so is gzip."""
    return content.startswith(_GZIP)


def unpack(content: bytes, name: str) -> Unpacked:
    """The content of a file, unzipped if it is gzip, not yet parsed.

    Raises:
        ScheduleError: it is not whole, or holds too much for its size; begins with `name`.
    """
    size = max(SMALL, len(content))
    text = _unzipped(content, min(MOST_BYTES, UNZIPPED * size), name) if is_gzip(content) else content
    for what, mark, per_byte, most in VALUES:
        if (count := text.count(mark)) > (allowed := min(most, per_byte * size)):
            raise ScheduleError(
                f"{name}: too large: {count:,} {what}, at most {allowed:,} in {len(content):,} bytes: write or trace"
                " fewer iterations"
            )
    return Unpacked(text, most_instructions(len(content)))


def most_instructions(size: int) -> int:
    """How many instructions files of `size` bytes in all may hold."""
    return min(columns.MOST_INSTRUCTIONS, INSTRUCTIONS * size if size > SMALL else INSTRUCTIONS * SMALL // 2)


def _unzipped(content: bytes, most: int, name: str) -> bytes:
    stream = zlib.decompressobj(wbits=31)
    try:
        text = stream.decompress(content, most + 1)
    except zlib.error as error:
        raise ScheduleError(f"{name}: not a whole gzip file: {error}") from None
    if len(text) > most:
        raise ScheduleError(f"{name}: too large: unzipped it has more than {most:,} bytes")
    if not stream.eof:
        raise ScheduleError(f"{name}: not a whole gzip file: it ends too early")
    if is_gzip(text):
        raise ScheduleError(f"{name}: is gzip inside gzip: unzip it once")
    return text
