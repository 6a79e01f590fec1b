"""Your own model, data and loss: a decoder in plain PyTorch that learns to reverse a sequence of symbols.

    recycle train examples/own_model/job.toml --fault kill:1.1@10 --fault rejoin:1.1@20

job.toml names the three functions at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from recycle import Job

SEPARATOR = 0
"""Between the symbols, which count from 1, and their reverse."""


class Layer(nn.Module):
    """Causal self-attention and a feed-forward part, each behind a norm, on [rows, sequence, hidden]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mixed, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = self.mixed(self.norm(inputs)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.out(mixed.transpose(1, 2).flatten(2))
        return inputs + self.feed_forward(inputs)


class Stage(nn.Module):
    """Layers `first` to `last` - 1, behind the embedding on the first stage, before the logits on the last."""

    def __init__(self, job: Job, first: int, last: int, embeds: bool, ends: bool) -> None:
        super().__init__()
        model = job.model
        self.message_shape = (job.data.micro_batch_size, model.sequence, model.hidden)
        self.symbols = nn.Embedding(model.vocabulary, model.hidden) if embeds else None
        self.positions = nn.Embedding(model.sequence, model.hidden) if embeds else None
        self.layers = nn.ModuleList(Layer(model.hidden, model.heads) for _ in range(first, last))
        self.head = nn.Sequential(nn.LayerNorm(model.hidden), nn.Linear(model.hidden, model.vocabulary))
        if not ends:
            self.head = nn.Sequential()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.symbols is not None and self.positions is not None:
            inputs = self.symbols(inputs) + self.positions.weight
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def build(job: Job, first: int, last: int, pre_process: bool, post_process: bool) -> nn.Module:
    """The module of a stage. Its weights follow from the seed that recycle sets before: all workers have the same."""
    return Stage(job, first, last, pre_process, post_process)


def batches(job: Job) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Symbols, a separator, and the symbols from the last to the first. Only the reverse counts in the loss."""
    length, rows = job.model.sequence // 2, job.data.micro_batch_size

    def batch(iteration: int, micro_batch: int) -> dict[str, torch.Tensor]:
        number = iteration * job.shape.global_micro_batches + micro_batch
        generator = torch.Generator().manual_seed(job.data.seed + number)
        symbols = torch.randint(SEPARATOR + 1, job.model.vocabulary, (rows, length), generator=generator)
        whole = torch.cat([symbols, torch.full((rows, 1), SEPARATOR), symbols.flip(1)], dim=1)
        mask = (torch.arange(2 * length) >= length).expand(rows, -1)
        return {"tokens": whole[:, :-1].contiguous(), "labels": whole[:, 1:].contiguous(), "loss_mask": mask}

    return batch


def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the symbols that count, and how many these are."""
    mask = batch["loss_mask"]
    return nn.functional.cross_entropy(logits[mask].float(), batch["labels"][mask], reduction="sum"), mask.sum()
