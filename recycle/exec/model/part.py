"""The module of a stage: its calls, its dropout seeds and its recomputation.

A module with `set_input_tensor` is called as Megatron-LM calls its models. Any other module takes one tensor: the
tokens on the first stage, or the output of the previous stage; the last stage returns what the loss function takes.

Dropout: the embedding and every layer start each micro-batch from their own state of the device's random generator. A
micro-batch thus draws the same numbers on every worker, for any number of stages, and on recomputation. Each tensor
rank draws separately for its attention heads and its part of the sequences, so losses depend on T.

Recomputation: of whole layers ("layers", Megatron's full recomputation), or of the modules in `[model.config]
recompute_modules` ("selective"). Megatron's "layernorm" and "moe_act" are not supported.

A user's module must draw from torch's generator only and must not change buffers, which the first forward checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from recycle.errors import JobError, RunError
from recycle.exec.data.batches import Batch
from recycle.exec.model.fused import stay_on_device
from recycle.exec.model.loss import cross_entropy, loss_sum, masked_sum, mean_loss
from recycle.exec.model.providers import Providers
from recycle.exec.model.stage import PRECISIONS
from recycle.exec.model.weights import LAYERS, SHARED_WEIGHT, global_names, layers_of
from recycle.exec.transport.base import MessageSpec
from recycle.job import Job
from recycle.megatron_versions import content_version


class DropoutSeeds:
    """Seeds the random draws of one model part.

    Args:
        first_layer: number of the part's first layer in the whole model.
        tensor: tensor rank of the part, and T.
        is_cut: each tensor rank has a part of the sequences.
    """

    def __init__(
        self,
        part: Any,
        first_layer: int,
        seed: int,
        device: torch.device,
        tensor: tuple[int, int],
        is_cut: bool = False,
    ) -> None:
        self._seed, self._device = seed, device
        self._of = 0, 0  # iteration and micro-batch
        cuda = device.type == "cuda"
        self._generator = torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
        # Modules outside of layers and the embedding draw from the state of the part.
        own = f" {tensor[0]}" if is_cut else ""
        part.register_forward_pre_hook(self._start(f"part {first_layer}{own}"))
        embedding = getattr(part, "embedding", None)
        if embedding is not None:
            embedding.register_forward_pre_hook(self._start(f"embedding{own}"))
        config: Any = getattr(part, "config", None)
        for name, layer in layers_of(part, first_layer).values():
            number = name.rpartition(".")[2]
            layer.register_forward_pre_hook(self._start(f"layer {number}{own}"))
            attention = getattr(getattr(layer, "self_attention", None), "core_attention", None)
            if tensor[1] > 1 and attention is not None and config is not None and config.attention_dropout:
                attention.register_forward_pre_hook(self._start(f"attention {number} {tensor[0]}"))
                attention.register_forward_hook(self._start(f"behind attention {number}{own}"))

    @contextmanager
    def seeded(self, iteration: int, micro_batch: int) -> Iterator[None]:
        """Seed forwards inside the block for this iteration and micro-batch (global id)."""
        self._of = iteration, micro_batch
        before = self._generator.get_state()
        try:
            yield
        finally:
            self._generator.set_state(before)

    def _start(self, where: str) -> Callable[..., None]:
        def start(*_: Any) -> None:
            iteration, micro_batch = self._of
            key = f"dropout {self._seed} {iteration} {micro_batch} {where}".encode()
            drawn = hashlib.blake2b(key, digest_size=8).digest()
            self._generator.manual_seed(int.from_bytes(drawn, "little") >> 1)

        return start

    def repeatable(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` for the micro-batch that runs now, to be run again while another one does."""
        of = self._of

        def run(*arguments: Any, **named: Any) -> Any:
            before, self._of = self._of, of
            try:
                return forward(*arguments, **named)
            finally:
                self._of = before

        return run


PARTS: Mapping[str, str] = {
    "core_attn": "self_attention.core_attention",
    "mlp": "mlp",
    "moe": "mlp",
    "shared_experts": "mlp.shared_experts",
}
"""Name in `recompute_modules` -> module of a layer."""
DEFAULT_PARTS = ("core_attn",)


