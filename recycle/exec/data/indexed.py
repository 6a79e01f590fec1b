"""Token files of Megatron-LM: a `.bin` of tokens and an `.idx` of its sequences, by megatron-core's IndexedDataset.

The concatenated sequences are cut into rows of `sequence` tokens and the following label, as in GPTDataset. Each epoch
takes every row once, in an order drawn from (seed, epoch). A worker reads only its rows. Limits: documents are not
shuffled before they are cut, every token counts in the loss, one file, no blend.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recycle.errors import JobError, RunError, errors_as, first_line
from recycle.exec.data.batches import TokenRows
from recycle.files import require_content
from recycle.job import Job
from recycle.tokens.token_files import HEADER, MAGIC, VERSION

SCANNED_BLOCKS = 256
"""Most blocks of tokens checked against the vocabulary before a run, spread over the file."""
_BLOCK = 1 << 20
_TYPES = 8
"""Number of token types with codes in megatron-core, from 1."""
_ROUNDS = 4


class IndexedRows(TokenRows):
    """Micro-batches from the token file of `[data] path`. Raises JobError if the files are incomplete or too short."""

    def __init__(self, job: Job) -> None:
        assert job.data.path is not None, "Job.validate requires it"
        prefix, sequence = job.data.path, job.model.sequence
        self._prefix, self._sequence, self._size = prefix, sequence, job.data.micro_batch_size
        self._job, self._vocabulary = job, job.model.vocabulary
        self._seed = job.data.seed
        self._dataset = open_indexed(prefix)
        index = self._dataset.index
        tokens = Path(f"{prefix}.bin").stat().st_size // index.dtype_size
        self.rows = (tokens - 1) // sequence
        if self.rows < 1:
            raise JobError(
                f"[data] path: {prefix}.bin holds {tokens} tokens, but one row needs {sequence + 1} ([model] sequence"
                f" + 1)"
            )
        self._tokens = tokens

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self._dataset.index.bin_buffer).hexdigest() + f"-{self._tokens}"

    def _rows(self, iteration: int, micro_batch: int) -> torch.Tensor:
        job = self._job
        pipeline, index = divmod(micro_batch, job.shape.micro_batches)
        place = pipeline * job.micro_batches_in(iteration) + index
        first = job.sequences_before(iteration) + place * self._size
        rows = np.stack([self._row(first + place) for place in range(self._size)])
        if rows.max() >= self._vocabulary or rows.min() < 0:
            raise RunError(
                f"{self._prefix}.bin: iteration {iteration}, micro-batch {micro_batch} holds token {rows.max()};"
                f" [model] vocabulary is {self._vocabulary}"
            )
        return torch.from_numpy(rows)

    def row_of(self, sample: int) -> int:
        """The row of a sample, counted over the whole run."""
        epoch, place = divmod(sample, self.rows)
        return _permuted(place, self.rows, f"{self._seed} {epoch}")

    def require_vocabulary(self) -> None:
        """Raise JobError if a token of the file is outside the vocabulary; checks at most `SCANNED_BLOCKS`."""
        require_tokens(self._prefix, self._dataset, self._vocabulary)

    def _row(self, sample: int) -> np.ndarray[Any, Any]:
        index, first = self._dataset.index, self.row_of(sample) * self._sequence
        row = self._dataset.bin_reader.read(index.dtype, self._sequence + 1, first * index.dtype_size)
        return np.asarray(row, dtype=np.int64)


def require_tokens(prefix: str, dataset: Any, vocabulary: int) -> None:
    """Raise JobError if a token of a file is outside the vocabulary; checks at most `SCANNED_BLOCKS`."""
    tokens = np.memmap(f"{prefix}.bin", dtype=dataset.index.dtype, mode="r")
    blocks = -(-len(tokens) // _BLOCK)
    for block in sorted({blocks - 1, *(place * blocks // SCANNED_BLOCKS for place in range(SCANNED_BLOCKS))}):
        part = tokens[block * _BLOCK : (block + 1) * _BLOCK]
        if part.max() >= vocabulary or part.min() < 0:
            place = int(np.flatnonzero((part >= vocabulary) | (part < 0))[0])
            raise JobError(
                f"[model] vocabulary: {vocabulary}, but token {block * _BLOCK + place} of {prefix}.bin is {part[place]}"
                "; give the size of its tokenizer"
            )


def open_indexed(prefix: str) -> Any:
    """Check the files and open them with megatron-core. Raises JobError if they are invalid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset

    sizes, heads = {}, {}
    for suffix in (".idx", ".bin"):
        try:
            with errors_as(JobError, "[data] path"):
                require_content(prefix + suffix, JobError)
            with Path(prefix + suffix).open("rb") as file:
                heads[suffix], sizes[suffix] = file.read(HEADER.size), file.seek(0, 2)
        except OSError as error:
            hint = "; give the path without .bin or .idx" if prefix.endswith((".bin", ".idx")) else ""
            raise JobError(f"[data] path: {prefix}{suffix} cannot be read ({error.strerror}){hint}") from None
        if not sizes[suffix]:
            raise JobError(f"[data] path: {prefix}{suffix} is empty")
    # Checked first, because a reader that fails half-way reports it again when it is collected.
    reason = _why_not_whole(Path(f"{prefix}.idx"), heads[".idx"], sizes[".idx"])
    if reason is not None:
        raise JobError(f"[data] path: {prefix}.idx is not a complete index of megatron-core ({reason})")
    try:
        dataset = IndexedDataset(prefix)
    except (AssertionError, ValueError, IndexError, struct.error, OverflowError) as error:
        reason = first_line(error)
        raise JobError(f"[data] path: {prefix}.idx is not a complete index of megatron-core ({reason})") from None
    index = dataset.index
    if not np.issubdtype(index.dtype, np.integer):
        raise JobError(f"[data] path: {prefix}.bin holds {np.dtype(index.dtype)} values, not tokens")
    end = 0
    for first in range(0, len(index.sequence_pointers), _BLOCK):
        starts = index.sequence_pointers[first : first + _BLOCK]
        lengths = index.sequence_lengths[first : first + _BLOCK].astype(np.int64) * index.dtype_size
        ends = end + np.cumsum(lengths)
        if (lengths < 0).any() or not np.array_equal(starts, ends - lengths):
            raise JobError(f"[data] path: {prefix}.idx: its sequences do not follow each other in {prefix}.bin")
        end = int(ends[-1])
    if end != sizes[".bin"]:
        raise JobError(
            f"[data] path: {prefix}.bin has {sizes['.bin']} bytes, its index describes {end}: one of the files is"
            f" incomplete, or belongs to another data set"
        )
    return dataset


