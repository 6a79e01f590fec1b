"""Text as one row of bytes: a file, or the files of a folder one after the other; read where it is asked for.

Nothing is kept in memory, so a text may be of any size, and a worker that runs no first or last stage reads none of it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from recycle.errors import JobError, RunError, errors_as
from recycle.files import require_content

DEFAULT_BYTES = 4 << 20
"""Of the source code of Python's standard library, which is trained on where a job names no text."""
DIGESTED_BYTES, DIGESTED_BLOCKS = 64 << 20, 64
"""A longer text is told from others by its length and this many blocks spread over it."""
BLOCK = 1 << 20
"""Bytes that are read at a time; and in which a NUL byte says that a file of a folder is no text."""


class Text:
    """The bytes of files, in this order.

    Args:
        paths: of the files.
        most: bytes after which the text ends; of any length when left out.

    Raises:
        OSError: a file cannot be read.
    """

    def __init__(self, paths: Iterable[Path], most: int | None = None) -> None:
        self._paths = list(paths)
        sizes = [path.stat().st_size for path in self._paths]
        self._ends = list(accumulate(sizes))
        whole = self._ends[-1] if self._ends else 0
        self._length = whole if most is None else min(whole, most)

    def __len__(self) -> int:
        """Bytes."""
        return self._length

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` on; fewer at the end of the text. Raises RunError when a file has changed."""
        parts, end = [], min(start + count, self._length)
        number = bisect_right(self._ends, start)
        while start < end:
            path, first = self._paths[number], self._ends[number - 1] if number else 0
            wanted = min(end, self._ends[number]) - start
            try:
                with path.open("rb", buffering=0) as file:
                    file.seek(start - first)
                    part = file.read(wanted)
            except OSError as error:
                raise RunError(f"{path}: cannot be read any more ({error.strerror})") from None
            if len(part) < wanted:
                raise RunError(f"{path}: is {wanted - len(part)} bytes shorter than when the run began")
            parts.append(part)
            start += wanted
            number += 1
        return b"".join(parts)

    @cached_property
    def digest(self) -> str:
        """sha256 of the bytes; above `DIGESTED_BYTES`, of the length and of `DIGESTED_BLOCKS` blocks."""
        result = hashlib.sha256()
        blocks: Iterator[int] = iter(range(0, self._length, BLOCK))
        if self._length > DIGESTED_BYTES:
            result.update(f"{self._length} ".encode())
            last = self._length - BLOCK
            blocks = (last * block // (DIGESTED_BLOCKS - 1) for block in range(DIGESTED_BLOCKS))
        for start in blocks:
            result.update(self.read(start, BLOCK))
        return result.hexdigest()


def text_of(path: str | None) -> Text:
    """The text at a path: a file, or all files of a folder in the order of their paths, but for those that cannot be
    read or have a NUL byte in their first MiB; without a path, the beginning of Python's standard library.

    Raises:
        JobError: nothing there can be read.
    """
    if path is None:
        text = Text(_readable(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))), DEFAULT_BYTES)
    elif Path(path).is_dir():
        text = Text(_readable(sorted(file for file in Path(path).rglob("*") if file.is_file())))
    else:
        try:
            with errors_as(JobError, "[data] path"):
                require_content(path, JobError)
            text = Text([Path(path)])
        except OSError as error:
            raise JobError(f"[data] path: {path} cannot be read ({error.strerror})") from None
    if not len(text):
        raise JobError(f"[data] path: no text in {path or 'the standard library of this Python'}")
    return text


def _readable(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        try:
            with path.open("rb") as file:
                if b"\0" not in file.read(BLOCK):
                    yield path
        except OSError:
            continue
