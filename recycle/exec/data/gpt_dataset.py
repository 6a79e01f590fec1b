"""Megatron-LM's samples: megatron-core's GPTDataset and its blends, in the order of Megatron-LM's training loop.

The order depends on the seed and the number of samples of the run, so the digest includes both. An iteration runs the
samples after those of earlier iterations. In it micro-batch j of pipeline k has `micro_batch_size` samples, from offset
(j * D + k) * micro_batch_size. This is the order of Megatron-LM's sampler for D data-parallel ranks.

GPTDataset keeps its index in a cache shared by all processes, which the first process builds under a lock. Only the
part of the split that is read is indexed, because megatron-core counts epochs of an empty part forever.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from recycle.errors import JobError, RunError, first_line
from recycle.exec.data.batches import Batch, Batches
from recycle.exec.data.indexed import open_indexed, require_tokens
from recycle.exec.data.samples import samples_of
from recycle.job import Job

TRAIN, VALIDATION = 0, 1
"""Indices of the parts of a split."""
_PURPOSES = ("train on", "validate with")
LOCK_SECONDS = 1800.0
"""Time limit of the wait for another process's index, which takes minutes for a trillion tokens."""


class GptDatasetBatches(Batches):
    """Micro-batches of megatron-core's GPTDataset, or of a blend; of the job's number of iterations by default.

    Raises JobError if a file cannot be read or is too small, or the cache cannot be written.
    """

    def __init__(self, job: Job, part: int = TRAIN, iterations: int | None = None) -> None:
        self._part = part
        self._job, data = job, job.data
        self._prefixes = [data.path] if data.path is not None else list(data.paths or ())
        self._opened = [open_indexed(prefix) for prefix in self._prefixes]
        self.samples = samples_of(job, iterations)
        self._dataset = self._build()

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that determines the order: keys of `[data]`, number of samples, files' indices."""
        data, result = self._job.data, hashlib.sha256()
        stated = (data.weights, data.split, data.seed, self.samples, self._job.model.sequence, data.end_of_document)
        documents = (data.mask_loss, data.reset_positions, *(("reset_attention",) if data.reset_attention else ()))
        result.update(repr((stated, *documents)).encode())
        for prefix, dataset in zip(self._prefixes, self._opened, strict=True):
            result.update(hashlib.sha256(dataset.index.bin_buffer).digest())
            result.update(f"{Path(f'{prefix}.bin').stat().st_size} ".encode())
        return result.hexdigest()

    def batch(self, iteration: int, micro_batch: int) -> Batch:
        """Tokens, labels, and optional `loss_mask` and `position_ids`, of [micro_batch_size, sequence].

        With `reset_attention` also `attention_mask`, see `CausalAttention`.

        Raises RunError if the samples are used up, or a token is outside the vocabulary.
        """
        job, size = self._job, self._job.data.micro_batch_size
        pipeline, number = divmod(micro_batch, job.shape.micro_batches)
        first = job.sequences_before(iteration) + (number * job.shape.pipelines + pipeline) * size
        if first + size > len(self._dataset):
            raise RunError(
                f"[data] samples: iteration {iteration} needs sample {first + size - 1} of {len(self._dataset)}; give"
                f" enough samples for all steps"
            )
        samples = [self._dataset[first + row] for row in range(size)]
        names = ["tokens", "labels"]
        names += ["loss_mask"] * job.data.mask_loss + ["position_ids"] * job.data.reset_positions
        names += ["attention_mask"] * job.data.reset_attention
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in names}
        most = max(int(batch[name].max()) for name in ("tokens", "labels"))
        if most >= job.model.vocabulary:
            raise RunError(
                f"[data] paths: iteration {iteration}, micro-batch {micro_batch} holds token {most}; [model] vocabulary"
                f" is {job.model.vocabulary}"
            )
        return batch

    def require_vocabulary(self) -> None:
        """Raise JobError if a token of the files is outside the vocabulary; samples large files."""
        for prefix, dataset in zip(self._prefixes, self._opened, strict=True):
            require_tokens(prefix, dataset, self._job.model.vocabulary)

    def _build(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

        job, data = self._job, self._job.data
        cache = _cache_directory(job)
        end = data.end_of_document
        config = GPTDatasetConfig(
            random_seed=data.seed,
            sequence_length=job.model.sequence,
            blend=(self._prefixes, data.weights),
            split=data.split,
            path_to_cache=str(cache),
            tokenizer=SimpleNamespace(
                eod=end, vocab_size=job.model.vocabulary, unique_identifiers={"end_of_document": end}
            ),
            reset_position_ids=data.reset_positions,
            reset_attention_mask=data.reset_attention,
            eod_mask_loss=data.mask_loss,
            create_attention_mask=data.reset_attention,
        )
        part = self._part
        config.split_matrix = [split if number == part else None for number, split in enumerate(config.split_matrix)]
        shares = config.split_matrix[part] or (0.0, 0.0)
        for prefix, dataset in zip(self._prefixes, self._opened, strict=True):
            begin, end = (round(share * len(dataset)) for share in shares)
            if not dataset.sequence_lengths[begin:end].sum():
                raise JobError(f'[data] split: "{data.split}" leaves no token of {prefix} to {_PURPOSES[part]}')
        sizes = [self.samples if number == part else 1 for number in range(3)]
        try:
            with _locked(cache), _quiet(), as_only_rank():
                built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[part]
        except (AssertionError, IndexError, ValueError, RuntimeError, OSError) as error:
            reason = f"megatron-core cannot make a GPTDataset of {self._names()} ({first_line(error)})"
            raise JobError(f"[data] paths: {reason}") from None
        if len(built) < self.samples:
            raise JobError(
                f"[data] paths: {self._names()} hold {len(built)} samples, the run needs {self.samples}; with weights,"
                f" files are read as often as needed"
            )
        return built

    def _names(self) -> str:
        return ", ".join(self._prefixes)


def _cache_directory(job: Job) -> Path:
    first = job.data.path if job.data.path is not None else (job.data.paths or [""])[0]
    folder = Path(job.data.cache) if job.data.cache is not None else Path(first).parent / "cache"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"[data] cache: {folder} cannot be written ({error.strerror}); name another folder") from None
    if not os.access(folder, os.W_OK):
        raise JobError(f"[data] cache: {folder} may not be written to; name another folder")
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path, deadline = folder / ".lock", time.monotonic() + LOCK_SECONDS
    try:  # in a folder that others can write to, it may be a link to any file of this user's
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise JobError(f"[data] cache: {path} cannot be opened ({error.strerror}); name another folder") from None
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise JobError(
                        f"[data] cache: another process has locked {folder} for {LOCK_SECONDS:g} s; end it, or name"
                        " another folder"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("megatron.core.datasets")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def as_only_rank() -> Iterator[None]:
    """Make torch.distributed report rank 0 to megatron-core's blend without a default group.

    A default group could not be destroyed without clearing the table that registers the tensor group.
    """
    if torch.distributed.is_initialized():
        yield
        return
    get_rank = torch.distributed.get_rank
    torch.distributed.get_rank = lambda group=None: 0
    try:
        yield
    finally:
        torch.distributed.get_rank = get_rank
