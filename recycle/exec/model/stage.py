"""A stage as the interpreter sees it: the numerics of F, I, W, B, of the gradient sum and of the optimizer step.

`Stage` is what stands below the interpreter, and knows nothing of order, transfer or membership. `MegatronStage`
(megatron_stage.py) computes; `EmulatedStage` (recycle.exec.emulation) only takes the time.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from recycle.errors import RunError
from recycle.exec.checksums import PARAMETERS, MicroBatchChecksums
from recycle.exec.model.integrity import ChecksumBuilder, FlipsOfForwards, flip_largest
from recycle.exec.transport.base import Transport
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
Naming = Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]


class StoredPart(NamedTuple):
    """A part of a stage that a checkpoint has in files of its own, or that hosts compare.

    Attributes:
        kind: what it is, "stage" or "shard", or of the parts that hosts compare "parameters".
        tensors: the live ones.
        named: gives the views of tensors laid out as these, as `Stage.named_state`.
        cuts: as `Stage.cuts`.
    """

    kind: str
    tensors: list[torch.Tensor]
    named: Naming
    cuts: Mapping[str, int | None]


class StatePiece(Protocol):
    """A part of a stage's state that steps by itself: a unit's, or a shard."""

    def state_tensors(self) -> list[torch.Tensor]:
        """All that a new host must copy: the live tensors, in fixed order."""

    def step(self, iteration: int, clip_factor: float) -> None:
        """As `Stage.step`."""

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Stage.named_state`; of a parameter that other pieces have a part of, its part (`piece_name`)."""

    def publish(self) -> None:
        """Write the live parameters that follow from the state."""


def bucket_key(bucket: int, buckets: int) -> int | None:
    """A bucket as `Transport.reduce` is told of it: None for the last."""
    return bucket if bucket < buckets - 1 else None


