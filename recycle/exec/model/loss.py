"""The loss of a micro-batch, from the output of the last stage's module.

A loss function takes (output of the last stage's module, batch) and returns (sum, count): the sum of the losses of the
unmasked tokens and their number, as Megatron-LM's loss functions do. The micro-batch's loss is sum / count, or 0 if
count is 0. An iteration's loss is their unweighted mean; `TokenMean` gives every token the same weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recycle.errors import RunError
from recycle.exec.data.batches import Batch, Batches
from recycle.job import Job

LossFunction = Callable[[Tensor, Batch], tuple[Tensor, Any]]
"""(output, batch) -> (sum, count)."""


def masked_sum(losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor | int]:
    """Sum losses [micro_batch_size, sequence] where `loss_mask` is set, or all without a mask."""
    mask = batch.get("loss_mask")
    if mask is None:
        return losses.sum(), losses.numel()
    return (losses * mask.to(losses.dtype)).sum(), mask.sum()


def cross_entropy(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor | int]:
    """Sum the cross entropy of logits [micro_batch_size, sequence, vocabulary], in fp32."""
    labels = batch["labels"]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return masked_sum(losses.view(labels.shape), batch)


def token_count(batch: Batch) -> int:
    """Return the number of tokens of a batch that count in the loss: those of `loss_mask`, or all labels."""
    mask = batch.get("loss_mask")
    return batch["labels"].numel() if mask is None else int(mask.sum())


class TokenMean:
    """The mean number of tokens that count in an iteration's micro-batches.

    With `[train] per_token_loss`, this number divides every micro-batch's sum of losses.

    """

    def __init__(self, batches: Batches, job: Job) -> None:
        self._batches, self._job = batches, job
        self._last = -1, 1.0

    def of(self, iteration: int) -> float:
        """Return the mean of an iteration; 1 / micro-batches if no token counts."""
        if self._last[0] != iteration:
            shape, count = self._job.shape, self._job.micro_batches_in(iteration)
            numbers = [k * shape.micro_batches + j for k in range(shape.pipelines) for j in range(count)]
            total = sum(token_count(self._batches.batch(iteration, number)) for number in numbers)
            self._last = iteration, max(total, 1) / len(numbers)
        return self._last[1]


def mean_loss(function: LossFunction, output: Tensor, batch: Batch, tokens: float | None = None) -> Tensor:
    """Return the loss of a micro-batch, a scalar: its sum over its count, or over `tokens` if given.

    Raises RunError as `loss_sum` does, and if `tokens` is given and the count is not that of `loss_mask`.
    """
    total, count = loss_sum(function, output, batch)
    if tokens is not None:
        if function not in (masked_sum, cross_entropy) and int(count) != token_count(batch):
            raise RunError(
                f"[train] per_token_loss: {_name(function)} counts {int(count)} tokens, and the batch's loss_mask"
                f" {token_count(batch)}; both must be equal"
            )
        return torch.div(total, tokens)
    if isinstance(count, Tensor):
        return torch.div(total, count.to(total.dtype).clamp(min=1).reshape(()))
    return torch.div(total, max(count, 1))


def loss_sum(function: LossFunction, output: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    """Sum of a micro-batch's losses, and their number. Raises RunError for any other result of the function."""
    returned = function(output, batch)
    pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not pair or not isinstance(returned[0], Tensor) or returned[0].numel() != 1:
        raise RunError(
            f"[train] loss: {_name(function)} must return a sum, a tensor of one entry, and"
            f" the count of what it is the sum of; it returned {type(returned).__name__}"
        )
    return returned[0].reshape(()), returned[1]


def _name(function: LossFunction) -> str:
    return getattr(function, "__qualname__", repr(function))
