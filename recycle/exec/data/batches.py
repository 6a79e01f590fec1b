"""Micro-batches by iteration and global id, and the text that they are taken from.

The tokens of a micro-batch are a pure function of seed, iteration and global micro-batch id. Token files: indexed.py.
Text is a sequence of bytes, from a file or all files of a folder, and is read on demand, so it may have any size.
"""

from __future__ import annotations

import hashlib
import sysconfig
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch

from recycle.errors import JobError, RunError, errors_as
from recycle.files import require_content
from recycle.job import Job

DEFAULT_BYTES = 4 << 20
"""Size of the default text: source code of Python's standard library."""
DIGESTED_BYTES, DIGESTED_BLOCKS = 64 << 20, 64
"""A longer text is identified by its length and this many blocks spread over it."""
BLOCK = 1 << 20
"""Bytes read at a time. Files of a folder with a NUL byte in the first block are skipped as binary."""


class Text:
    """The concatenated bytes of files, up to `most` bytes. Raises OSError if a file cannot be read."""

    def __init__(self, paths: Iterable[Path], most: int | None = None) -> None:
        self._paths = list(paths)
        sizes = [path.stat().st_size for path in self._paths]
        self._ends = list(accumulate(sizes))
        whole = self._ends[-1] if self._ends else 0
        self._length = whole if most is None else min(whole, most)

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, count: int) -> bytes:
        """Read `count` bytes from `start`; fewer at the end of the text. Raises RunError if a file has changed."""
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
                raise RunError(f"{path}: can no longer be read ({error.strerror})") from None
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
    """The text at a path; without a path, the beginning of Python's standard library.

    The path is a file, or a folder whose files are sorted by path. Files that cannot be read or have a NUL byte in
    their first MiB are skipped. Raises JobError without readable text.
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


BYTE_VALUES = 256
Batch = dict[str, torch.Tensor]
"""A micro-batch by name: "tokens" and "labels", and further inputs of the model and the loss."""


class Batches(ABC):
    @property
    @abstractmethod
    def digest(self) -> str | None:
        """Identifies the data for resumed runs. May read all data, so workers do not use it."""

    @abstractmethod
    def batch(self, iteration: int, micro_batch: int) -> Batch:
        """One micro-batch, a pure function of the iteration and the global id (k * m + j for `k.j`).

        Raises RunError if the data is invalid, such as a token outside the vocabulary.
        """

    def require_vocabulary(self) -> None:
        """Raise JobError if a token outside the vocabulary is found. May take a second or two."""
        return


class TokenRows(Batches):
    """Training data in rows of tokens, each with the token that follows it."""

    @abstractmethod
    def _rows(self, iteration: int, micro_batch: int) -> torch.Tensor:
        """Tokens of a micro-batch and the token after each row, int64 [micro_batch_size, sequence + 1]."""

    def batch(self, iteration: int, micro_batch: int) -> Batch:
        """Tokens and labels, int64 [micro_batch_size, sequence]; a label is the next token."""
        rows = self._rows(iteration, micro_batch)
        return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


class Corpus(TokenRows):
    """Batches of text, with bytes as tokens. Raises JobError if the text is too short for one row."""

    def __init__(self, text: Text, sequence: int, micro_batch_size: int, seed: int) -> None:
        if len(text) < sequence + 1:
            raise JobError(
                f"[data] path: {len(text)} bytes of text, but one row needs {sequence + 1} ([model] sequence + 1)"
            )
        self._text, self._sequence, self._size, self._seed = text, sequence, micro_batch_size, seed

    @property
    def digest(self) -> str:
        return self._text.digest

    def _rows(self, iteration: int, micro_batch: int) -> torch.Tensor:
        starts = [self._start(iteration, micro_batch, row) for row in range(self._size)]
        text = bytearray(b"".join(self._text.read(start, self._sequence + 1) for start in starts))
        return torch.frombuffer(text, dtype=torch.uint8).view(self._size, -1).long()

    def _start(self, iteration: int, micro_batch: int, row: int) -> int:
        key = f"{self._seed} {iteration} {micro_batch} {row}".encode()
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return draw % (len(self._text) - self._sequence)


def load_corpus(job: Job) -> Corpus:
    """Open the text of `[data] path`. Raises JobError if it is too short or the vocabulary smaller than a byte."""
    if job.model.vocabulary < BYTE_VALUES:
        raise JobError(f"[model] vocabulary: tokens are bytes, at least {BYTE_VALUES}, got {job.model.vocabulary}")
    return Corpus(text_of(job.data.path), job.model.sequence, job.data.micro_batch_size, job.data.seed)
