"""What a job trains on: micro-batches by iteration and global id, and the text that they are cut from.

Which tokens a micro-batch holds is a pure function of seed, iteration and global micro-batch id, so that any worker can
produce any micro-batch and a re-routed one has the same content. Text is bytes; token files are in indexed.py.
"""

from __future__ import annotations

import hashlib
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch

from recycle.errors import JobError
from recycle.job import Job

CAP_BYTES = 4 << 20
"""Text beyond this is not read: every worker process loads the corpus itself."""
BYTE_VALUES = 256


class Batches(ABC):
    """Training data."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """By which runs can tell that they train on the same. Reads all that it is of, so that no worker asks."""

    @abstractmethod
    def _rows(self, iteration: int, micro_batch: int) -> torch.Tensor:
        """int64 [micro_batch_size, sequence + 1]: the tokens of a micro-batch with the one that follows each row."""

    def batch(self, iteration: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of one micro-batch.

        Args:
            iteration: counted from 0.
            micro_batch: global id, k * m + j for the micro-batch `k.j`.

        Returns:
            tokens and labels, int64 [micro_batch_size, sequence]; a label is the token that follows.

        Raises:
            RunError: a token is not in the vocabulary.
        """
        rows = self._rows(iteration, micro_batch)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def require_vocabulary(self) -> None:
        """Raise JobError when a token is found that is not in the vocabulary. May take a second or two."""
        return


class Corpus(Batches):
    """Text as bytes, which are below any vocabulary that `load_corpus` admits, and the batches in it.

    Args:
        text: uint8 [length], at least `sequence` + 1 long.
        sequence: tokens per row.
        micro_batch_size: rows per micro-batch.
        seed: of the choice of rows.

    Raises:
        JobError: the text is too short for one row.
    """

    def __init__(self, text: bytes, sequence: int, micro_batch_size: int, seed: int) -> None:
        if len(text) < sequence + 1:
            raise JobError(
                f"[data] path: {len(text)} bytes of text, but one row needs {sequence + 1} ([model] sequence + 1)"
            )
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._sequence = sequence
        self._size = micro_batch_size
        self._seed = seed

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self._text.numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        """Bytes of text."""
        return self._text.numel()

    def _rows(self, iteration: int, micro_batch: int) -> torch.Tensor:
        starts = [self._start(iteration, micro_batch, row) for row in range(self._size)]
        return torch.stack([self._text[start : start + self._sequence + 1] for start in starts]).long()

    def _start(self, iteration: int, micro_batch: int, row: int) -> int:
        key = f"{self._seed} {iteration} {micro_batch} {row}".encode()
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return draw % (len(self) - self._sequence)


def load_corpus(job: Job) -> Corpus:
    """The text that `[data]` names: a file, all files of a folder, or Python's standard library.

    Files are read in the order of their paths, at most `CAP_BYTES` in all; unreadable ones and those with NUL bytes
    (not text) are left out.

    Raises:
        JobError: the path does not exist or holds too little text, or the vocabulary is smaller than a byte.
    """
    if job.model.vocabulary < BYTE_VALUES:
        raise JobError(f"[model] vocabulary: tokens are bytes, at least {BYTE_VALUES}, got {job.model.vocabulary}")
    path = job.data.path
    if path is None:
        text = _read(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    elif Path(path).is_dir():
        text = _read(sorted(file for file in Path(path).rglob("*") if file.is_file()))
    else:
        try:
            with Path(path).open("rb") as file:
                text = file.read(CAP_BYTES)
        except OSError as error:
            raise JobError(f"[data] path: {path} cannot be read ({error.strerror})") from None
    if not text:
        raise JobError(f"[data] path: no text in {path or 'the standard library of this Python'}")
    return Corpus(text, job.model.sequence, job.data.micro_batch_size, job.data.seed)


def _read(files: Iterable[Path]) -> bytes:
    text = bytearray()
    for path in files:
        try:
            with path.open("rb") as file:
                part = file.read(CAP_BYTES - len(text))
        except OSError:
            continue
        if b"\0" not in part:
            text += part
        if len(text) >= CAP_BYTES:
            break
    return bytes(text)
