"""What a job trains on: micro-batches by iteration and global id, and the text that they are cut from.

Which tokens a micro-batch holds is a pure function of seed, iteration and global micro-batch id, so that any worker can
produce any micro-batch and a re-routed one has the same content. Text is bytes: see text.py; token files: indexed.py.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import torch

from recycle.errors import JobError
from recycle.exec.data.text import Text, text_of
from recycle.job import Job

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
