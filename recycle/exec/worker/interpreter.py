"""The interpreter: runs a worker's program, each instruction as `kinds` defines.

`ir.dependencies` defines the inputs of an instruction. A value of the same worker is stored; a value of another worker
was announced by a RECV, and its first consumer waits for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from recycle.exec.device import DeviceProgress, ExecutedInstruction, HostClock, Mark, Streams
from recycle.exec.model.integrity import ChecksumBuilder
from recycle.exec.model.stage import Stage
from recycle.exec.protocol import Computed
from recycle.exec.transport.base import Pending, Transport
from recycle.exec.worker.kinds import RELEASES, run_of
from recycle.ir.dependencies import Value, inputs, needs, produced, tie_groups
from recycle.ir.instruction import (
    CARRIERS,
    BackwardWeight,
    Compute,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    Receive,
    Send,
    WeightPart,
)
from recycle.ir.replays import Checked
from recycle.job.shape import MicroBatch


class Interpreter:
    """Runs programs on the stages of one worker.

    The function of an instruction class gets the interpreter, the instruction and its input tensors (see
    `recycle.ir.kinds.Origin`), None beyond the ends of the model.

    Args:
        model_stages: S, the number of stages of the whole model.
        computed: called inside each compute (F, I, W, B, R, ...), at its end, with its seconds.
        streams: streams of the device on which the halves of an overlapped pair run concurrently.
        device: notified of the work given to the device.
        buckets: number of buckets in which the gradients of each stage are reduced.

    Attributes:
        executed: instructions of the current iteration so far.
        replayed: checksums of replays in the current iteration.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        model_stages: int,
        transport: Transport,
        step: Callable[[int], None],
        computed: Sequence[Callable[[float], object]] = (),
        ties: Sequence[Sequence[int]] = (),
        streams: Streams | None = None,
        device: DeviceProgress | None = None,
        buckets: int = 1,
    ) -> None:
        self.stages, self.model_stages, self.transport, self.step = stages, model_stages, transport, step
        self._computed, self._ties, self._streams, self.buckets = computed, ties, streams, buckets
        self._on_other_stream: set[tuple[int, MicroBatch]] = set()
        self._groups = tie_groups(model_stages, tuple(map(tuple, ties)))
        self._device = device or DeviceProgress(HostClock())
        self.executed: list[ExecutedInstruction] = []
        self.replayed: dict[Checked, ChecksumBuilder] = {}
        self._compute: dict[tuple[int, str], list[tuple[float, ExecutedInstruction]]] = {}
        self._values: dict[Value, torch.Tensor | Pending | None] = {}
        self._program: Sequence[Instruction] | None = None
        self._computes: dict[int, list[Compute]] = {}
        self._extra_reads: dict[Value, int] = {}
        self._reads_left: dict[Value, int] = {}
        self._unreleased: dict[Value, Compute] = {}
        self._summed_groups: set[int] = set()

    def begin(
        self,
        program: Sequence[Instruction],
        iteration: int,
        batch: int | None = None,
        checked: Collection[Checked] = (),
    ) -> None:
        """Start an iteration from a clean state, also after an interrupted iteration.

        Args:
            batch: of an evaluation; `iteration` then only numbers its transfers.
            checked: micro-batches that hosts replay in this iteration.
        """
        self.replayed = {}
        self.executed, self._compute, self._values, self._unreleased, self._summed_groups = [], {}, {}, {}, set()
        if program is not self._program:
            self._program, self._extra_reads = program, self._count_extra_reads(program)
            computes = [instruction for instruction in _unpaired(program) if isinstance(instruction, Compute)]
            self._computes = {stage: [op for op in computes if op.stage == stage] for stage in self.stages}
        self._reads_left = dict(self._extra_reads)
        self._on_other_stream.clear()
        for index, stage in self.stages.items():
            if batch is None:
                stage.begin_iteration(iteration)
            else:
                stage.begin_evaluation(batch)
            if watched := [instruction.micro_batch for instruction in checked if instruction.stage == index]:
                stage.watch(watched)
            stage.expect(iteration if batch is None else batch, self._computes[index])
        self.transport.begin(program, iteration)

    def _count_extra_reads(self, program: Sequence[Instruction]) -> dict[Value, int]:
        reads: Counter[Value] = Counter()
        for piece in _unpaired(program):
            if isinstance(piece, Send | Compute):
                reads.update(value for value in inputs(piece, self.model_stages) if value is not None)
        return {value: count - 1 for value, count in reads.items() if count > 1}

    def execute(self, instruction: Instruction) -> None:
        """Wait for the inputs of one instruction and run it."""
        if isinstance(instruction, OverlappedPair):
            self.overlap(instruction)
        elif isinstance(instruction, Compute):
            on_other_stream = (instruction.stage, instruction.micro_batch) in self._on_other_stream
            self._execute(instruction, self._tensors(instruction), on_other_stream)
            if on_other_stream and self._streams is not None:
                self._streams.join()
        else:
            began = self._device.clock.mark()
            run_of(type(instruction))(self, instruction)
            executed = self._record(instruction, began)
            if isinstance(instruction, OptimizerStep):
                self._device.record_queued(f"{instruction.stage}{instruction.token}", began, executed.ended)

    def overlap(self, pair: OverlappedPair) -> None:
        """Run both halves of a pair, concurrently if the device has streams."""
        if self._streams is None:
            self.execute(pair.forward)
            self.execute(pair.backward)
            return
        halves = [(half, self._tensors(half)) for half in (pair.forward, pair.backward)]
        swapped = (pair.backward.stage, pair.backward.micro_batch) in self._on_other_stream
        if not swapped:
            self._on_other_stream.add((pair.forward.stage, pair.forward.micro_batch))
        # The half on the other stream is launched first, because it waits for everything launched before.
        for half, tensors in halves[::-1] if swapped else halves:
            self._execute(half, tensors, on_other_stream=(half is pair.backward) == swapped)
        self._streams.join()

    def _execute(self, instruction: Compute, tensors: Sequence[torch.Tensor | None], on_other_stream: bool) -> None:
        with self._streams.on_other_stream(tensors) if on_other_stream and self._streams is not None else nullcontext():
            began, started = self._device.clock.mark(), time.monotonic()
            self._run(instruction, tensors)
            for computed in self._computed:
                computed(time.monotonic() - started)
            executed = self._record(instruction, began)
        self._device.record_queued(f"{instruction.stage}{instruction.token}", began, executed.ended)
        if instruction.row.required:
            is_part = isinstance(instruction, WeightPart)
            key = instruction.stage, BackwardWeight.token if is_part else instruction.token
            self._compute.setdefault(key, []).append((1 / self.buckets if is_part else 1.0, executed))

    def _record(self, instruction: Instruction, began: Mark) -> ExecutedInstruction:
        executed = ExecutedInstruction(str(instruction), began, self._device.clock.mark())
        self.executed.append(executed)
        return executed

    @property
    def compute(self) -> list[Computed]:
        """Seconds of the iteration's F, I, W (all parts) and B so far, by stage. The device must be idle."""
        return [
            Computed(
                stage,
                token,
                round(sum(share for share, _ in parts)),
                sum(executed.ended.seconds() - executed.began.seconds() for _, executed in parts),
            )
            for (stage, token), parts in sorted(self._compute.items())
        ]

    def _tensors(self, instruction: Compute) -> list[torch.Tensor | None]:
        values = inputs(instruction, self.model_stages)
        return [None if value is None else self._read(value) for value in values]

    def _read(self, value: Value) -> torch.Tensor | None:
        if self._reads_left.get(value):
            self._reads_left[value] -= 1
            tensor = self._values[value]
        else:
            tensor = self._values.pop(value)
        return tensor() if callable(tensor) and not isinstance(tensor, torch.Tensor) else tensor

    def _run(self, instruction: Compute, tensors: Sequence[torch.Tensor | None]) -> None:
        row = instruction.row
        products = produced(instruction)
        for held in (self._unreleased.pop(value) for value in products if value in self._unreleased):
            RELEASES[type(held)](self, held)
        output: Any = run_of(type(instruction))(self, instruction, *tensors)
        if products and products[0].kind in CARRIERS:
            self._values[products[0]] = output
        if row.released_by is not None:
            kind, offset = row.released_by
            self._unreleased[Value(kind, instruction.stage + offset, instruction.micro_batch)] = instruction

    def send(self, instruction: Send) -> None:
        tensor = self._read(needs(instruction, self.model_stages)[0])
        assert tensor is not None, f"{instruction}: the last stage sends no activation, the first no gradient"
        self.transport.send(instruction, tensor)

    def receive(self, instruction: Receive) -> None:
        """Post the receive; the first consumer waits for it."""
        self._values[needs(instruction, self.model_stages)[0]] = self.transport.receive(instruction)

    def replay(self, instruction: Compute, activation: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
        """Recompute a peer's micro-batch, and keep the checksums of the results."""
        checksums = self.stages[instruction.stage].replay(instruction.micro_batch, activation, gradient)
        self.replayed[Checked(instruction.stage, instruction.micro_batch)] = checksums

    def reduce(self, stage: int) -> None:
        """Sum the weights that the stage shares, then its own gradients (the last bucket), each over their hosts.

        All hosts of a group of tied stages sum its shared weights in one order at their first reduce in it.
        """
        group = int(self._groups[stage])
        if group not in self._summed_groups:
            self._summed_groups.add(group)
            for place, tie in enumerate(self._ties):
                tied = [index for index in tie if index in self.stages and self._groups[index] == group]
                if tied:
                    self.transport.reduce(self.model_stages + place, self.stages[tied[0]].tied_buffers())
        self.begin_reduce(stage, self.buckets - 1)

    def gather(self, stage: int) -> None:
        self.transport.gather(stage, self.stages[stage].layout.weights())

    def begin_reduce(self, stage: int, bucket: int) -> None:
        """Start to sum a bucket of the stage's gradients over its hosts; `reduce` waits for it."""
        summed = self.stages[stage]
        summed.layout.reduce(summed, self.transport, bucket, self.buckets)


def _unpaired(program: Sequence[Instruction]) -> Iterator[Instruction]:
    for instruction in program:
        if isinstance(instruction, OverlappedPair):
            yield from (instruction.forward, instruction.backward)
        else:
            yield instruction
