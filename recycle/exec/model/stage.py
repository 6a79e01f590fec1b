"""A model stage: forward, split backward, gradient reduction and optimizer step.

`Stage` knows nothing of instruction order, transfers or membership. `MegatronStage` (megatron_stage.py) computes;
`EmulatedStage` (recycle.exec.emulation) only takes the modeled time.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from recycle.errors import RunError
from recycle.exec.checksums import PARAMETERS, MicroBatchChecksums
from recycle.exec.model.integrity import ChecksumBuilder, PendingBitFlips, flip_largest
from recycle.exec.transport.base import MessageSpec, Transport
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    RedundantForward,
    Replay,
    WeightPart,
)
from recycle.job import Job
from recycle.job.shape import MicroBatch

PRECISIONS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""`[train] precision` -> type of weights, activations and messages."""
Naming = Callable[[Sequence[Tensor]], dict[str, Tensor]]


class StoredPart(NamedTuple):
    """A part of a stage that checkpoints store in its own files, or that hosts compare.

    Attributes:
        kind: "stage" or "shard"; "parameters" only in comparisons.
        named: names views of tensors with this layout, as `Stage.named_state` does.
    """

    kind: str
    tensors: list[Tensor]
    named: Naming
    cuts: Mapping[str, int | None]


class StatePiece(Protocol):
    """A part of a stage's state with its own optimizer step: one unit or one shard."""

    def state_tensors(self) -> list[Tensor]:
        """The live tensors that a new host must copy, in fixed order."""

    def step(self, iteration: int, clip_factor: float) -> None:
        """As `Stage.step`."""

    def named_state(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """As `Stage.named_state`; for a parameter split over several pieces, this piece's part (`piece_name`)."""

    def publish(self) -> None:
        """Write the live parameters from the optimizer's state."""


def bucket_key(bucket: int, buckets: int) -> int | None:
    """The bucket argument of `Transport.reduce`: None for the last bucket."""
    return bucket if bucket < buckets - 1 else None


class ReducedPart(NamedTuple):
    """Reduced gradients of a stage, or of an owned shard: its number, squared norms by parameter or block, the indices
    of those that all tensor ranks share, and a checksum."""

    number: int
    norms: list[float]
    replicated: Collection[int]
    checksum: int


class StateLayout(ABC):
    """Layout of a stage's optimizer state over its hosts: the pieces that this host holds.

    By default each host holds all pieces, the units of the stage; `Shards` divides the state.

    Attributes:
        kind: kind of the parts that are numbered over the whole model and have their own checkpoint files.
        incomplete: numbers of pieces that the worker is still copying, which are stepped with the rest.
    """

    kind: ClassVar[str] = "stage"
    pieces: Mapping[int, StatePiece]
    incomplete: frozenset[int] = frozenset()

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """The live tensors that forwards compute with."""

    def units(self) -> Mapping[int, StatePiece]:
        """The pieces that move with units of the model, in order; complete before the first step."""
        return self.pieces

    def parts(self, stage: Stage) -> dict[int, tuple[list[Tensor], Naming]]:
        """Live tensors, and the function that names tensors with their layout, of each numbered part."""
        return {stage.index: (self.state_tensors(), self.named_state)}

    def gathered(self) -> list[Tensor]:
        """The live parameters that are gathered from the hosts that step them; [] if each host steps all."""
        return []

    def summed(self, stage: Stage) -> list[Tensor]:
        """The gradients that this host steps with, after the reduction."""
        return stage.gradient_buffers()

    def reduced(self, stage: Stage) -> Iterator[ReducedPart]:
        """The stage, or each owned shard, once reduced."""
        yield ReducedPart(stage.index, stage.gradient_norms_squared(), stage.replicated(), stage.gradient_checksum())

    def bucket(self, stage: Stage, bucket: int, buckets: int) -> list[list[Tensor]]:
        """For each gradient buffer that is reduced with a bucket, the parts of all shards, in order."""
        return [[buffer] for buffer in stage.gradient_bucket(bucket, buckets)]

    def reduce(self, stage: Stage, transport: Transport, bucket: int, buckets: int) -> None:
        """Begin to sum a bucket of the stage's gradients over its hosts; with the last bucket, wait for all."""
        transport.reduce(stage.index, stage.gradient_bucket(bucket, buckets), bucket_key(bucket, buckets))

    def moments(self) -> list[Tensor]:
        """The live tensors of the optimizer's first moments (the second tensor of each piece with parameters)."""
        states = (piece.state_tensors() for piece in self.pieces.values())
        return [tensors[1] for tensors in states if tensors[0].numel()]

    def state_tensors(self) -> list[Tensor]:
        return [tensor for piece in self.pieces.values() for tensor in piece.state_tensors()]

    def named_state(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        begin = 0
        for piece in self.pieces.values():
            end = begin + len(piece.state_tensors())
            named |= piece.named_state(tensors[begin:end])
            begin = end
        return named


class Stage(ABC):
    """The operations of one hosted stage.

    Within an iteration each micro-batch goes through `forward`, then `backward`, or `backward_input` and later
    `backward_weight` (or all its parts), in any order between micro-batches. Afterwards a reduction sums
    `gradient_buffers` in place over the stage's hosts, followed by `gradient_norms_squared` and `step`.

    Attributes:
        layout: this host's part of the optimizer's state. If sharded, the reduction leaves sums at the owners only.
    """

    layout: StateLayout

    def __init__(self, job: Job, index: int, message: MessageSpec) -> None:
        self.index = index
        self._is_first, self._is_last = index == 0, index == job.shape.stages - 1
        self._divisor = job.shape.global_micro_batches
        self._pipelines, self._micro_batches_in = job.shape.pipelines, job.micro_batches_in
        self._message_spec = message
        self._iteration = 0
        self._evaluates, self._evaluated = False, list[tuple[Any, Any]]()
        self._held: dict[MicroBatch, Any] = {}
        self._waiting: dict[MicroBatch, Any] = {}
        self._flips = PendingBitFlips()
        self._watched: frozenset[MicroBatch] = frozenset()
        self._checksums: dict[MicroBatch, ChecksumBuilder] = {}

    def message_spec(self) -> MessageSpec:
        """Shape [sequence, micro_batch_size, hidden] and dtype of an activation that crosses a stage boundary."""
        return self._message_spec

    def begin_iteration(self, step: int) -> None:
        """Start iteration `step` from a clean state, even if the previous iteration was interrupted."""
        self._divisor = self._pipelines * self._micro_batches_in(step)
        self._start(step, evaluates=False)

    def begin_evaluation(self, batch: int) -> None:
        """Start a batch of an evaluation: no activations are held, dropout is off, `evaluated` collects losses."""
        self._start(batch, evaluates=True)

    def _start(self, iteration: int, evaluates: bool) -> None:
        self._iteration, self._evaluates, self._evaluated = iteration, evaluates, []
        self.watch(())
        self._held.clear()
        self._waiting.clear()

    def evaluated(self) -> list[tuple[float, float]]:
        """(sum of losses, number of losses) of each micro-batch of the batch; [] except on the last stage."""
        return [(float(total), float(count)) for total, count in self._evaluated]

    def expect(self, iteration: int, program: Sequence[Compute]) -> None:
        """Announce the computations of an iteration, or an evaluation batch, which the stage may prepare."""
        return

    def forward(self, micro_batch: MicroBatch, activation: Tensor | None) -> Tensor | None:
        """Run F. The input (None on stage 0) must keep its content until the backward.

        Returns the detached output to send; None on the last stage, which adds up the loss.
        """
        if self._evaluates:
            self._require(Forward, micro_batch, activation, self._is_first)
            return self._evaluate(micro_batch, activation)
        output = self._hold(Forward, micro_batch, activation)
        if (checksums := self._checksums_of(micro_batch)) is not None:
            checksums.activation(output)
        if self._is_last:
            self._add_loss(output)
        return None if self._is_last else output

    def redundant_forward(self, micro_batch: MicroBatch, activation: Tensor | None) -> Tensor:
        """Run R on a copy of the stage: F without counting the loss. Returns the output."""
        return self._hold(RedundantForward, micro_batch, activation)

    def release(self, micro_batch: MicroBatch) -> None:
        del self._held[micro_batch]

    def _hold(self, cls: type[Instruction], micro_batch: MicroBatch, activation: Tensor | None) -> Tensor:
        if micro_batch in self._held or micro_batch in self._waiting:
            raise self._misuse(cls, micro_batch, "its activations are already held")
        self._require(cls, micro_batch, activation, self._is_first)
        self._held[micro_batch], output = self._run_forward(cls, micro_batch, activation)
        return output.detach()

    @abstractmethod
    def _run_forward(
        self, cls: type[Instruction], micro_batch: MicroBatch, activation: Tensor | None
    ) -> tuple[Any, Tensor]:
        """Compute F or R. Returns what the backward needs, and the output (the loss on the last stage)."""

    @abstractmethod
    def _evaluate(self, micro_batch: MicroBatch, activation: Tensor | None) -> Tensor | None: ...

    @abstractmethod
    def _add_loss(self, loss: Tensor) -> None: ...

    @abstractmethod
    def offload(self, micro_batch: MicroBatch) -> None:
        """Run OFFLOAD: later work waits until the activation has left for the host; `expect` has announced it."""

    @abstractmethod
    def reload(self, micro_batch: MicroBatch) -> None:
        """Run RELOAD: begin to copy the activation back; the backward waits for it."""

    def watch(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Take checksums of this iteration's results for these micro-batches, as far as they run here."""
        self._watched, self._checksums = frozenset(micro_batches), {}

    def watched_checksums(self) -> dict[MicroBatch, MicroBatchChecksums]:
        """Checksums of the watched micro-batches that ran here; call after their W."""
        return {micro_batch: builder.finish() for micro_batch, builder in self._checksums.items()}

    def _checksums_of(self, micro_batch: MicroBatch) -> ChecksumBuilder | None:
        return self._checksums.setdefault(micro_batch, ChecksumBuilder()) if micro_batch in self._watched else None

    def replay(self, micro_batch: MicroBatch, activation: Tensor | None, gradient: Tensor | None) -> ChecksumBuilder:
        """Run REPLAY: F and B of another host's micro-batch. Sums nothing; returns the checksums of the results."""
        if micro_batch in self._held or micro_batch in self._waiting:
            raise self._misuse(Replay, micro_batch, "this worker runs it itself")
        self._require(Replay, micro_batch, activation, self._is_first)
        self._require(Replay, micro_batch, gradient, self._is_last)
        checksums = ChecksumBuilder()
        self._run_replay(micro_batch, activation, gradient, checksums)
        return checksums

    @abstractmethod
    def _run_replay(
        self, micro_batch: MicroBatch, activation: Tensor | None, gradient: Tensor | None, checksums: ChecksumBuilder
    ) -> None: ...

    def backward_input(self, micro_batch: MicroBatch, gradient: Tensor | None) -> Tensor | None:
        """Run I with the output gradient (None on the last stage), and return the input gradient (None on stage 0)."""
        by_input, self._waiting[micro_batch] = self._begin_backward(BackwardInput, micro_batch, gradient)
        return by_input

    def backward_weight(self, micro_batch: MicroBatch, bucket: int = 0, buckets: int = 1) -> None:
        """Run W of a micro-batch after its I, or the part in a bucket; the last bucket includes gradients in none."""
        if micro_batch not in self._waiting:
            cls = BackwardWeight if buckets == 1 else WeightPart
            raise self._misuse(cls, micro_batch, "its I has not run, or all its parts are done")
        self._run_weight(micro_batch, self._waiting[micro_batch], bucket, buckets)
        if bucket == buckets - 1:
            del self._waiting[micro_batch]

    def backward(self, micro_batch: MicroBatch, gradient: Tensor | None) -> Tensor | None:
        """Run B: I and W together, with bit-identical results."""
        by_input, _ = self._begin_backward(Backward, micro_batch, gradient)
        return by_input

    def _begin_backward(
        self, cls: type[Instruction], micro_batch: MicroBatch, gradient: Tensor | None
    ) -> tuple[Tensor | None, Any]:
        if micro_batch not in self._held:
            raise self._misuse(cls, micro_batch, "its F has not run")
        self._require(cls, micro_batch, gradient, self._is_last)
        input_gradient, saved = self._run_backward(cls, micro_batch, self._held.pop(micro_batch), gradient)
        if (checksums := self._checksums_of(micro_batch)) is not None and input_gradient is not None:
            checksums.input_gradient(input_gradient)
        return input_gradient, saved

    @abstractmethod
    def _run_backward(
        self, cls: type[Instruction], micro_batch: MicroBatch, held: Any, gradient: Tensor | None
    ) -> tuple[Tensor | None, Any]:
        """Compute I or B. Returns the input gradient, and what W needs."""

    @abstractmethod
    def _run_weight(self, micro_batch: MicroBatch, saved: Any, bucket: int, buckets: int) -> None: ...

    @abstractmethod
    def gradient_buffers(self) -> list[Tensor]:
        """The live flat gradient sums, each a multiple of 8 bytes: fp64 when `exact`, fp32 when `fast`."""

    @abstractmethod
    def bucket_bounds(self, buckets: int) -> Sequence[int]:
        """Offsets of the buckets in the first of `gradient_buffers`, [buckets + 1]; the same on all hosts."""

    def gradient_bucket(self, bucket: int, buckets: int) -> list[Tensor]:
        """The bucket's part of `gradient_buffers`; the last bucket includes all buffers except the first."""
        if buckets == 1:
            return self.gradient_buffers()
        first, *others = self.gradient_buffers()
        begin, end = self.bucket_bounds(buckets)[bucket : bucket + 2]
        return [first[begin:end], *(others if bucket == buckets - 1 else [])]

    def tied_buffers(self) -> list[Tensor]:
        """The live gradient sums of a weight that tied stages share, one per worker; [] without one."""
        return []

    def spoil_gradients(self) -> None:
        """Fill the gradient sums with NaN, as a hardware fault would."""
        for buffer in self.gradient_buffers():
            buffer.fill_(math.nan)

    def flip(self, target: str, bit: int) -> None:
        """Flip one bit of the largest entry of the target, as a hardware fault would (integrity.py).

        Args:
            target: weight, moment, gradient (the sum), input, activation (of the next forward), or kernel: an
                activation of every forward from now on.
        """
        # The last weight of a stage: every forward uses all of a layer, but few rows of an embedding.
        in_memory: dict[str, Callable[[], list[Tensor]]] = {
            "weight": lambda: self.layout.weights()[::-1],
            "moment": lambda: self.layout.moments()[::-1],
            "gradient": lambda: self.layout.summed(self),
        }
        if target not in in_memory:
            self._flips.schedule(target, bit)
            return
        for tensor in [tensor for tensor in in_memory[target]() if tensor.numel()][:1]:
            flip_largest(tensor, bit)

    def gradient_checksum(self) -> int:
        """Sum, modulo 2^64, of the reduced gradient sums read as 64-bit integers; the same on all hosts."""
        words = [buffer.view(-1).view(torch.int64).sum() for buffer in (*self.gradient_buffers(), *self.tied_buffers())]
        return int(torch.stack(words).sum().item()) % (1 << 64)

    @abstractmethod
    def loss_sum(self) -> float | None:
        """Exact sum of the losses of this iteration's micro-batches on this host; None except on the last stage."""

    @abstractmethod
    def gradient_norms_squared(self) -> list[float]:
        """Squared norm of each parameter's mean gradient, on this tensor rank; bit-identical on all hosts.

        Call after the reduction. One is not finite if a gradient was not finite or exceeded the bound of `exact`.
        """

    def replicated(self) -> Collection[int]:
        """Indices in `gradient_norms_squared` of the norms that all tensor ranks of a worker share."""
        return ()

    def cuts(self) -> Mapping[str, int | None]:
        """Names of `named_state` split between tensor ranks -> the dimension; None for a tensor only of this rank."""
        return {}

    def step(self, iteration: int, clip_factor: float) -> None:
        for piece in self.layout.pieces.values():
            piece.step(iteration, clip_factor)

    def state_tensors(self) -> list[Tensor]:
        return self.layout.state_tensors()

    def named_state(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views of `tensors`, which have the layout of `state_tensors`, by names unique in the whole model.

        The names do not depend on the split into stages. A step count of several parameters appears once for each.
        """
        return self.layout.named_state(tensors)

    def stored(self) -> dict[int, StoredPart]:
        """The parts that checkpoints store, by number of the stage or of the owned shards."""
        kind, cuts = self.layout.kind, self.cuts()
        parts = self.layout.parts(self)
        return {number: StoredPart(kind, tensors, named, cuts) for number, (tensors, named) in parts.items()}

    def compared(self) -> dict[int, StoredPart]:
        """The parts that this host compares with other hosts of the stage.

        With replicated state, the state, by the stage's number. Otherwise each complete owned shard, by the shard's
        number, and the live parameters, by `PARAMETERS` plus the stage's number.
        """
        compared = self._complete()
        if live := self.layout.gathered():
            compared[PARAMETERS + self.index] = StoredPart("parameters", live, lambda _: {}, {})
        return compared

    def _complete(self) -> dict[int, StoredPart]:
        return {number: part for number, part in self.stored().items() if number not in self.layout.incomplete}

    def digests(self) -> dict[int, str]:
        return {number: digest(part.tensors) for number, part in self._complete().items()}

    def placement(self) -> Mapping[str, str]:
        """Parameter name in the whole model -> the half of the backward that last computed its gradient."""
        return {}

    def held_micro_batches(self) -> int:
        """Number of micro-batches that hold memory: from the start of F to the end of W (or B)."""
        return len(self._held) + len(self._waiting)

    def _require(self, cls: type[Instruction], micro_batch: MicroBatch, message: Tensor | None, is_end: bool) -> None:
        if (message is None) != is_end:
            raise self._misuse(cls, micro_batch, "stage 0 takes no input, the last stage takes no gradient; others do")

    def _misuse(self, cls: type[Instruction], micro_batch: MicroBatch, why: str) -> RunError:
        place = f"stage {self.index}, iteration {self._iteration}"
        return RunError(f"{place}: {cls.token} of micro-batch {micro_batch}: {why}")


@torch.no_grad()
def copy_state(target: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for into, tensor in zip(target, source, strict=True):
        into.copy_(tensor, non_blocking=True)  # asynchronous between host and device; ordered on the device


def buffers_for(live: Sequence[Tensor], older: list[Tensor], empty_like: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Buffers for a copy of a state; takes fitting buffers out of `older` and allocates the rest."""
    free = defaultdict[object, list[Tensor]](list)
    while older:
        free[older[-1].shape, older[-1].dtype].append(older.pop())
    reused = [fitting.pop() if (fitting := free[tensor.shape, tensor.dtype]) else None for tensor in live]
    del free  # free buffers that do not fit before allocating
    return [empty_like(tensor) if buffer is None else buffer for tensor, buffer in zip(live, reused, strict=True)]


def on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def digest(tensors: Sequence[Tensor]) -> str:
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
