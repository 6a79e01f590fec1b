"""ModelChunk: a model chunk of a Megatron job, for the interpreter.

F and B are megatron-core's `forward_step` and `backward_step`, with its forward step, loss function, loss scales, token
counts, timers and release of sent outputs. I is `backward_step` with the linear layers' weight gradients deferred. W
computes the deferred gradients and passes them to DDP's hook, which adds them to `main_grad`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    check_first_val_step,
    deallocate_output_tensor,
    forward_step,
    get_tensor_shapes,
)
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn import Parameter

from recycle.errors import RunError, ScheduleWarning
from recycle.exec.model.backward import SplitLinears, WeightGradientStore, holds_matrix
from recycle.exec.model.other_layers import GraphSplit
from recycle.exec.transport.base import MessageSpec
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Compute
from recycle.job.shape import MicroBatch
from recycle.megatron.gradient_sync import GradientSync
from recycle.megatron_versions import gradient_hook, parallel_rank, run_backward_step


@dataclass(frozen=True)
class Arguments:
    """What a script passes to a call of the loop; the same for a repeated iteration."""

    forward_step: Any
    sequence: int
    rows: int
    decoder_sequence: int | None = None
    collects_non_loss_data: bool = False
    first_val_step: bool | None = None


class Call:
    """One call of the loop, and its results.

    Args:
        groups: megatron-core's process groups.
        completing: computes that complete gradients (`RankOrder`).

    Attributes:
        message: shape and type of the activations between stages, [sequence, rows, hidden].
        tokens: tokens that the loss functions counted, summed as in megatron-core.
        kept: values that the loss function returns for each micro-batch; in order they are the call's result.
        losses: loss of each micro-batch that ended here, divided by the number of micro-batches, on the device.
        seeded: seeds the random generators for a micro-batch in a stage, inside a block; None to leave them alone.
        collect: called with a stage after each of its computes that adds to gradients.
    """

    def __init__(
        self,
        models: Sequence[Any],
        arguments: Arguments,
        groups: Any,
        micro_batches: int,
        completing: Collection[Compute],
        forward_only: bool = False,
    ) -> None:
        self.config = config = get_model_config(models[0])
        self.arguments, self.micro_batches, self.forward_only = arguments, micro_batches, forward_only
        self.context_parallel = groups.cp.size()
        self.sync = GradientSync(config, models, completing)
        shape = get_tensor_shapes(
            seq_length=arguments.sequence,
            micro_batch_size=arguments.rows,
            decoder_seq_length=arguments.decoder_sequence,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )[0]
        self.message: MessageSpec = tuple(shape), config.pipeline_dtype or config.params_dtype
        self.device = next(models[0].parameters()).device
        self.tokens = torch.zeros([], dtype=torch.int, device=self.device)
        self.kept: dict[MicroBatch, list[Any]] = {}
        self.losses: dict[MicroBatch, Tensor] = {}
        self.seeded: Callable[[int, MicroBatch], AbstractContextManager[object]] | None = None
        self.collect: Callable[[int], object] = lambda stage: None

    @property
    def results(self) -> list[Any]:
        return [value for _, kept in sorted(self.kept.items()) for value in kept]


def _described(message: MessageSpec) -> str:
    shape, dtype = message
    return f"{list(shape)} of {str(dtype).removeprefix('torch.')}"


class ModelChunk:
    """One chunk; see `recycle.exec.model.stage.Stage` for the methods.

    Args:
        model: the chunk, in Megatron's DDP or bare.
        number: megatron-core's `vp_stage` of the chunk; None if each rank has one chunk.
        seen_rank: rank that the chunk was built for (see `recycle.megatron.placement`); None for this process's rank.

    Raises:
        RunError: the split backward does not support an operation of a layer.
    """

    def __init__(
        self,
        model: Any,
        stage: int,
        stages: int,
        number: int | None,
        seen_rank: int | None,
        is_split: bool,
        config: Any,
    ) -> None:
        self.model, self._stage, self._number, self._seen_rank = model, stage, number, seen_rank
        self._is_last = stage == stages - 1
        self._store = WeightGradientStore(self._add)
        self._layers = SplitLinears(model, self._store) if is_split else None
        self._graph = None
        if (
            is_split
            and config.recompute_granularity is None
            and any(holds_matrix(module) for module in model.modules())
        ):
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._graph = GraphSplit(trained, self._store, self._add)
        self._hooks: dict[Parameter, Any] = {}
        self._held: dict[MicroBatch, tuple[Tensor | None, Tensor]] = {}
        self._warned = self._has_run = False
        self._data_of: Callable[[MicroBatch], Any] = lambda micro_batch: None
        self.call: Call

    def enter(self, stack: ExitStack, call: Call, data_of: Callable[[MicroBatch], Any]) -> None:
        """Start a call of the loop, which ends with the stack; the layers are split meanwhile.

        `data_of` returns the iterator that yields the data of a micro-batch next.
        """
        self.call, self._data_of, self._has_run = call, data_of, False
        if self._layers is not None and not call.forward_only:
            stack.enter_context(self._layers)
        stack.callback(self._release)

    def _release(self) -> None:
        self._held.clear()
        self._store.clear()
        self._data_of = lambda micro_batch: None

    def begin_iteration(self, step: int) -> None:
        """Do nothing: `enter` and its stack leave no state behind."""

    def expect(self, iteration: int, program: Any) -> None:
        """Do nothing: the script's iterators choose what to read."""

    def forward(self, micro_batch: MicroBatch, activation: Tensor | None) -> Tensor | None:
        call, index = self.call, micro_batch.index
        if activation is not None:
            activation.requires_grad_(not call.forward_only)
        is_first, self._has_run = not self._has_run, True
        kept: list[Any] = []
        data = self._data_of(micro_batch)  # before the generators are seeded: opening a loader draws from them
        with ExitStack() as stack:
            if self._seen_rank is not None:
                stack.enter_context(parallel_rank("PIPELINE_MODEL", self._seen_rank))
            if call.seeded is not None:
                stack.enter_context(call.seeded(self._stage, micro_batch))
            output, tokens = forward_step(
                call.arguments.forward_step,
                data,
                self.model,
                call.micro_batches,
                activation,
                kept,
                call.config,
                cp_group_size=call.context_parallel,
                collect_non_loss_data=call.arguments.collects_non_loss_data,
                is_first_microbatch=check_first_val_step(call.arguments.first_val_step, call.forward_only, is_first),
                current_microbatch=index,
                vp_stage=self._number,
                is_last_stage=self._is_last,
            )
        call.tokens += tokens
        if kept:
            call.kept[micro_batch] = kept
        if activation is not None and not call.forward_only and not getattr(output, "requires_grad", False):
            what = "loss" if self._is_last else "output"
            raise RunError(
                f"{self._stage}F{micro_batch}: the {what} of the forward step has no gradient; return a tensor that"
                " depends on the model's output, not detached"
            )
        sent: Tensor | None = None if self._is_last else output.detach()
        if sent is not None and (message := (tuple(sent.shape), sent.dtype)) != call.message:
            raise RunError(
                f"{self._stage}F{micro_batch}: the forward step returns {_described(message)}, and seq_length,"
                f" micro_batch_size and the config give {_described(call.message)}; correct the arguments"
            )
        if self._is_last and not call.forward_only:
            call.losses[micro_batch] = output.detach()
        if not call.forward_only:
            self._held[micro_batch] = activation, output
            if self._graph is None:
                deallocate_output_tensor(output, call.config.deallocate_pipeline_outputs)
        return sent

    def backward(self, micro_batch: MicroBatch, gradient: Tensor | None) -> Tensor | None:
        with self.call.sync.on_for(Backward(self._stage, micro_batch)):
            return self._run_backward(micro_batch, gradient)

    def backward_input(self, micro_batch: MicroBatch, gradient: Tensor | None) -> Tensor | None:
        with self.call.sync.on_for(BackwardInput(self._stage, micro_batch)), self._store.record(micro_batch):
            result = self._run_backward(micro_batch, gradient)
        if not self._warned and not self._store.held(micro_batch):
            self._warned = True
            warnings.warn(
                f"stage {self._stage}: none of its layers can defer weight gradients to W, so I is a whole backward;"
                " use megatron-core's local layer spec, or torch.nn.Linear without recomputation",
                ScheduleWarning,
                stacklevel=2,
            )
        return result

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        timers = self.call.config.timers
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        with self.call.sync.on_for(BackwardWeight(self._stage, micro_batch)):
            self._store.flush(micro_batch)
        if timers is not None:
            timers("backward-compute").stop()
        self.call.collect(self._stage)

    def _run_backward(self, micro_batch: MicroBatch, gradient: Tensor | None) -> Tensor | None:
        entry, output = self._held.pop(micro_batch)
        config = self.call.config
        if self._graph is not None:
            if gradient is None and config.grad_scale_func is not None:
                output = config.grad_scale_func(output)
            input_gradient = self._graph.backward(output, gradient, entry)
        else:
            input_gradient = run_backward_step(entry, output, gradient, self.model, config)
        self.call.collect(self._stage)
        return input_gradient

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        assert isinstance(parameter, Parameter)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if parameter not in self._hooks:
            self._hooks[parameter] = gradient_hook(self.model, parameter)
        hook = self._hooks[parameter]
        if hook is not None:
            hook()
