"""The stage that computes: a part of a megatron-core GPT, of another model family, or a user's module.

One micro-batch's gradient depends on weights, data, kernel, thread count and kind of hardware, not on the worker or the
time. With `exact` accumulation the sum does not depend on order either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from recycle.exec.data.batches import Batch, Batches
from recycle.exec.data.loading import BatchesAhead
from recycle.exec.model.backward import SplitLinears, WeightGradientStore
from recycle.exec.model.integrity import ChecksumBuilder, flip_first_layer_outputs, flipped_copy, flipped_tokens
from recycle.exec.model.loss import TokenMean
from recycle.exec.model.offload import SavedActivations
from recycle.exec.model.other_layers import DelayedLayers, GraphSplit
from recycle.exec.model.part import StageModule
from recycle.exec.model.providers import Providers
from recycle.exec.model.stage import PRECISIONS, Naming, Stage, StatePiece, StoredPart
from recycle.exec.model.state.accumulate import Accumulator, ExactSum, FlatLayout
from recycle.exec.model.state.gradient_sums import GradientSums, Half, IncomingGradients
from recycle.exec.model.state.layouts import ShardedOptimizer, UnitOptimizers, ends_of_units
from recycle.exec.model.state.optimizer import StoredNames, without_shared
from recycle.exec.model.state.rules import rules_of
from recycle.exec.model.tensor_ranks import own_expert_parameters, sequence_split_parameters
from recycle.exec.model.weights import SHARED_WEIGHT, cut_dimensions, gated_parameters, per_head_parameters, units_of
from recycle.ir.instruction import BackwardInput, Compute, HostCopy, Instruction
from recycle.job import Job
from recycle.job.shape import MicroBatch
from recycle.plans.hosting import stage_units
from recycle.plans.shards import has_unit_shards

LOSS_EXPONENT = 16
"""Exponent e of a micro-batch's largest loss, 2^e. The grid is then finer than fp32 for every loss above 2^-8."""


