"""What a job trains on: micro-batches by iteration and global id, and the text that they are cut from.

Which tokens a micro-batch holds is a pure function of seed, iteration and global micro-batch id, so that any worker can
produce any micro-batch and a re-routed one has the same content. Token files: indexed.py.

Text is one row of bytes: a file, or the files of a folder one after the other; read where it is asked for. Nothing is
kept in memory, so a text may be of any size, and a worker that runs no first or last stage reads none of it.
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


BYTE_VALUES = 256
Batch = dict[str, torch.Tensor]
"""A micro-batch by the names of its parts: "tokens" and "labels", and what else the model and the loss want."""


class Batches(ABC):
    """Training data."""

    @property
    @abstractmethod
    def digest(self) -> str | None:
        """By which runs can tell that they train on the same. Reads all that it is of, so that no worker asks."""

    @abstractmethod
    def batch(self, iteration: int, micro_batch: int) -> Batch:
        """One micro-batch, a function of nothing but these two.

        Args:
            iteration: counted from 0.
            micro_batch: global id, k * m + j for the micro-batch `k.j`.

        Raises:
            RunError: it cannot be used, as when a token is not in the vocabulary.
        """

    def require_vocabulary(self) -> None:
        """Raise JobError when a token is found that is not in the vocabulary. May take a second or two."""
        return


class TokenRows(Batches):
    """Training data in rows of tokens, each with the one that follows it."""

    @abstractmethod
    def _rows(self, iteration: int, micro_batch: int) -> torch.Tensor:
        """int64 [micro_batch_size, sequence + 1]: the tokens of a micro-batch with the one that follows each row."""

    def batch(self, iteration: int, micro_batch: int) -> Batch:
        """Tokens and labels, int64 [micro_batch_size, sequence]; a label is the token that follows."""
        rows = self._rows(iteration, micro_batch)
        return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


class Corpus(TokenRows):
    """Text as bytes, which are below any vocabulary that `load_corpus` admits, and the batches in it.

    Args:
        text: at least `sequence` + 1 bytes.
        sequence: tokens per row.
        micro_batch_size: rows per micro-batch.
        seed: of the choice of rows.

    Raises:
        JobError: the text is too short for one row.
    """

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
    """The text that `[data] path` names, as `text_of` finds it.

    Raises:
        JobError: the path does not exist or holds too little text, or the vocabulary is smaller than a byte.
    """
    if job.model.vocabulary < BYTE_VALUES:
        raise JobError(f"[model] vocabulary: tokens are bytes, at least {BYTE_VALUES}, got {job.model.vocabulary}")
    return Corpus(text_of(job.data.path), job.model.sequence, job.data.micro_batch_size, job.data.seed)