def _recomputed(forward: Callable[..., Any], seeds: DropoutSeeds | None) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        again = forward if seeds is None else seeds.repeatable(forward)
        return checkpoint(again, *arguments, use_reentrant=False, preserve_rng_state=seeds is not None, **named)

    return run


def recompute_layers(part: Module, seeds: DropoutSeeds | None) -> None:
    """Recompute every layer of a part from its input. Raises JobError if the part has no list of layers."""
    if not any(name.rpartition(".")[2] == LAYERS for name, _ in part.named_modules()):
        raise JobError(f'[model] recompute: "layers" needs a list named `{LAYERS}` in every stage\'s module')
    for _, layer in layers_of(part, 0).values():
        layer.forward = _recomputed(layer.forward, seeds)


def recompute_parts(part: Module, names: Sequence[str], seeds: DropoutSeeds | None) -> None:
    """Recompute the named modules of every layer. Raises JobError for an unknown name."""
    for name in names:
        if name not in PARTS:
            raise JobError(f"[model.config] recompute_modules: {name!r} is none of {', '.join(PARTS)}")
    modules = dict(part.named_modules())
    for place in layers_of(part, 0):
        if f"{place}.self_attention" not in modules:
            raise JobError('[model] recompute: "selective" needs layers of megatron-core; use "layers" or "full"')
        for wanted in dict.fromkeys(PARTS[name] for name in names):
            module = modules.get(f"{place}.{wanted}")
            if module is not None:
                module.forward = _recomputed(module.forward, seeds)


MESSAGE_SHAPE = "message_shape"
"""Attribute of a module: shape of the activations between stages, if different from Megatron's."""