class MegatronStage(Stage):
    """A part of a model with split backward, gradient sums and optimizer.

    Args:
        batches: source of micro-batches; None for a stage between the first and the last, unless these have masks.
        part: the initialized model part; moved to `device`. Its parameters become views of one flat tensor per unit.
        tied_sum: gradient sum of the shared weight, from another stage of this worker.
        evaluation: as `batches`, for evaluations; None for a job without.
        held: state of units that this process already holds, which the stage takes over.
    """

    def __init__(
        self,
        job: Job,
        index: int,
        device: torch.device,
        batches: Batches | None,
        part: Any,
        tied_sum: Accumulator | None,
        tensor_rank: int,
        providers: Providers,
        evaluation: Batches | None,
        held: Mapping[int, StatePiece],
    ) -> None:
        self._part = StageModule(part, job, index, device, providers, tensor_rank)
        super().__init__(job, index, self._part.message)
        self._device = device
        is_pinned = device.type == "cuda"
        self._trained_on = None if batches is None else BatchesAhead(batches, is_pinned)
        self._evaluated_on = None if evaluation is None else BatchesAhead(evaluation, is_pinned)
        self._data = self._trained_on
        has_masks = job.data.reset_attention or job.evaluation_data.reset_attention
        self._reads_data = self._is_first or self._is_last or has_masks
        self._token_mean: TokenMean | None = None
        if job.train.per_token_loss and self._is_last and batches is not None:
            self._token_mean = TokenMean(batches, job)
        self._micro_batches = job.shape.micro_batches
        self._recomputes = job.recompute_of(index) == "full"

        named = self._part.names
        shared = SHARED_WEIGHT if job.model.tied and SHARED_WEIGHT in named else None
        layers = job.layers_per_stage()
        units = units_of(named, layers, index)
        # A shared weight comes first or last, so that the sums of the other weights are contiguous.
        end = -1 if self._is_first else 1
        rules = rules_of(job.train, named, job.model.import_from or ())
        names = sorted(named, key=lambda name: (units[name], end * (name == shared), rules[name].order))
        self.parameters = {name: named[name] for name in names}
        parameters = list(self.parameters.values())
        cut, halves = cut_dimensions(part), gated_parameters(part)
        summed = per_head_parameters(part) if job.grid.tensor_parallel > 1 else set()
        if job.grid.sequence_parallel:
            summed |= sequence_split_parameters(part) - cut.keys()
        places: dict[Parameter, int | None] = {**dict.fromkeys(own_expert_parameters(part)), **cut}
        self._names = StoredNames(
            {name: places[parameter] for name, parameter in self.parameters.items() if parameter in places},
            [name for name, parameter in self.parameters.items() if parameter in halves],
            {state for rule in rules.values() for state in rule.optimizer.state},
        )
        self._sums = GradientSums(job, index, self.parameters, shared, self._names.cut, tied_sum, device)
        self._size = self._sums.layout.size
        self._replicated = self._sums.common(0, self._size)
        hosted = range(*stage_units(layers)[index])
        ends = ends_of_units(hosted, [units[name] for name in self.parameters], self._sums.layout)
        working_type = PRECISIONS[job.train.precision]
        if job.train.sharded_optimizer:
            count, is_by_unit = job.shape.pipelines, has_unit_shards(job)
            self.layout = ShardedOptimizer(
                self.parameters,
                self._names,
                self._sums,
                rules,
                working_type,
                (hosted.start if is_by_unit else index) * count,
                count,
                [0, *(end for _, end in ends.values())] if is_by_unit else [0, self._size],
                tells_shapes=job.grid.tensor_parallel > 1,
            )
        else:
            self.layout = UnitOptimizers(ends, self.parameters, self._names, self._sums, rules, working_type, held)
        self._losses = ExactSum(FlatLayout([torch.Size([1])]), self._divisor, LOSS_EXPONENT, device)

        self._incoming = IncomingGradients(self._sums, parameters, summed)
        self._store = WeightGradientStore(self._incoming.add, self._incoming.add_product)
        SplitLinears(part, self._store).split()
        self._delayed = DelayedLayers(part, self._store, self._incoming.add)
        # In recycle's own families, matrices outside of linear layers are tables and routers, which stay in I. Walking
        # the graph of a recomputed layer would run the layer once more.
        is_looked_at = providers.model is not None and job.recompute_of(index) in ("none", "full")
        self._graph = GraphSplit(parameters, self._store, self._incoming.add) if is_looked_at else None
        self._saved = SavedActivations(device)
        self._has_flip_hook = False
        self._vocabulary = job.model.vocabulary

    @property
    def tied_sum(self) -> Accumulator | None:
        return self._sums.tied

    def begin_iteration(self, step: int) -> None:
        super().begin_iteration(step)
        self._sums.divisor = self._divisor
        self._sums.clear()
        self._losses.clear()

    def _start(self, iteration: int, evaluates: bool) -> None:
        if evaluates != self._evaluates:
            self._data = self._evaluated_on if evaluates else self._trained_on
            self._part.set_evaluating(evaluates)
        super()._start(iteration, evaluates)
        self._incoming.reset()
        self._store.clear()
        self._delayed.clear()

    def expect(self, iteration: int, program: Sequence[Compute]) -> None:
        self._saved.expect(program)
        program = [compute for compute in program if not isinstance(compute, HostCopy)]
        if self._data is None or not self._reads_data:
            return
        runs = [compute for compute in program if compute.row.holds or (compute.row.remakes and self._recomputes)]
        numbers = [self._number(compute.micro_batch) for compute in runs]
        steps = (iteration,) if self._evaluates else (iteration, iteration + 1)
        self._data.expect((step, number) for step in steps for number in numbers)

    def _run_forward(
        self, cls: type[Instruction], micro_batch: MicroBatch, activation: Tensor | None
    ) -> tuple[Any, Tensor]:
        entry = self._entry(activation)
        with torch.set_grad_enabled(not self._recomputes), self._saved.saving(micro_batch, self._part.module):
            output = self._compute(micro_batch, entry)
        return (entry, None if self._recomputes else output), output

    def offload(self, micro_batch: MicroBatch) -> None:
        self._saved.offload(micro_batch)

    def reload(self, micro_batch: MicroBatch) -> None:
        self._saved.reload(micro_batch)

    def _add_loss(self, loss: Tensor) -> None:
        self._losses.add(0, loss.reshape(1))

    def _entry(self, activation: Tensor | None) -> Tensor | None:
        entry = None if activation is None else activation.detach()
        if entry is not None and (bit := self._flips.take_input_bit()) is not None:
            entry = flipped_copy(entry, bit)
        return entry

    def _run_replay(
        self, micro_batch: MicroBatch, activation: Tensor | None, gradient: Tensor | None, checksums: ChecksumBuilder
    ) -> None:
        entry = self._entry(activation)
        with self._incoming.attributed_to(checksums, is_scratch=True):
            with torch.enable_grad():
                output = self._compute(micro_batch, entry)
            checksums.activation(output)
            by_entry = self._backward_from(micro_batch, entry, output, gradient)
            if by_entry is not None:
                checksums.input_gradient(by_entry)

    @torch.no_grad()
    def _evaluate(self, micro_batch: MicroBatch, activation: Tensor | None) -> Tensor | None:
        if not self._is_last:
            return self._compute(micro_batch, activation).detach()  # megatron-core enables autograd for residual sums
        number = self._number(micro_batch)
        total, count = self._part.losses(activation, self._batch(number), self._iteration, number)
        self._evaluated.append((total.detach(), count))
        return None

    def _run_backward(
        self, cls: type[Instruction], micro_batch: MicroBatch, held: Any, gradient: Tensor | None
    ) -> tuple[Tensor | None, Any]:
        self._saved.wait_for(micro_batch)
        is_split, (entry, output) = cls is BackwardInput, held
        recording = self._store.record(micro_batch) if is_split else nullcontext()
        with recording, self._incoming.attributed_to(self._checksums_of(micro_batch), "I" if is_split else None):
            return self._backward_from(micro_batch, entry, output, gradient), None

    def _run_weight(self, micro_batch: MicroBatch, saved: Any, bucket: int, buckets: int) -> None:
        with self._incoming.attributed_to(self._checksums_of(micro_batch), "W"):
            if bucket == buckets - 1:
                self._store.flush(micro_batch)
            else:
                self._store.flush_some(micro_batch, lambda weight: self._sums.is_in_bucket(weight, bucket, buckets))

    def bucket_bounds(self, buckets: int) -> Sequence[int]:
        return self._sums.bucket_bounds(buckets)

    def gradient_buffers(self) -> list[Tensor]:
        return self._sums.buffers()

    def tied_buffers(self) -> list[Tensor]:
        return self._sums.tied_buffers()

    def loss_sum(self) -> float | None:
        return float(self._losses.buffer.sum()) if self._is_last else None

    def gradient_norms_squared(self) -> list[float]:
        return self._sums.norms_squared(0, self._size)

    def replicated(self) -> Collection[int]:
        return self._replicated

    def stored(self) -> dict[int, StoredPart]:
        """As `Stage.stored`; of tied stages with shards only the first stores the shared weight."""
        parts = super().stored()
        if self._is_first or self._sums.tied is None or not self.layout.gathered():
            return parts

        def without(named: Naming, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
            return without_shared(named(tensors), SHARED_WEIGHT)

        return {number: part._replace(named=partial(without, part.named)) for number, part in parts.items()}

    def cuts(self) -> Mapping[str, int | None]:
        return self._names.cuts()

    def flip(self, target: str, bit: int) -> None:
        if not self._has_flip_hook:
            self._has_flip_hook = True
            flip_first_layer_outputs(self._part.module, self._flips)
        super().flip(target, bit)

    def placement(self) -> dict[str, Half]:
        placed = self._incoming.placed
        return {name: placed[parameter] for name, parameter in self.parameters.items() if parameter in placed}

    def _compute(self, micro_batch: MicroBatch, entry: Tensor | None) -> Tensor:
        number = self._number(micro_batch)
        batch = self._batch(number) if self._reads_data else None
        if entry is not None:
            entry.requires_grad_(torch.is_grad_enabled())
        tokens = None if self._token_mean is None else self._token_mean.of(self._iteration)
        output = self._part.output(entry, batch, self._iteration, number, tokens)
        if not self._is_last:
            self._part.require_message(output)
        return output

    def _batch(self, number: int) -> Batch:
        assert self._data is not None, "a stage that reads data has its source"
        batch = self._data.batch(self._iteration, number)
        if self._is_first and "tokens" in batch and (bit := self._flips.take_input_bit()) is not None:
            batch = batch | {"tokens": flipped_tokens(batch["tokens"], self._vocabulary, bit)}
        return {name: part.to(self._device, non_blocking=True) for name, part in batch.items()}

    def _number(self, micro_batch: MicroBatch) -> int:
        return micro_batch.pipeline * self._micro_batches + micro_batch.index

    def _backward_from(
        self, micro_batch: MicroBatch, entry: Tensor | None, output: Tensor | None, gradient: Tensor | None
    ) -> Tensor | None:
        if output is None:
            output = self._compute(micro_batch, entry)
        if self._graph is not None:
            by_entry = self._graph.backward(output, gradient, entry)
        else:
            torch.autograd.backward(output, gradient)
            by_entry = None if entry is None else entry.grad
        self._delayed.collect()
        return by_entry
