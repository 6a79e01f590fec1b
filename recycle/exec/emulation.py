"""A stage that takes the profile's time and bytes without computing anything.

A micro-batch's gradient and loss are drawn from (layer, place in the batch, step) on a fixed grid, so their sum shows
bit for bit that each was used exactly once, in any shape with the same batch. Every message carries a mark of its
stage, micro-batch and step, which the receiver checks. Evaluation losses include a part of the last stage's state.

Every message also carries an error, 0 unless a bit flip was injected, which spreads to results as in a model.

Limits: no activations are allocated. Messages have the largest boundary's size. A tensor rank emulates a whole stage.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import torch

from recycle.exec.model.integrity import ChecksumBuilder, flipped_copy
from recycle.exec.model.stage import Stage, StateLayout, StatePiece
from recycle.exec.model.state.gradient_sums import SumBuffer
from recycle.exec.model.state.layouts import Shards
from recycle.exec.model.stored_tensors import piece_name
from recycle.ir.instruction import (
    Backward,
    Forward,
    Instruction,
    RedundantForward,
    Replay,
)
from recycle.ir.kinds import ValueKind
from recycle.job import Job, price
from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch
from recycle.plans.hosting import layers_of, stage_units
from recycle.plans.shards import has_unit_shards

ENTRIES = 8
"""Entries of a layer's parameter vector."""
_GRID = 2.0**-20
_BYTES_PER_ELEMENT = 4
_LEAST_ELEMENTS = 3
"""A message holds its mark, its error, and the mark again at its end."""


class EmulatedPiece:
    """The state of a layer, or of a shard (`recycle.exec.model.stage.StatePiece`).

    Attributes:
        parameters: the live parameters, fp64 [n].
        count: steps taken, fp64 [1]; [0] without parameters. Stays 0 in a shard in which no layer begins, because
            checkpoints name it after the layer.
    """

    def __init__(self, parameters: torch.Tensor) -> None:
        self.parameters, self.count = parameters, torch.zeros(min(1, len(parameters)), dtype=torch.float64)

    def bind(
        self,
        sums: torch.Tensor,
        begin: int,
        layers: range,
        update: Callable[[torch.Tensor, torch.Tensor, float], object],
    ) -> EmulatedPiece:
        """Make this piece the part from element `begin` of a stage with these layers and sums; return it."""
        self._sums, self._begin, self._layers, self._update = sums, begin, layers, update
        self._has_count = any(0 <= place * ENTRIES - begin < len(self.parameters) for place in range(len(layers)))
        return self

    def state_tensors(self) -> list[torch.Tensor]:
        return [self.parameters, self.count]

    def step(self, iteration: int, clip_factor: float) -> None:
        self._update(self.parameters, self._sums, clip_factor)
        self.count.add_(int(self._has_count))

    def publish(self) -> None:
        return

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        parameters, count = tensors
        named: dict[str, torch.Tensor] = {}
        for place, number in enumerate(self._layers):
            first = place * ENTRIES - self._begin
            low, high = max(first, 0), min(first + ENTRIES, len(parameters))
            if low < high:
                piece = piece_name(f"layers.{number}.parameters", low - first, high - first, (ENTRIES,))
                named[piece] = parameters[low:high]
            if 0 <= first < len(parameters):
                named[f"layers.{number}.count"] = count
        return named


class EmulatedUnits(StateLayout):
    """The units of a stage, by number in ascending order; embedding and head have empty pieces."""

    def __init__(self, pieces: Mapping[int, EmulatedPiece]) -> None:
        self.pieces: Mapping[int, EmulatedPiece] = pieces

    def weights(self) -> list[torch.Tensor]:
        return [piece.parameters for piece in self.pieces.values()]


