"""What a file may cost before it is parsed: its bytes once unzipped, and the number of its values.

A value of two or three bytes costs up to three hundred in memory, and gzip packs a thousand bytes of such text into
one. A file up to `SMALL` bytes, zipped or not, is read and checked in less than 1 GB; what a larger one may hold grows
with its size.
"""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass

from recycle.errors import ScheduleError
from recycle.files import MOST_BYTES
from recycle.ir import columns

SMALL = 2**20
"""Bytes of a small file."""


@dataclass(frozen=True)
class Allowance:
    """How much of something a file may hold: in a small file, per byte of a larger one, and at most."""

    small: int
    per_byte: int
    most: int

    def of_size(self, size: int) -> int:
        """How much a file of `size` bytes may hold."""
        return self.small if size <= SMALL else min(self.most, self.per_byte * size)


UNZIPPED = Allowance(2**26, 64, MOST_BYTES)
"""Bytes. Schedules and traces have 4 to 30 in one of gzip."""
INSTRUCTIONS = Allowance(2**19, 1, 2**32)
"""Schedules have less than half an instruction in a byte of gzip."""
VALUES = {
    "JSON objects": (b"{", Allowance(2**19, 2, 2**24)),
    "JSON arrays": (b"[", Allowance(2**20, 2, 2**24)),
    "values": (b",", Allowance(2**21, 4, 2**31)),
}
"""Name -> the character that there is one of for each. A timeline has 1.2 commas in a byte of gzip."""
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
    size = len(content)
    text = _unzipped(content, UNZIPPED.of_size(size), name) if is_gzip(content) else content
    for what, (mark, allowance) in VALUES.items():
        if (count := text.count(mark)) > (allowed := allowance.of_size(size)):
            raise ScheduleError(
                f"{name}: too large: {count:,} {what}, at most {allowed:,} in {size:,} bytes: write or trace"
                " fewer iterations"
            )
    return Unpacked(text, most_instructions(size))


def most_instructions(size: int) -> int:
    """How many instructions files of `size` bytes in all may hold."""
    return min(columns.MOST_INSTRUCTIONS, INSTRUCTIONS.of_size(size))


def _unzipped(content: bytes, most: int, name: str) -> bytes:
    """The text of a gzip file, of all its members: what is appended to such a file is one more."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            text = stream.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ScheduleError(f"{name}: not a whole gzip file: {error}") from None
    if len(text) > most:
        raise ScheduleError(f"{name}: too large: unzipped it has more than {most:,} bytes")
    if is_gzip(text):
        raise ScheduleError(f"{name}: is gzip inside gzip: unzip it once")
    return text
