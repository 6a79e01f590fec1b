"""A file of lines that is added to while a run goes on, on a disk that may be full.

What cannot be written is kept in memory and written as soon as there is room, so that a full disk costs nothing but
memory as long as it lasts, and the file never holds a line twice, out of order, or a part of one that is continued by
another. Where several processes add to one file nothing is kept, because the others go on meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 1 << 26
"""Most text that waits for room; beyond it the newest lines are dropped."""
LINE_BYTES = 1 << 20
"""More than the longest line of metrics, which lists the times of all workers."""


class LineLog:
    """Opens a log for appending.

    Args:
        shared: whether other processes add to it too. Else the end of a line that was cut off in it is removed.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._shared = shared
        self._waiting = b""
        if not shared:
            os.ftruncate(self._descriptor, path.read_bytes().rfind(b"\n") + 1)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the other processes that share the log out."""
        if not self._shared:
            yield
            return
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def append(self, line: str) -> str | None:
        """Add a line; returns why it has to wait, if it has to."""
        text = line.encode() + b"\n"
        if len(self._waiting) + len(text) <= MOST_BYTES:
            self._waiting += text
        return self.flush()

    def flush(self) -> str | None:
        """Write what waits; returns why not all of it could be written."""
        while self._waiting:
            try:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
            except OSError as error:
                if self._shared:
                    self._waiting = b""
                return error.strerror
        return None

    def lines(self) -> list[bytes]:
        """All lines, written or waiting, each with its end."""
        return (os.pread(self._descriptor, self._size, 0) + self._waiting).splitlines(keepends=True)

    def last(self) -> bytes:
        """The last line that is written; empty when there is none."""
        end = os.pread(self._descriptor, LINE_BYTES, max(0, self._size - LINE_BYTES))
        return end.splitlines()[-1] if end else b""

    @property
    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def rewind(self, count: int) -> None:
        """Keep the first `count` lines only, written or waiting."""
        size, kept = self._size, b"".join(self.lines()[:count])
        os.ftruncate(self._descriptor, min(len(kept), size))
        self._waiting = kept[size:]

    def close(self) -> None:
        """Give the file back."""
        self.flush()
        os.close(self._descriptor)