class EmulatedStage(Stage):
    """A stage without a model.

    Args:
        profile: costs of F, I, W, step and a message; None for the job's own.
        scale: seconds per unit of the profile's times; 0 for no delays.
        held: units whose state exists already, from another stage.
    """

    def __init__(
        self,
        job: Job,
        index: int,
        profile: Profile | None = None,
        scale: float = 1.0,
        held: Mapping[int, StatePiece] = MappingProxyType({}),
    ) -> None:
        profile = profile if profile is not None else price(job).prices
        shape = job.shape
        elements = max(_LEAST_ELEMENTS, math.ceil(max(profile.per_stage("message", shape.stages)) / _BYTES_PER_ELEMENT))
        super().__init__(job, index, ((elements, 1, 1), torch.float32))
        self._train, self._pipelines = job.train, shape.pipelines
        self._is_one_of_several = job.grid.tensor_parallel > 1
        names = ("forward", "redundant_forward", "backward_input", "backward_weight", "step", "host_copy")
        self._seconds = {name: scale * profile.per_stage(name, shape.stages)[index] for name in names}
        layers = layers_of(job)
        self._numbers = range(sum(layers[:index]), sum(layers[: index + 1]))
        self.sum = torch.zeros(ENTRIES * len(self._numbers), dtype=torch.float64)
        units: dict[int, EmulatedPiece] = {}
        for unit in range(*stage_units(layers)[index]):
            piece, layer = held.get(unit), unit - 1
            if not isinstance(piece, EmulatedPiece):
                entries = ENTRIES * (layer in self._numbers)
                drawn = _draw(entries, "parameters", layer, job.model.seed)
                piece = EmulatedPiece(torch.tensor(drawn, dtype=torch.float64))
            units[unit] = self.bind(piece, max(0, ENTRIES * (layer - self._numbers.start)))
        replicated = EmulatedUnits(units)
        self.layout = self._sharded(job, replicated) if job.train.sharded_optimizer else replicated
        self._loss = 0.0
        self._forwarded: dict[MicroBatch, float] = {}
        self._returned: dict[MicroBatch, float] = {}
        self._out_until = self._back_until = 0.0

    def bind(self, piece: EmulatedPiece, begin: int) -> EmulatedPiece:
        return piece.bind(self.sum[begin : begin + len(piece.parameters)], begin, self._numbers, self._update)

    def _sharded(self, job: Job, units: EmulatedUnits) -> Shards:
        count, size = job.shape.pipelines, len(self.sum)
        flat = torch.cat([torch.zeros(0, dtype=torch.float64), *units.weights()])
        first, ends = self.index, [0, size]
        if has_unit_shards(job):
            first, ends = min(units.units()), [0]
            for unit in units.units():
                ends.append(ends[-1] + ENTRIES * (unit - 1 in self._numbers))
        parts = pairwise(ends)
        bounds = [begin + (end - begin) * shard // count for begin, end in parts for shard in range(count)] + [size]
        return _EmulatedShards(self, first * count, bounds, flat)

    def begin_iteration(self, step: int) -> None:
        super().begin_iteration(step)
        self.sum.zero_()
        self._loss = 0.0

    def _run_forward(
        self, cls: type[Instruction], micro_batch: MicroBatch, activation: torch.Tensor | None
    ) -> tuple[float, torch.Tensor]:
        with self._lasting("redundant_forward" if cls is RedundantForward else "forward"):
            error = self._run(cls, micro_batch, activation)
            output = self._output(micro_batch, error)
        self._forwarded[micro_batch] = time.monotonic()
        return error, output

    def offload(self, micro_batch: MicroBatch) -> None:
        self._out_until = max(self._out_until, self._forwarded[micro_batch]) + self._seconds["host_copy"]
        _sleep_until(self._out_until)

    def reload(self, micro_batch: MicroBatch) -> None:
        self._back_until = max(self._back_until, time.monotonic()) + self._seconds["host_copy"]
        self._returned[micro_batch] = self._back_until

    def _evaluate(self, micro_batch: MicroBatch, activation: torch.Tensor | None) -> torch.Tensor | None:
        with self._lasting("forward"):
            error = self._run(Forward, micro_batch, activation)
            if not self._is_last:
                return self._message(ValueKind.ACTIVATION, self.index, micro_batch, error)
            drawn = _draw(1, "evaluation", self._iteration, self._place(micro_batch))[0] + _propagated("loss", error)
            seen = float(torch.cat(self.layout.weights())[-ENTRIES]) if self._numbers else 0.0
            self._evaluated.append((drawn + seen, 1.0))
            return None

    def _add_loss(self, loss: torch.Tensor) -> None:
        self._loss += float(loss)

    def _output(self, micro_batch: MicroBatch, error: float) -> torch.Tensor:
        if self._is_last:
            loss = _draw(1, "loss", self._iteration, self._place(micro_batch))[0] + _propagated("loss", error)
            return torch.tensor([loss], dtype=torch.float64)
        return self._message(ValueKind.ACTIVATION, self.index, micro_batch, error)

    def _run_replay(
        self,
        micro_batch: MicroBatch,
        activation: torch.Tensor | None,
        gradient: torch.Tensor | None,
        making: ChecksumBuilder,
    ) -> None:
        error, output = self._run_forward(Replay, micro_batch, activation)
        making.activation(output)
        message, error = self._pass_back(Replay, micro_batch, error, gradient)
        with self._lasting("backward_weight"):
            if message is not None:
                making.input_gradient(message)
            making.weight_gradient(0, self._addend(micro_batch, error))

    def _run_backward(
        self, cls: type[Instruction], micro_batch: MicroBatch, held: float, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, float]:
        _sleep_until(self._returned.pop(micro_batch, 0.0))
        message, error = self._pass_back(cls, micro_batch, held, gradient)
        if cls is Backward:
            self._run_weight(micro_batch, error, 0, 1)
        return message, error

    def bucket_bounds(self, buckets: int) -> Sequence[int]:
        return [len(self.sum) * bucket // buckets for bucket in range(buckets + 1)]

    def gradient_buffers(self) -> list[torch.Tensor]:
        return [self.sum]

    def loss_sum(self) -> float | None:
        return self._loss if self._is_last else None

    def gradient_norms_squared(self) -> list[float]:
        return self.norms_squared()

    def norms_squared(self, begin: int = 0, end: int | None = None) -> list[float]:
        squares: list[float] = (self.sum[begin:end] / self._divisor).square().tolist()
        return squares

    def replicated(self) -> range:
        return range(len(self.sum) if self._is_one_of_several else 0)

    def step(self, iteration: int, clip_factor: float) -> None:
        with self._lasting("step"):
            super().step(iteration, clip_factor)

    def _update(self, parameters: torch.Tensor, sums: torch.Tensor, clip_factor: float) -> None:
        parameters.sub_(sums / self._divisor * (clip_factor * self._train.learning_rate))

    def incoming(self, value: ValueKind, micro_batch: MicroBatch) -> torch.Tensor | None:
        """Return the message that a neighbor would send, if any: an activation comes from the previous stage."""
        activation = value == ValueKind.ACTIVATION
        sender, ends = (self.index - 1, self._is_first) if activation else (self.index + 1, self._is_last)
        return None if ends else self._message(value, sender, micro_batch)

    def gradient(self, step: int, micro_batch: MicroBatch) -> torch.Tensor:
        """Return this stage's gradient of one micro-batch, fp64 [layers * ENTRIES], for tests."""
        place = self._place(micro_batch)
        drawn = [entry for number in self._numbers for entry in _draw(ENTRIES, "gradient", number, step, place)]
        return torch.tensor(drawn, dtype=torch.float64)

    def _place(self, micro_batch: MicroBatch) -> int:
        return micro_batch.index * self._pipelines + micro_batch.pipeline

    def _run(self, cls: type[Instruction], micro_batch: MicroBatch, activation: torch.Tensor | None) -> float:
        error = self._check(cls, ValueKind.ACTIVATION, micro_batch, activation, self.index - 1)
        if (bit := self._flips.take_input_bit()) is not None:
            error = _flipped(error, bit)
        error = _propagated(f"F {self.index}", error)
        for bit in self._flips.take_activation_bits():
            error = _flipped(error, bit)
        return error

    def _pass_back(
        self, cls: type[Instruction], micro_batch: MicroBatch, held: float, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, float]:
        with self._lasting("backward_input"):
            error = self._check(cls, ValueKind.INPUT_GRADIENT, micro_batch, gradient, self.index + 1)
            error = _propagated(f"I {self.index}", held, error)
            if self._is_first:
                return None, error
            return self._message(ValueKind.INPUT_GRADIENT, self.index, micro_batch, error), error

    def _run_weight(self, micro_batch: MicroBatch, error: float, bucket: int, buckets: int) -> None:
        begin, end = self.bucket_bounds(buckets)[bucket : bucket + 2]
        with self._lasting("backward_weight", 1 / buckets):
            addend, making = self._addend(micro_batch, error)[begin:end], self._checksums_of(micro_batch)
            if making is not None:
                making.weight_gradient(2 * begin, addend)  # two words per element
            self.sum[begin:end] += addend

    def _addend(self, micro_batch: MicroBatch, error: float) -> torch.Tensor:
        return self.gradient(self._iteration, micro_batch) + _propagated("W", error)

    @contextlib.contextmanager
    def _lasting(self, name: str, share: float = 1.0) -> Iterator[None]:
        until = time.monotonic() + share * self._seconds[name]
        yield
        _sleep_until(until)

    def _message(self, value: ValueKind, stage: int, micro_batch: MicroBatch, error: float = 0.0) -> torch.Tensor:
        shape, dtype = self.message_spec()
        message = torch.full(shape, self._mark(value, stage, micro_batch), dtype=dtype)
        message.view(-1)[1] = error
        return message

    def _mark(self, value: ValueKind, stage: int, micro_batch: MicroBatch) -> float:
        purpose = ("evaluation",) if self._evaluates else ()
        return _draw(1, *purpose, value.name, stage, self._iteration, micro_batch)[0]

    def _check(
        self,
        cls: type[Instruction],
        value: ValueKind,
        micro_batch: MicroBatch,
        message: torch.Tensor | None,
        sender: int,
    ) -> float:
        if message is None:
            return 0.0
        mark = self._mark(value, sender, micro_batch)
        content = message.view(-1)
        if float(content[0]) != mark or float(content[-1]) != mark:
            raise self._misuse(cls, micro_batch, f"got a message that is not stage {sender}'s for it")
        return float(content[1])


class _EmulatedShards(Shards):
    def __init__(self, stage: EmulatedStage, first: int, bounds: Sequence[int], weights: torch.Tensor) -> None:
        super().__init__(first, bounds, weights, [SumBuffer(0, len(weights), stage.sum)])
        self._stage = stage

    def _make(self, begin: int, end: int) -> EmulatedPiece:
        return self._stage.bind(EmulatedPiece(self._weights[begin:end]), begin)

    def _norms(self, begin: int, end: int) -> list[float]:
        return self._stage.norms_squared(begin, end)

    def _common(self, begin: int, end: int) -> Collection[int]:
        return self._stage.replicated()[: end - begin]


def _sleep_until(moment: float) -> None:
    remaining = moment - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)


def _draw(count: int, *key: object) -> list[float]:
    """Numbers in [-1, 1) on the grid 2^-20, a pure function of the key; sums of up to 2^32 of them are exact."""
    text = " ".join(map(str, key)).encode()
    raw = hashlib.blake2b(text, digest_size=max(1, 4 * count)).digest()
    words = (int.from_bytes(raw[4 * place : 4 * place + 4], "little") for place in range(count))
    return [((word % (1 << 21)) - (1 << 20)) * _GRID for word in words]


def _propagated(to: str, *errors: float) -> float:
    return _draw(1, "error", to, *errors)[0] if any(errors) else 0.0


def _flipped(error: float, bit: int) -> float:
    return float(flipped_copy(torch.tensor([error], dtype=torch.float32), bit))