def _why_not_whole(path: Path, head: bytes, size: int) -> str | None:
    magic, version, code, sequences, documents = HEADER.unpack(head.ljust(HEADER.size, b"\0"))
    if magic != MAGIC:
        return f"it does not begin with {MAGIC[:7].decode()}"
    if version != VERSION:
        return f"it has version {version}, and only {VERSION} can be read"
    if code not in range(1, _TYPES + 1):
        return f"its tokens have type {code}; types are 1 to {_TYPES}"
    # An int32 length and an int64 pointer per sequence, an int64 index per document and one for the end.
    end = HEADER.size + 12 * sequences + 8 * documents
    if not sequences or not documents or size < end:
        return f"it has {size} bytes, but {sequences} sequences and {documents} documents take {end}"
    with path.open("rb") as file:
        file.seek(end - 8)
        last = int.from_bytes(file.read(8), "little", signed=True)
    if last != sequences:
        return f"its documents end at sequence {last}, but it has {sequences}"
    return None


def _permuted(place: int, count: int, key: str) -> int:
    """Position of `place` in a permutation of 0 .. count - 1 drawn by `key`, without storing it.

    An iterated Feistel network. Source: Black and Rogaway, Ciphers with arbitrary finite domains, 2002.
    """
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        high, low = place >> half, place & mask
        for turn in range(_ROUNDS):
            drawn = hashlib.blake2b(f"{key} {turn} {low}".encode(), digest_size=8).digest()
            high, low = low, high ^ (int.from_bytes(drawn, "little") & mask)
        place = high << half | low
        if place < count:
            return place
