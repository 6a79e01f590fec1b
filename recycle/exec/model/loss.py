"""The loss of a micro-batch, from the output of the last stage's module.

A loss function takes (output of the last stage's module, batch) and returns (sum, count): the sum of the losses of the
unmasked tokens and their number, as Megatron-LM's loss functions do. The micro-batch's loss is sum / count, or 0 if
count is 0. An iteration's loss is the unweighted mean over its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recycle.errors import RunError
from recycle.exec.data.batches import Batch

LossFunction = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, Any]]
"""(output, batch) -> (sum, count)."""


def masked_sum(losses: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Sum losses [micro_batch_size, sequence] where `loss_mask` is set, or all without a mask."""
    mask = batch.get("loss_mask")
    if mask is None:
        return losses.sum(), losses.numel()
    return (losses * mask.to(losses.dtype)).sum(), mask.sum()


def cross_entropy(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Sum the cross entropy of logits [micro_batch_size, sequence, vocabulary], in fp32."""
    labels = batch["labels"]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return masked_sum(losses.view(labels.shape), batch)


def mean_loss(function: LossFunction, output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean loss of a micro-batch, a scalar. Raises RunError as `loss_sum` does."""
    total, count = loss_sum(function, output, batch)
    if isinstance(count, torch.Tensor):
        return torch.div(total, count.to(total.dtype).clamp(min=1).reshape(()))
    return torch.div(total, max(count, 1))


def loss_sum(function: LossFunction, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Any]:
    """Sum of a micro-batch's losses, and their number. Raises RunError for any other result of the function."""
    returned = function(output, batch)
    pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not pair or not isinstance(returned[0], torch.Tensor) or returned[0].numel() != 1:
        raise RunError(
            f"[train] loss: {getattr(function, '__qualname__', function)} must return a sum, a tensor of one entry, and"
            f" the count of what it is the sum of; it returned {type(returned).__name__}"
        )
    return returned[0].reshape(()), returned[1]
