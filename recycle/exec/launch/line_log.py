"""A file of lines that is added to while a run goes on, on a disk that may be full.

What cannot be written is kept in memory and written as soon as there is room, so that a full disk costs nothing but
memory as long as it lasts, and the file never holds a line twice, out of order, or a part of one that is continued by
another.
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 1 << 26
"""Most text that waits for room; beyond it the newest lines are dropped."""


class LineLog:
    """Opens a log for appending; the end of a line that was cut off in it is removed.

    Raises:
        OSError: it cannot be opened.

    Attributes:
        dropped: lines that had to be dropped, at `close` also those that still found no room.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._waiting = b""
        self.dropped = 0
        content = path.read_bytes()
        os.ftruncate(self._descriptor, content.rfind(b"\n") + 1)
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def append(self, line: str) -> str | None:
        """Add a line; returns why it has to wait, if it has to."""
        text = line.encode() + b"\n"
        if len(self._waiting) + len(text) > MOST_BYTES:
            self.dropped += 1
        else:
            self._waiting += text
        return self.flush()

    def flush(self) -> str | None:
        """Write what waits; returns why not all of it could be written."""
        while self._waiting:
            try:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
            except OSError as error:
                return error.strerror
        return None

    def rewind(self, count: int) -> None:
        """Keep the first `count` lines only, written or waiting."""
        size = os.fstat(self._descriptor).st_size
        whole = os.pread(self._descriptor, size, 0) + self._waiting
        end = sum(map(len, whole.splitlines(keepends=True)[:count]))
        os.ftruncate(self._descriptor, min(end, size))
        os.lseek(self._descriptor, 0, os.SEEK_END)
        self._waiting = whole[size:end]

    def close(self) -> None:
        """Give the file back."""
        self.flush()
        self.dropped += self._waiting.count(b"\n")
        os.close(self._descriptor)
