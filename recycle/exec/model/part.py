"""A stage's module, and how a micro-batch goes through it.

A module with `set_input_tensor` is called as Megatron-LM calls its models: with the tokens, positions and, on the last
stage, labels, of which it returns the losses. Any other is called with one tensor, the tokens on the first stage and
what the stage before returned elsewhere; the last one returns whatever the loss function takes, by default logits.

Assumes of a module that a user brings: its forward draws random numbers from torch's generator only, and changes no
buffer, since workers copy parameters and not buffers; the latter is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from recycle.errors import JobError, RunError
from recycle.exec.data.batches import Batch
from recycle.exec.model.layers.dropout import DropoutSeeds
from recycle.exec.model.layers.on_device import stay_on_device
from recycle.exec.model.layers.recompute import DEFAULT_PARTS, recompute_layers, recompute_parts
from recycle.exec.model.loss import cross_entropy, loss_sum, masked_sum, mean_loss
from recycle.exec.model.providers import NONE, Providers
from recycle.exec.model.weights import SHARED_WEIGHT, global_names, layers_of
from recycle.job import Job

MESSAGE_SHAPE = "message_shape"
"""Attribute of a module: the shape of the activations between stages, where it is not that of Megatron."""


class StageModule:
    """The module of one stage.

    Args:
        module: of the stage, on the CPU; moved to `device`.
        job: whose stage it is.
        index: the stage.
        device: that it computes on.
        providers: built the module, and compute the loss of the last stage's output; without a function for that it is
            that of losses or logits.
        tensor: tensor rank of the module, and T.

    Attributes:
        message_shape: of what stages hand on.
        names: its parameters by their name in the whole model.
    """

    def __init__(
        self,
        module: Any,
        job: Job,
        index: int,
        device: torch.device,
        providers: Providers = NONE,
        tensor: tuple[int, int] = (0, 1),
    ) -> None:
        model, rows = job.model, job.data.micro_batch_size
        stay_on_device(module)
        module.to(device)
        self.module, self._index, self._is_last = module, index, index == job.shape.stages - 1
        self._is_megatrons = hasattr(module, "set_input_tensor")
        self._loss = providers.loss or (masked_sum if self._is_megatrons else cross_entropy)
        cut = tensor[1] if job.grid.sequence_parallel else 1
        standard = (model.sequence // cut, rows, model.hidden)
        self.message_shape: tuple[int, ...] = tuple(getattr(module, MESSAGE_SHAPE, standard))
        self._positions = torch.arange(model.sequence, device=device).expand(rows, model.sequence)
        first_layer = sum(job.layers_per_stage()[:index])
        self.names = global_names(module, first_layer)
        is_provided = providers.model is not None
        if is_provided and job.shape.stages > 1 and not layers_of(module, first_layer):
            if job.shape.cut or job.planner.layout == "elastic":
                raise JobError(
                    f"[model] provider: the module of stage {index} has no layers by the name of layers, so the model"
                    ' cannot be cut anew; name a list of them so (docs/models.md), or write [planner] layout = "fixed"'
                )
            # Names of another stage's module may be the same.
            ends = (SHARED_WEIGHT,) if model.tied else ()
            self.names = {
                name if name in ends else f"stages.{index}.{name}": parameter for name, parameter in self.names.items()
            }
        config: Any = getattr(module, "config", None)
        draws = is_provided or config.hidden_dropout or config.attention_dropout
        self._dropout = DropoutSeeds(module, first_layer, model.seed, device, tensor, cut > 1) if draws else None
        if job.recompute_of(index) == "layers":
            recompute_layers(module, bool(draws))
        elif job.recompute_of(index) == "selective":
            parts = model.config.get("recompute_modules")
            recompute_parts(module, list(map(str, parts)) if isinstance(parts, list) else DEFAULT_PARTS, bool(draws))
        self._versions = {name: buffer._version for name, buffer in module.named_buffers()}
        self._modes = [(part, part.training) for part in module.modules()]

    def evaluates(self, whether: bool) -> None:
        """Switch dropout, and what else a module does only to train, off or on again."""
        for part, trains in self._modes:
            part.training = trains and not whether

    def output(self, entry: torch.Tensor | None, batch: Batch | None, iteration: int, micro_batch: int) -> torch.Tensor:
        """The forward of a micro-batch: what the next stage takes, or the micro-batch's loss. The same bits each time.

        Args:
            entry: what the stage before handed on; None on the first.
            batch: on the first and the last stage, on the device.
            micro_batch: its global id.

        Raises:
            RunError: the module returns what cannot be handed on, or changes a buffer.
        """
        with self._forward(iteration, micro_batch):
            output = self._returned(entry, batch or {})
            return mean_loss(self._loss, output, batch or {}) if self._is_last else output

    def losses(
        self, entry: torch.Tensor | None, batch: Batch, iteration: int, micro_batch: int
    ) -> tuple[torch.Tensor, Any]:
        """The forward of a micro-batch on the last stage: the sum of its losses, and how many they are."""
        with self._forward(iteration, micro_batch):
            return loss_sum(self._loss, self._returned(entry, batch), batch)

    @contextmanager
    def _forward(self, iteration: int, micro_batch: int) -> Iterator[None]:
        with self._dropout.of(iteration, micro_batch) if self._dropout is not None else nullcontext():
            yield
        if self._versions:
            self._require_same_buffers()

    def _returned(self, entry: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        return self._megatrons(entry, batch) if self._is_megatrons else self._plain(entry, batch)

    def _megatrons(self, entry: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        if entry is not None:
            self.module.set_input_tensor(entry)
        output: torch.Tensor = self.module(
            input_ids=batch.get("tokens"),
            position_ids=batch.get("position_ids", self._positions),
            attention_mask=None,
            labels=batch.get("labels") if self._is_last else None,
        )
        if entry is not None:
            # The model would keep the last micro-batch's input alive.
            self.module.set_input_tensor(None)
        return output

    def _plain(self, entry: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        output: torch.Tensor = self.module(batch["tokens"] if entry is None else entry)
        return output

    def require_message(self, output: torch.Tensor, of: torch.dtype) -> None:
        """Raise RunError unless `output` can be handed on to the next stage, of this type."""
        if not isinstance(output, torch.Tensor) or (tuple(output.shape), output.dtype) != (self.message_shape, of):
            found = f"{list(output.shape)} {output.dtype}" if isinstance(output, torch.Tensor) else type(output)
            raise RunError(
                f"[model] provider: the module of stage {self._index} returned {found}, but stages hand on"
                f" {list(self.message_shape)} {of}; an attribute {MESSAGE_SHAPE} of every stage's module states another"
                " shape"
            )

    def _require_same_buffers(self) -> None:
        """Each forward is the same, so one look will do."""
        for name, buffer in self.module.named_buffers():
            if buffer._version != self._versions.get(name, buffer._version):
                raise RunError(
                    f"[model] provider: the forward of stage {self._index} changes the buffer {name}, which workers do"
                    " not copy from each other; use a layer without running statistics"
                )
        self._versions = {}


def require_trainable(module: Any, job: Job, index: int, where: str) -> None:
    """Raise JobError, which begins with `where`, unless what a provider built for a stage can be trained."""
    if not isinstance(module, torch.nn.Module):
        raise JobError(f"{where}: it returned {type(module).__name__}, not a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise JobError(f"{where}: its module has no parameters to train; give it a layer, by [model] split")
    names = global_names(module, 0)
    for name, parameter in names.items():
        if not parameter.requires_grad:
            raise JobError(f"{where}: {name} does not require a gradient; frozen parameters are not supported")
        if not parameter.is_floating_point():
            raise JobError(f"{where}: {name} is {parameter.dtype}; parameters must be floating-point")
    if job.model.tied and index in (0, job.shape.stages - 1) and SHARED_WEIGHT not in names:
        raise JobError(f"{where}: [model] tied needs a parameter {SHARED_WEIGHT}, which its module lacks")
