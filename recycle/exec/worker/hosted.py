"""What one worker hosts: the state of units of the model, and the stages that its plan makes of them.

State belongs to units and outlives stages. When a plan gives the worker other stages, their modules are built anew
around the tensors of the units that it keeps; the state of those that are new to it is allocated, and copied from who
has them. It holds what it had until the generation may run (`confirm`): it can send that meanwhile, and loses nothing
when the generation comes to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from recycle.errors import RunError
from recycle.exec.model.stage import Stage, StatePiece
from recycle.exec.protocol import Copy, GenerationRecord
from recycle.exec.transport.groups import GroupTransport
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker
from recycle.plans.shards import Owners

Build = Callable[..., dict[int, Stage]]
"""Makes stages, as `recycle.exec.model.build.build_stages` does for a job."""
Read = Callable[[Collection[Stage]], object]
"""Fills stages from a checkpoint."""
HostedStages = tuple[tuple[int, ...], tuple[int, ...]]
"""Units of each stage of the model where the layout cuts it, and the stages that a worker hosts of it."""
OwnersOfStages = dict[int, Owners]
"""Stage -> the owners of each of its shards."""


class Hosted:
    """The stages of one worker process.

    Args:
        worker: position that the process started in.
        build: makes them.
        cut, indices: those that the process starts with.
        holds: whether their state counts, as the initial one does; else it is to be copied.

    Attributes:
        stages: by index; always the same object.
        is_confirmed: whether the stages are those of the last generation that ran.
    """

    def __init__(
        self, worker: Worker, build: Build, cut: Sequence[int], indices: Iterable[int], holds: bool = True
    ) -> None:
        self.worker, self._build, self._cut = worker, build, tuple(cut)
        self.stages: dict[int, Stage] = build(sorted(indices), cut=self._cut)
        self._held: dict[int, StatePiece] = {}
        self.is_confirmed = False
        self._confirmed: HostedStages | None = None
        self._stuck: int | None = None
        if holds:
            self._hold_units()

    def read(self, read: Read) -> None:
        """Fill the initial state."""
        read(self.stages.values())

    @property
    def layout(self) -> HostedStages:
        """What is hosted now."""
        return self._cut, tuple(sorted(self.stages))

    def place(self, cut: Sequence[int], indices: Iterable[int]) -> bool:
        """Host these stages from now on; whether they are others than before."""
        indices = sorted(indices)
        if (tuple(cut), tuple(indices)) == self.layout:
            return False
        self.stages.clear()  # the memory of their sums of gradients is for the new ones
        self._cut, self.is_confirmed = tuple(cut), False
        self.stages.update(self._build(indices, cut=self._cut, held=self._held, is_filled=False))
        if self._stuck is not None:
            self.flip("kernel", self._stuck)
        return True

    def flip(self, target: str, bit: int) -> None:
        """Flip a bit on the first of the stages, as `Stage.flip`. A stuck unit is the process's, whatever it hosts."""
        if target == "kernel":
            self._stuck = bit
        if self.stages:
            self.stages[min(self.stages)].flip(target, bit)

    def confirm(self) -> None:
        """The state of all stages is complete, and nothing else counts from now on."""
        self._hold_units()

    def _hold_units(self) -> None:
        self._held = dict(self._placed())
        self._confirmed, self.is_confirmed = self.layout, True

    def place_held(self) -> bool:
        """Host the stages again whose state was complete last; whether they are others than before."""
        if self.is_confirmed or self._confirmed is None:
            return False
        self.place(*self._confirmed)
        self._hold_units()
        return True

    def missing(self) -> set[int]:
        """Units of the stages whose state does not count yet."""
        return {unit for unit, _ in self._placed()} - self._held.keys()

    def take(self, record: GenerationRecord, schedule: Schedule) -> bool:
        """Hold what the record says of the stages; whether these are other parts of them than before.

        Raises:
            RunError: something is neither there nor to be copied; a bug.
        """
        if lacking := self.missing() - copied_to(self.worker, record.copies):
            raise RunError(f"nobody gives worker {self.worker} unit {min(lacking)} of the model")
        return False

    def hold_only(self, numbers: Collection[int]) -> None:
        """Hold these parts of the stages, whose state is written next: a kept one, which is gone back to."""

    def hosts(self, record: GenerationRecord, schedule: Schedule) -> dict[int, list[str]]:
        """Number of each stage, or shard, that this worker holds -> the processes that do."""
        processes = {place: process for process, place in record.roles.items()}
        return {index: [processes[str(role)] for role in schedule.hosts(index)] for index in self.stages}

    def owners(self, record: GenerationRecord) -> tuple[OwnersOfStages, OwnersOfStages]:
        """The roles of the owners of shards in this generation; and of those that hold them from the beginning."""
        return {}, {}

    def gather(self, transport: GroupTransport, record: GenerationRecord, is_stale: bool) -> bool:
        """Have everybody's live parameters be those of the committed iteration, unless they are with all. Where layers
        move, stages are built anew without them.

        Args:
            is_stale: live parameters of some process are not.

        Returns:
            whether hosts gather live parameters at all.
        """
        return False

    def held(self, first: int, last: int) -> list[torch.Tensor]:
        """The state of units, or shards, from `first` up to but without `last`, to be sent.

        Raises:
            RunError: one is not held.
        """
        units = range(first, last)
        if lacking := [unit for unit in units if unit not in self._held]:
            raise RunError(f"unit {lacking[0]} of the model was to be copied from a worker that does not hold it")
        return tensors_of(self._held[unit] for unit in units)

    def placed(self, first: int, last: int) -> list[torch.Tensor]:
        """The same of its stages, to be received."""
        of = dict(self._placed())
        return tensors_of(of[unit] for unit in range(first, last))

    def _placed(self) -> Iterator[tuple[int, StatePiece]]:
        for stage in self.stages.values():
            yield from stage.layout.units().items()


def copied_to(worker: Worker, copies: Iterable[Copy]) -> set[int]:
    """What a worker copies from others."""
    mine = (copy for copy in copies if copy.worker == str(worker))
    return {number for copy in mine for number in range(copy.first, copy.last)}


def tensors_of(states: Iterable[StatePiece]) -> list[torch.Tensor]:
    """Those that have anything in them."""
    return [tensor for state in states for tensor in state.state_tensors() if tensor.numel()]
