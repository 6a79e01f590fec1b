"""Megatron-LM's training data as its own loop has it: megatron-core's builder, and which rank takes which samples."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from recycle import Job
from recycle.exec.data.gpt_dataset import as_only_rank
from recycle.tokens.token_files import TokenFiles


def written(prefix: Path, documents: int, seed: int, end=99) -> Path:
    """Token files of random documents of tokens below `end`, which ends each of them."""
    random = np.random.default_rng(seed)
    with TokenFiles(prefix, end + 1) as files:
        for _ in range(documents):
            files.add(random.integers(0, end, random.integers(1, 30)).tolist())
            files.end_document((end,))
    return prefix


def training_samples(
    prefixes: list[str],
    weights: list[float] | None,
    split: str,
    seed: int,
    sequence: int,
    samples: int,
    end: int,
    mask_loss=False,
    reset_positions=False,
    reset_attention=False,
    part=0,
):
    """The training data set, or that of another part of the split, as Megatron-LM's arguments of these names make it.

    megatron-core never ends where a part of the split has no document, so there must be enough of them.
    """
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence,
        blend=(prefixes, weights),
        split=split,
        tokenizer=SimpleNamespace(eod=end, vocab_size=end + 1, unique_identifiers={}),
        reset_position_ids=reset_positions,
        reset_attention_mask=reset_attention,
        eod_mask_loss=mask_loss,
        create_attention_mask=reset_attention,
    )
    sizes = [samples if number == part else 6 for number in range(3)]
    with as_only_rank():
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[part]


def dealt_out(pipelines: int, micro_batches: int, size: int, steps: int) -> dict[tuple[int, int], list[int]]:
    """(iteration, micro-batch's global id) -> sample numbers, as the data-parallel ranks of Megatron-LM draw them.

    Each rank goes through all samples in groups of micro_batch_size x D and keeps its own part of every group; m groups
    make an iteration.
    """
    result = {}
    samples = steps * pipelines * micro_batches * size
    for rank in range(pipelines):
        groups = [range(first, first + size * pipelines) for first in range(0, samples, size * pipelines)]
        kept = [list(group[rank * size : (rank + 1) * size]) for group in groups]
        for place, numbers in enumerate(kept):
            result[place // micro_batches, rank * micro_batches + place % micro_batches] = numbers
    return result


class MegatronBatches:
    """Micro-batches of a job's "gpt-dataset", made of megatron-core's own parts alone."""

    def __init__(self, job: Job):
        shape, data, steps = job.shape, job.data, job.train.steps
        self._numbers = dealt_out(shape.pipelines, shape.micro_batches, data.micro_batch_size, steps)
        samples = shape.global_micro_batches * data.micro_batch_size * steps
        end = job.model.vocabulary - 1
        self._samples = training_samples([data.path], None, data.split, data.seed, job.model.sequence, samples, end)

    def batch(self, iteration: int, micro_batch: int) -> dict[str, torch.Tensor]:
        samples = [self._samples[number] for number in self._numbers[iteration, micro_batch]]
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels")}