class StageModule:
    """The module of one stage, moved to `device`; by default the loss follows from its losses or logits.

    Attributes:
        message: shape and type of the activations between stages.
        names: the parameters by their name in the whole model.
    """

    def __init__(
        self, module: Any, job: Job, index: int, device: torch.device, providers: Providers, tensor_rank: int
    ) -> None:
        model, rows = job.model, job.data.micro_batch_size
        stay_on_device(module)
        module.to(device)
        self.module, self._index, self._is_last = module, index, index == job.shape.stages - 1
        self._is_megatrons = hasattr(module, "set_input_tensor")
        self._loss = providers.loss or (masked_sum if self._is_megatrons else cross_entropy)
        if job.data.reset_attention:
            _require_masks(module, self._is_megatrons)
        ways = job.grid.tensor_parallel
        cut = ways if job.grid.sequence_parallel else 1
        standard = (model.sequence // cut, rows, model.hidden)
        shape = tuple(getattr(module, MESSAGE_SHAPE, standard))
        self.message: MessageSpec = shape, PRECISIONS[job.train.precision]
        self._positions = torch.arange(model.sequence, device=device).expand(rows, model.sequence)
        first_layer = sum(job.layers_per_stage()[:index])
        self.names = global_names(module, first_layer)
        is_provided = providers.model is not None
        if is_provided and job.shape.stages > 1 and not layers_of(module, first_layer):
            if job.shape.cut or job.planner.layout == "elastic":
                raise JobError(
                    f"[model] provider: the module of stage {index} has no list named layers, so the model cannot be"
                    " repartitioned; name its list of layers so (docs/guides/models.md), or write"
                    ' [planner] layout = "fixed"'
                )
            # Another stage's module may use the same names.
            ends = (SHARED_WEIGHT,) if model.tied else ()
            self.names = {
                name if name in ends else f"stages.{index}.{name}": parameter for name, parameter in self.names.items()
            }
        config: Any = getattr(module, "config", None)
        draws = is_provided or config.hidden_dropout or config.attention_dropout
        self._dropout = (
            DropoutSeeds(module, first_layer, model.seed, device, (tensor_rank, ways), cut > 1) if draws else None
        )
        if job.recompute_of(index) == "layers":
            recompute_layers(module, self._dropout)
        elif job.recompute_of(index) == "selective":
            parts = model.config.get("recompute_modules")
            recompute_parts(module, list(map(str, parts)) if isinstance(parts, list) else DEFAULT_PARTS, self._dropout)
        self._versions = {name: content_version(buffer) for name, buffer in module.named_buffers()}
        self._modes = [(part, part.training) for part in module.modules()]

    def set_evaluating(self, enabled: bool) -> None:
        for part, trains in self._modes:
            part.training = trains and not enabled

    def output(
        self, entry: Tensor | None, batch: Batch | None, iteration: int, micro_batch: int, tokens: float | None = None
    ) -> Tensor:
        """Run the forward of a micro-batch: the next stage's input, or the loss. Bit-identical on each call.

        Raises RunError if the output has another shape or type, or the forward changes a buffer.

        Args:
            tokens: divides the sum of losses; the micro-batch's own count if None.
        """
        with self._forward(iteration, micro_batch):
            output = self._call_module(entry, batch or {})
            return mean_loss(self._loss, output, batch or {}, tokens) if self._is_last else output

    def losses(self, entry: Tensor | None, batch: Batch, iteration: int, micro_batch: int) -> tuple[Tensor, Any]:
        """Run the forward of a micro-batch on the last stage: sum of the losses, and their number."""
        with self._forward(iteration, micro_batch):
            return loss_sum(self._loss, self._call_module(entry, batch), batch)

    @contextmanager
    def _forward(self, iteration: int, micro_batch: int) -> Iterator[None]:
        with self._dropout.seeded(iteration, micro_batch) if self._dropout is not None else nullcontext():
            yield
        if self._versions:
            self._require_same_buffers()

    def _call_module(self, entry: Tensor | None, batch: Batch) -> Tensor:
        output: Tensor
        if not self._is_megatrons:
            output = self.module(batch["tokens"] if entry is None else entry)
            return output
        if entry is not None:
            self.module.set_input_tensor(entry)
        output = self.module(
            input_ids=batch.get("tokens"),
            position_ids=batch.get("position_ids", self._positions),
            attention_mask=batch.get("attention_mask"),
            labels=batch.get("labels") if self._is_last else None,
        )
        if entry is not None:
            # The model would keep the last micro-batch's input alive.
            self.module.set_input_tensor(None)
        return output

    def require_message(self, output: Tensor) -> None:
        """Raise RunError unless `output` has the shape and type of a message to the next stage."""
        if not isinstance(output, Tensor) or (tuple(output.shape), output.dtype) != self.message:
            returned = f"{list(output.shape)} {output.dtype}" if isinstance(output, Tensor) else type(output)
            shape, dtype = self.message
            raise RunError(
                f"[model] provider: the module of stage {self._index} returned {returned}, but stages pass"
                f" {list(shape)} {dtype}; state another shape in the attribute {MESSAGE_SHAPE} of every stage's module"
            )

    def _require_same_buffers(self) -> None:
        for name, buffer in self.module.named_buffers():
            if name in self._versions and content_version(buffer) != self._versions[name]:
                raise RunError(
                    f"[model] provider: the forward of stage {self._index} changes the buffer {name}, which workers do"
                    " not copy from each other; use a layer without running statistics"
                )
        self._versions = {}


def _require_masks(module: Module, is_megatrons: bool) -> None:
    if not is_megatrons:
        raise JobError("[data] reset_attention: the module of [model] provider takes no attention_mask; write false")
    if any(getattr(part, "window_size", None) is not None for part in module.modules()):
        raise JobError(
            "[data] reset_attention: megatron-core's attention ignores attention_mask in layers with a window; use"
            " recycle.exec.model.attention.CausalAttention"
        )


def require_trainable(module: Any, job: Job, index: int, where: str) -> None:
    """Raise JobError, with prefix `where`, unless a provider's module can be trained."""
    if not isinstance(module, Module):
        raise JobError(f"{where}: it returned {type(module).__name__}, not a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise JobError(f"{where}: its module has no parameters to train; give it a layer by [model] split")
    names = global_names(module, 0)
    for name, parameter in names.items():
        if not parameter.requires_grad:
            raise JobError(f"{where}: {name} does not require a gradient; frozen parameters are not supported")
        if not parameter.is_floating_point():
            raise JobError(f"{where}: {name} is {parameter.dtype}; parameters must be floating-point")
    if not job.model.tied and 0 < index == job.shape.stages - 1 and SHARED_WEIGHT in names:
        raise JobError(f"{where}: {SHARED_WEIGHT} is on the first stage, too; write [model] tied = true")
    if job.model.tied and index in (0, job.shape.stages - 1) and SHARED_WEIGHT not in names:
        raise JobError(f"{where}: [model] tied needs a parameter {SHARED_WEIGHT}, which its module lacks")