class StateLayout(ABC):
    """How the optimizer's state of a stage lies over its hosts: what this one has of it, piece by piece.

    Attributes:
        pieces: by number, in order.
        kind: what has a number of its own in the whole model, and files of its own in checkpoints.
        incomplete: numbers of what the worker is still copying. That is stepped with the rest, so what has come of it
            goes on; what has not come yet is of no meaning.
    """

    kind: ClassVar[str]
    pieces: Mapping[int, StatePiece]
    incomplete: frozenset[int] = frozenset()

    @abstractmethod
    def units(self) -> Mapping[int, StatePiece]:
        """What moves with units of the model, in order; complete before the first step."""

    @abstractmethod
    def parts(self, stage: Stage) -> dict[int, tuple[list[torch.Tensor], Naming]]:
        """Live tensors, and how to name those laid out so, of all that has a number of its own."""

    @abstractmethod
    def weights(self) -> list[torch.Tensor]:
        """The live tensors that forwards compute with."""

    @abstractmethod
    def gathered(self) -> list[torch.Tensor]:
        """The live parameters, which come from the hosts that step them; [] where each host steps all."""

    @abstractmethod
    def summed(self, stage: Stage) -> list[torch.Tensor]:
        """The gradients that this host steps with, after the reduction."""

    @abstractmethod
    def reduced(self, stage: Stage) -> Iterator[tuple[int, list[float], Collection[int], int]]:
        """After the reduction: number of the stage, squared norms, which of them are `replicated`, checksum; or that of
        each owned shard, by the shard's number."""

    @abstractmethod
    def bucket(self, stage: Stage, bucket: int, buckets: int) -> list[list[torch.Tensor]]:
        """Of each buffer of gradients that is reduced with a bucket the parts of all shards, in order."""

    @abstractmethod
    def reduce(self, stage: Stage, transport: Transport, bucket: int, buckets: int) -> None:
        """Begin to sum a bucket of the stage's gradients over its hosts; with the last, wait for all."""

    def moments(self) -> list[torch.Tensor]:
        """The live tensors of the optimizer's first moments, which come second in each piece."""
        return [piece.state_tensors()[1] for piece in self.pieces.values()]

    def state_tensors(self) -> list[torch.Tensor]:
        """The live tensors, one piece behind the other."""
        return [tensor for piece in self.pieces.values() for tensor in piece.state_tensors()]

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Stage.named_state`."""
        named: dict[str, torch.Tensor] = {}
        begin = 0
        for piece in self.pieces.values():
            end = begin + len(piece.state_tensors())
            named |= piece.named_state(tensors[begin:end])
            begin = end
        return named


class ReplicatedState(StateLayout):
    """Each host has all of it: pieces are units, and the stage has a number."""

    kind = "stage"

    def units(self) -> Mapping[int, StatePiece]:
        return self.pieces

    def parts(self, stage: Stage) -> dict[int, tuple[list[torch.Tensor], Naming]]:
        return {stage.index: (self.state_tensors(), self.named_state)}

    def gathered(self) -> list[torch.Tensor]:
        return []

    def summed(self, stage: Stage) -> list[torch.Tensor]:
        return stage.gradient_buffers()

    def reduced(self, stage: Stage) -> Iterator[tuple[int, list[float], Collection[int], int]]:
        yield stage.index, stage.gradient_norms_squared(), stage.replicated(), stage.gradient_checksum()

    def bucket(self, stage: Stage, bucket: int, buckets: int) -> list[list[torch.Tensor]]:
        return [[buffer] for buffer in stage.gradient_bucket(bucket, buckets)]

    def reduce(self, stage: Stage, transport: Transport, bucket: int, buckets: int) -> None:
        transport.reduce(stage.index, stage.gradient_bucket(bucket, buckets), bucket_key(bucket, buckets))


class Stage(ABC):
    """What one hosted stage can do.

    Within an iteration each micro-batch goes through `forward`, then `backward`, or `backward_input` and later
    `backward_weight` (or all its parts), in any order between micro-batches. After all of them: a reduction that sums
    `gradient_buffers` in place over the stage's hosts, `gradient_norms_squared`, `step`. The reduction may go bucket by
    bucket, each after the last part for it.

    What is held of a micro-batch, and in which order it may come, is known here; a subclass computes.

    Args:
        job: whose model it is a part of.
        index: the stage s.
        message_shape, message_type: of an activation that crosses a stage boundary.

    Attributes:
        layout: what this host has of the optimizer's state. Where that is sharded the reduction leaves the sum of each
            shard with its owners alone, and what speaks of the state means the owned shards.
    """

    layout: StateLayout

    def __init__(
        self, job: Job, index: int, message_shape: tuple[int, ...], message_type: torch.dtype = torch.float32
    ) -> None:
        self.index = index
        self._is_first, self._is_last = index == 0, index == job.shape.stages - 1
        self._divisor = job.shape.global_micro_batches
        self._message_spec = message_shape, message_type
        self._iteration = 0
        self._evaluates, self._evaluated = False, list[tuple[Any, Any]]()
        self._held: dict[MicroBatch, Any] = {}
        self._waiting: dict[MicroBatch, Any] = {}
        self._flips = FlipsOfForwards()
        self._watched: frozenset[MicroBatch] = frozenset()
        self._made: dict[MicroBatch, ChecksumBuilder] = {}

    def message_spec(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape [sequence, micro_batch_size, hidden] and dtype of an activation that crosses a stage boundary."""
        return self._message_spec

    def begin_iteration(self, step: int) -> None:
        """Take up iteration `step`, from a clean state also when the last one was interrupted anywhere."""
        self._take_up(step, evaluates=False)

    def begin_evaluation(self, batch: int) -> None:
        """Take up a batch of an evaluation. Until the next iteration begins `forward` holds nothing for a backward,
        dropout is off, and what the last stage gives is in `evaluated`."""
        self._take_up(batch, evaluates=True)

    def _take_up(self, iteration: int, evaluates: bool) -> None:
        self._iteration, self._evaluates, self._evaluated = iteration, evaluates, []
        self.watch(())
        self._held.clear()
        self._waiting.clear()

    def evaluated(self) -> list[tuple[float, float]]:
        """(sum of the losses, how many they are) of each micro-batch of the batch; [] but on the last stage."""
        return [(float(total), float(count)) for total, count in self._evaluated]

    def expect(self, iteration: int, program: Sequence[Compute]) -> None:
        """What this stage will be asked for in an iteration, or a batch of an evaluation, in order.

        It may prepare that, and the same of the next iteration.
        """
        return

    def forward(self, micro_batch: MicroBatch, activation: torch.Tensor | None) -> torch.Tensor | None:
        """F. Takes the input (None on stage 0), which must keep its content until the backward.

        Returns the output to send, detached; None on the last stage, whose loss is kept.
        """
        if self._evaluates:
            return self._evaluate(micro_batch, activation)
        output = self._hold(Forward, micro_batch, activation)
        if (making := self._making(micro_batch)) is not None:
            making.activation(output)
        if self._is_last:
            self._add_loss(output)
        return None if self._is_last else output

    def redundant_forward(self, micro_batch: MicroBatch, activation: torch.Tensor | None) -> torch.Tensor:
        """R, on a copy of the stage: F without loss, which that of the stage itself counts. Returns the output."""
        return self._hold(RedundantForward, micro_batch, activation)

    def release(self, micro_batch: MicroBatch) -> None:
        """Free what R holds, since no backward will use it."""
        del self._held[micro_batch]

    def _hold(self, cls: type[Instruction], micro_batch: MicroBatch, activation: torch.Tensor | None) -> torch.Tensor:
        if micro_batch in self._held or micro_batch in self._waiting:
            raise self._misuse(cls, micro_batch, "its activations are already held")
        self._held[micro_batch], output = self._run_forward(cls, micro_batch, activation)
        return output.detach()

    @abstractmethod
    def _run_forward(
        self, cls: type[Instruction], micro_batch: MicroBatch, activation: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor]:
        """Compute F or R: what the backward needs, and the output, on the last stage the loss."""

    @abstractmethod
    def _evaluate(self, micro_batch: MicroBatch, activation: torch.Tensor | None) -> torch.Tensor | None:
        """F in an evaluation."""

    @abstractmethod
    def _add_loss(self, loss: torch.Tensor) -> None:
        """Count the loss of a micro-batch."""

    def watch(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Take checksums of what this iteration's work on these micro-batches makes; of those that run here."""
        self._watched, self._made = frozenset(micro_batches), {}

    def made(self) -> dict[MicroBatch, MicroBatchChecksums]:
        """What was made of the watched micro-batches that ran here; their W is done."""
        return {micro_batch: making.finish() for micro_batch, making in self._made.items()}

    def _making(self, micro_batch: MicroBatch) -> ChecksumBuilder | None:
        """What takes the checksums of a micro-batch's work; None for one that is not watched."""
        return self._made.setdefault(micro_batch, ChecksumBuilder()) if micro_batch in self._watched else None

    def replay(
        self, micro_batch: MicroBatch, activation: torch.Tensor | None, gradient: torch.Tensor | None
    ) -> ChecksumBuilder:
        """REPLAY: F and B of a micro-batch that another host runs, from the same input and gradient by the output.

        Nothing is held or summed, and the loss does not count. Returns what it makes.
        """
        if micro_batch in self._held or micro_batch in self._waiting:
            raise self._misuse(Replay, micro_batch, "this worker runs it itself")
        making = ChecksumBuilder()
        self._run_replay(micro_batch, activation, gradient, making)
        return making

    @abstractmethod
    def _run_replay(
        self,
        micro_batch: MicroBatch,
        activation: torch.Tensor | None,
        gradient: torch.Tensor | None,
        making: ChecksumBuilder,
    ) -> None:
        """Compute REPLAY."""

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """I. Takes the gradient by the output (None on the last stage); leaves the weight gradients to W.

        Returns the gradient by the input; None on stage 0.
        """
        by_input, self._waiting[micro_batch] = self._back(BackwardInput, micro_batch, gradient)
        return by_input

    def backward_weight(self, micro_batch: MicroBatch, bucket: int = 0, buckets: int = 1) -> None:
        """W of a micro-batch whose I is done.

        Args:
            bucket, buckets: only the share that adds to this bucket, of so many; the last has what belongs to none.
        """
        if micro_batch not in self._waiting:
            cls = BackwardWeight if buckets == 1 else WeightPart
            raise self._misuse(cls, micro_batch, "its I has not run, or all its parts are done")
        self._run_weight(micro_batch, self._waiting[micro_batch], bucket, buckets)
        if bucket == buckets - 1:
            del self._waiting[micro_batch]

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """B: I and W in one go, to the same bits."""
        by_input, _ = self._back(Backward, micro_batch, gradient)
        return by_input

    def _back(
        self, cls: type[Instruction], micro_batch: MicroBatch, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, Any]:
        if micro_batch not in self._held:
            raise self._misuse(cls, micro_batch, "its F has not run")
        by_input, rest = self._run_backward(cls, micro_batch, self._held.pop(micro_batch), gradient)
        if (making := self._making(micro_batch)) is not None and by_input is not None:
            making.input_gradient(by_input)
        return by_input, rest

    @abstractmethod
    def _run_backward(
        self, cls: type[Instruction], micro_batch: MicroBatch, held: Any, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, Any]:
        """Compute I or B: the gradient by the input, and what W needs."""

    @abstractmethod
    def _run_weight(self, micro_batch: MicroBatch, rest: Any, bucket: int, buckets: int) -> None:
        """Compute W, or a part of it."""

    @abstractmethod
    def gradient_buffers(self) -> list[torch.Tensor]:
        """The live flat sums of gradients: fp64 when `exact`, fp32 when `fast`; of a multiple of 8 bytes each."""

    @abstractmethod
    def bucket_bounds(self, buckets: int) -> Sequence[int]:
        """Elements of the first of `gradient_buffers` at which its buckets begin and the last one ends, [buckets + 1].

        The same on all hosts. A bucket may be empty.
        """

    def gradient_bucket(self, bucket: int, buckets: int) -> list[torch.Tensor]:
        """The part of `gradient_buffers` that is in a bucket; all but the first of them are in the last one."""
        if buckets == 1:
            return self.gradient_buffers()
        first, *others = self.gradient_buffers()
        begin, end = self.bucket_bounds(buckets)[bucket : bucket + 2]
        return [first[begin:end], *(others if bucket == buckets - 1 else [])]

    def tied_buffers(self) -> list[torch.Tensor]:
        """The live sums of the weight that tied stages share, summed over the hosts of them all; [] without one.

        Tied stages of one worker have these tensors in common.
        """
        return []

    def spoil_gradients(self) -> None:
        """Have the gradients that are summed so far be no numbers, as after a fault of the hardware."""
        for buffer in self.gradient_buffers():
            buffer.fill_(math.nan)

    def flip(self, target: str, bit: int) -> None:
        """Flip one bit of the largest entry of what a fault of the hardware strikes (integrity.py).

        Args:
            target: weight, moment, gradient (the sum), input, activation (of the next forward), or kernel: an
                activation of every forward from now on.
            bit: its number, the lowest is 0; of a shorter number the remainder by its bits.
        """
        # Of a stage's weights the last: every forward uses all of a layer, but few rows of an embedding.
        in_memory: dict[str, Callable[[], list[torch.Tensor]]] = {
            "weight": lambda: self.layout.weights()[::-1],
            "moment": lambda: self.layout.moments()[::-1],
            "gradient": lambda: self.layout.summed(self),
        }
        if target not in in_memory:
            self._flips.order(target, bit)
            return
        for tensor in [tensor for tensor in in_memory[target]() if tensor.numel()][:1]:
            flip_largest(tensor, bit)

    def gradient_checksum(self) -> int:
        """After the reduction: the sum, modulo 2^64, of all sums of gradients read as whole numbers of 64 bits.

        The same on all hosts, and another one wherever a bit is. It does not depend on the order of the entries.
        """
        words = [buffer.view(-1).view(torch.int64).sum() for buffer in (*self.gradient_buffers(), *self.tied_buffers())]
        return int(torch.stack(words).sum().item()) % (1 << 64)

    @abstractmethod
    def loss_sum(self) -> float | None:
        """Exact sum of the losses of the micro-batches that ran here this iteration; None but on the last stage."""

    @abstractmethod
    def gradient_norms_squared(self) -> list[float]:
        """After the reduction: squared norm of each parameter's mean gradient, the same bits on all hosts.

        One at least is not finite when any gradient was not finite or beyond the bound of `exact`. With tensor
        parallelism, of what this tensor rank holds.
        """

    def replicated(self) -> Collection[int]:
        """Places in `gradient_norms_squared` of the numbers that all tensor ranks of a worker have in common."""
        return ()

    def cuts(self) -> Mapping[str, int | None]:
        """Names of `named_state` whose tensors are cut between tensor ranks -> the dimension along which.

        None for a tensor that this tensor rank alone has, whole.
        """
        return {}

    def step(self, iteration: int, clip_factor: float) -> None:
        """After the reduction: one AdamW update with the learning rate of `iteration`."""
        for piece in self.layout.pieces.values():
            piece.step(iteration, clip_factor)

    def state_tensors(self) -> list[torch.Tensor]:
        """The live tensors of all units, one unit behind the other; or of the owned shards."""
        return self.layout.state_tensors()

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Views of `tensors`, laid out as `state_tensors` are, by names that hold in the whole model.

        The names do not depend on how the model is split into stages. Counts that several parameters share appear once
        for each of them.
        """
        return self.layout.named_state(tensors)

    def stored(self) -> dict[int, StoredPart]:
        """What checkpoints are made of, by number: the stage, or the owned shards."""
        kind, cuts = self.layout.kind, self.cuts()
        parts = self.layout.parts(self)
        return {number: StoredPart(kind, tensors, named, cuts) for number, (tensors, named) in parts.items()}

    def compared(self) -> dict[int, StoredPart]:
        """What this host compares with other hosts of the stage that have the same numbers.

        Where all of the state is on each host, the state, by the stage's number. Else each owned shard that is
        complete, by the shard's number, and the live parameters, by `PARAMETERS` and the stage's number.
        """
        compared = self._complete()
        if live := self.layout.gathered():
            compared[PARAMETERS + self.index] = StoredPart("parameters", live, lambda _: {}, {})
        return compared

    def _complete(self) -> dict[int, StoredPart]:
        return {number: part for number, part in self.stored().items() if number not in self.layout.incomplete}

    def state_digest(self) -> str:
        """sha256 over `state_tensors`, as hexadecimal text."""
        return digest(self.state_tensors())

    def digests(self) -> dict[int, str]:
        """`state_digest` by the stage's number; or the digest of each owned shard that is complete by the shard's."""
        return {number: digest(part.tensors) for number, part in self._complete().items()}

    def placement(self) -> Mapping[str, str]:
        """Parameters by their name in the whole model -> the half of the backward that gave their gradient last.

        Those that had none since the stage was built are left out.
        """
        return {}

    def held_micro_batches(self) -> int:
        """Micro-batches that hold memory: from the start of F to the end of W (or B)."""
        return len(self._held) + len(self._waiting)

    def _misuse(self, cls: type[Instruction], micro_batch: MicroBatch, why: str) -> RunError:
        """The error for an instruction that the stage cannot run now."""
        place = f"stage {self.index}, iteration {self._iteration}"
        return RunError(f"{place}: {cls.token} of micro-batch {micro_batch}: {why}")


@torch.no_grad()
def copy_state(target: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copy state tensors into others of the same layout."""
    for into, tensor in zip(target, source, strict=True):
        into.copy_(tensor, non_blocking=True)  # where one is on the host; in order on the device


def buffers_for(
    live: Sequence[torch.Tensor], older: list[torch.Tensor], empty_like: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Buffers for a copy of a state: of older ones those that fit, which are taken out, and else made."""
    there = defaultdict[object, list[torch.Tensor]](list)
    while older:
        there[older[-1].shape, older[-1].dtype].append(older.pop())
    found = [fitting.pop() if (fitting := there[one.shape, one.dtype]) else None for one in live]
    del there  # the memory of what does not fit is for what is made
    return [empty_like(one) if fits is None else fits for one, fits in zip(live, found, strict=True)]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A buffer for a tensor in the host's memory: pinned, as only that is copied while a device computes."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """sha256 over tensors, as hexadecimal text."""
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
