"""Megatron-LM's token files: tokens in `.bin`, and the index of sequences and documents in `.idx`.

The index holds a header; per sequence the length (int32) and the first byte in the `.bin` (int64); and the first
sequence of each document, end included (int64). Here every document is one sequence. The format follows
`megatron.core.datasets.indexed_dataset`; this writer does not keep the lengths of a large corpus in Python lists.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from recycle.errors import RecycleError
from recycle.files import create_beside, writing

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the token type, number of sequences, number of documents plus one."""
CODES: dict[type[np.generic], int] = {np.int32: 4, np.uint16: 8}
"""NumPy type -> code in the index, for the types that are written."""
UINT16_VOCABULARY = 65_500
"""Smaller vocabularies are written as uint16, as in Megatron-LM."""
_PART = 1 << 16


class TokenFiles:
    """Writer of `PREFIX.bin` and `PREFIX.idx`, which appear at the end of the `with` block, or not at all if it fails.

    `vocabulary`, the number of tokens, determines their type. Raises RecycleError if the files cannot be written.
    """

    def __init__(self, prefix: Path, vocabulary: int) -> None:
        self._prefix = prefix
        self.kind: type[np.generic] = np.uint16 if vocabulary < UINT16_VOCABULARY else np.int32
        self.documents, self.tokens = 0, 0
        self._length = 0
        self._parts, self._streams = list[Path](), list[Any]()
        self._writing = partial(writing, f"{prefix}.bin")
        try:
            with self._writing():
                for suffix in (".bin", ".idx", ".lengths"):
                    part, descriptor = create_beside(Path(f"{prefix}{suffix}"))
                    self._parts.append(part)
                    self._streams.append(os.fdopen(descriptor, "w+b"))
        except RecycleError:
            self._discard()
            raise

    def __enter__(self) -> TokenFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                with self._writing():
                    self._write_index()
                    for part, suffix in zip(self._parts, (".bin", ".idx"), strict=False):
                        os.replace(part, f"{self._prefix}{suffix}")
        finally:
            self._discard()

    def add(self, tokens: Sequence[int]) -> None:
        with self._writing():
            self._streams[0].write(np.array(tokens, dtype=self.kind).tobytes())
        self._length += len(tokens)

    def end_document(self, tokens: tuple[int, ...] = ()) -> None:
        """Append `tokens` and end the current document; an empty document is dropped, with `tokens`.

        Raises RecycleError if the document is too long for the index, or the disk is full.
        """
        if not self._length:
            return
        self.add(tokens)
        if self._length >= 2**31:
            raise RecycleError(
                f"{self._prefix}.idx: document {self.documents} has {self._length} tokens, of 2147483647 at most;"
                f" cut it into several"
            )
        with self._writing():
            self._streams[2].write(struct.pack("<i", self._length))
        self.documents += 1
        self.tokens += self._length
        self._length = 0

    def _write_index(self) -> None:
        _, index, lengths = self._streams
        index.write(HEADER.pack(MAGIC, VERSION, CODES[self.kind], self.documents, self.documents + 1))
        size = np.dtype(self.kind).itemsize
        self._copy_lengths(lambda part: index.write(part.tobytes()))
        end = 0

        def write_starts(part: Any) -> None:
            nonlocal end
            ends = end + np.cumsum(part.astype(np.int64)) * size
            index.write((ends - part.astype(np.int64) * size).tobytes())
            end = int(ends[-1])

        self._copy_lengths(write_starts)
        for first in range(0, self.documents + 1, _PART):
            index.write(np.arange(first, min(first + _PART, self.documents + 1), dtype=np.int64).tobytes())
        lengths.flush()
        for stream in self._streams[:2]:
            stream.flush()
            os.fsync(stream.fileno())

    def _copy_lengths(self, write: Callable[[Any], Any]) -> None:
        lengths = self._streams[2]
        lengths.seek(0)
        while content := lengths.read(4 * _PART):
            write(np.frombuffer(content, dtype=np.int32))

    def _discard(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):  # the close writes again what a full disk did not take
                stream.close()
        for part in self._parts:
            with contextlib.suppress(OSError):
                part.unlink()
