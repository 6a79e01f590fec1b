"""Stages that a worker hosts, and the state of their units or shards.

State belongs to units: when a plan changes the worker's stages, modules are rebuilt around the tensors of the units
that it keeps. Old state is kept until the generation runs (`confirm`), because others may copy it. A process that
starts from the initial state or a checkpoint can create any shard until its first generation has run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

from recycle.errors import RunError
from recycle.exec.model.stage import Stage, StatePiece, copy_state
from recycle.exec.model.state.layouts import Shards
from recycle.exec.protocol import Copy, GenerationRecord
from recycle.exec.transport.groups import GroupTransport
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.job.shape import Worker
from recycle.plans.shards import Owners, ShardHosts, held_by, plan_of, shards_of_schedule

Build = Callable[..., dict[int, Stage]]
"""Builds stages, as `recycle.exec.model.build.build_stages` does for a job."""
Read = Callable[[Collection[Stage]], object]
"""Fills stages from a checkpoint."""
HostedLayout = tuple[tuple[int, ...], tuple[int, ...]]
"""Units of each stage of the model in this layout, and the stages that a worker hosts."""
OwnersOfStages = dict[int, Owners]
"""Stage -> the owners of each of its shards."""


class LocalStages:
    """The stages of one worker process.

    Args:
        holds: whether the initial state is valid; otherwise it must be copied.

    Attributes:
        stages: by index; always the same dict.
        is_confirmed: whether the last generation that ran had these stages.
    """

    def __init__(
        self, worker: Worker, build: Build, cut: Sequence[int], indices: Iterable[int], holds: bool = True
    ) -> None:
        self.worker, self._build, self._cut = worker, build, tuple(cut)
        self.stages: dict[int, Stage] = build(sorted(indices), cut=self._cut)
        self._unit_state: dict[int, StatePiece] = {}
        self.is_confirmed = False
        self._confirmed: HostedLayout | None = None
        self._kernel_flip: int | None = None
        if holds:
            self._record_units()

    def read(self, read: Read) -> None:
        read(self.stages.values())

    @property
    def layout(self) -> HostedLayout:
        return self._cut, tuple(sorted(self.stages))

    def place(self, cut: Sequence[int], indices: Iterable[int]) -> bool:
        """Host other stages. Returns whether the stages changed."""
        indices = sorted(indices)
        if (tuple(cut), tuple(indices)) == self.layout:
            return False
        self.stages.clear()  # free their gradient sums before building new stages
        self._cut, self.is_confirmed = tuple(cut), False
        self.stages.update(self._build(indices, cut=self._cut, held=self._unit_state, is_filled=False))
        if self._kernel_flip is not None:
            self.flip("kernel", self._kernel_flip)
        return True

    def flip(self, target: str, bit: int) -> None:
        """Flip a bit on the first stage, as `Stage.flip`. A kernel flip stays with the process when stages change."""
        if target == "kernel":
            self._kernel_flip = bit
        if self.stages:
            self.stages[min(self.stages)].flip(target, bit)

    def confirm(self) -> None:
        """Mark the state of all stages as complete, and drop all other state."""
        self._record_units()

    def _record_units(self) -> None:
        self._unit_state = dict(self._placed_units())
        self._confirmed, self.is_confirmed = self.layout, True

    def restore_confirmed(self) -> bool:
        """Host the stages of the last confirmed state again. Returns whether the stages changed."""
        if self.is_confirmed or self._confirmed is None:
            return False
        self.place(*self._confirmed)
        self._record_units()
        return True

    def missing(self) -> set[int]:
        return {unit for unit, _ in self._placed_units()} - self._unit_state.keys()

    def assign(self, record: GenerationRecord, schedule: Schedule) -> bool:
        """Own the units or shards that the record assigns. Returns whether the owned shards changed.

        Raises RunError if a unit or shard is neither held nor copied; a bug.
        """
        if lacking := self.missing() - copied_to(self.worker, record.copies):
            raise RunError(f"worker {self.worker} lacks unit {min(lacking)} of the model, and no worker sends it")
        return False

    def own_only(self, numbers: Collection[int]) -> None:
        """Own exactly these shards, before a snapshot is restored into them."""

    def hosts(self, record: GenerationRecord, schedule: Schedule) -> dict[int, list[str]]:
        """Number of each stage or shard of this worker -> the processes that hold it."""
        processes = {place: process for process, place in record.roles.items()}
        return {index: [processes[str(role)] for role in schedule.hosts(index)] for index in self.stages}

    def owners(self, record: GenerationRecord) -> tuple[OwnersOfStages, OwnersOfStages]:
        """Roles of the owners of each shard, including background receivers, and of the initial holders."""
        return {}, {}

    def gather(self, transport: GroupTransport, record: GenerationRecord, is_stale: bool) -> bool:
        """All-gather parameters of the committed step, unless every worker has them; False if hosts never gather."""
        return False

    def send(self, transport: GroupTransport, peer: Worker, copy: Copy) -> None:
        transport.send_state(peer, self.tensors_to_send(copy.first, copy.last))

    def receive(self, transport: GroupTransport, peer: Worker, copy: Copy) -> int:
        """Return the number of bytes."""
        tensors = self.tensors_to_receive(copy.first, copy.last)
        transport.receive_state(peer, tensors)
        return sum(tensor.nbytes for tensor in tensors)

    def tensors_to_send(self, first: int, last: int) -> list[torch.Tensor]:
        """State of the units, or shards, in [first, last), to send. Raises RunError if one is not held."""
        units = range(first, last)
        if lacking := [unit for unit in units if unit not in self._unit_state]:
            raise RunError(
                f"unit {lacking[0]} of the model is requested from worker {self.worker}, which does not hold it"
            )
        return tensors_of(self._unit_state[unit] for unit in units)

    def tensors_to_receive(self, first: int, last: int) -> list[torch.Tensor]:
        """Tensors of the hosted units, or shards, in [first, last), to receive into."""
        pieces = dict(self._placed_units())
        return tensors_of(pieces[unit] for unit in range(first, last))

    def _placed_units(self) -> Iterator[tuple[int, StatePiece]]:
        for stage in self.stages.values():
            yield from stage.layout.units().items()


def copied_to(worker: Worker, copies: Iterable[Copy]) -> set[int]:
    own_copies = (copy for copy in copies if copy.worker == str(worker))
    return {number for copy in own_copies for number in range(copy.first, copy.last)}


def tensors_of(states: Iterable[StatePiece]) -> list[torch.Tensor]:
    return [tensor for state in states for tensor in state.state_tensors() if tensor.numel()]


def own_initial_shards(job: Job, schedule: Schedule, stages: Mapping[Worker, Mapping[int, Stage]]) -> OwnersOfStages:
    """Give workers their shards of the initial state, in a run without membership. Returns the owners."""
    shards = shards_of_schedule(job, schedule)
    owned = shards.owned(schedule.live)
    for worker, hosted in stages.items():
        for index, stage in hosted.items():
            layout = _shards_of(stage)
            layout.own(shards.of_stage(index, owned.stages[worker]))
            layout.settled()
    return shards.owners(schedule.live)


class LocalShards(LocalStages):
    """The stages of one worker process, with sharded optimizer state. Arguments as for `LocalStages`."""

    def __init__(
        self,
        job: Job,
        worker: Worker,
        build: Build,
        cut: Sequence[int],
        indices: Iterable[int],
        holds: bool = True,
    ) -> None:
        super().__init__(worker, build, cut, indices, holds)
        self._job = job
        self._read: Read | None = None
        self._initial: list[Stage] | None = list(self.stages.values()) if holds else None
        self._shards: dict[int, StatePiece] = {}
        self._assigned: set[int] = set()
        self._in_background: set[int] = set()
        self._run: set[int] = set()
        if not holds:
            self._settle_shards()

    def read(self, read: Read) -> None:
        """Register the function that fills shards created from the initial state."""
        self._read = read

    def assign(self, record: GenerationRecord, schedule: Schedule) -> bool:
        roles = {Worker.parse(process): Worker.parse(role) for process, role in record.roles.items()}
        self._holds: ShardHosts = held_by(
            shards_of_schedule(self._job, schedule, roles), list(self._job.shape.workers()), record.holds
        )
        copied, behind = (copied_to(self.worker, copies) for copies in (record.copies, record.behind))
        return self._own(self._holds.stages[self.worker], copied, behind)

    def _own(self, wanted: Collection[int], copied: Collection[int] = (), in_background: Collection[int] = ()) -> bool:
        self._assigned, self._in_background = set(wanted), set(in_background)
        for stage in self.stages.values():
            layout = _shards_of(stage)
            layout.keep_only(self._shards.keys())
            layout.incomplete = frozenset()
            if self._initial is None or stage not in self._initial:
                layout.settled()
        if lacking := self._assigned - self._shards.keys() - set(copied):
            self._create_shards(lacking)
        owned = self._assigned | self._in_background
        for shards_of_stage, numbers in self._by_stage(owned):
            shards_of_stage.own(numbers)
            shards_of_stage.incomplete = frozenset(self._in_background)
        for number in self._assigned & self._shards.keys():
            placed, kept = self._placed_shard(number), self._shards[number]
            if placed is not kept:  # the stage has been rebuilt
                copy_state(placed.state_tensors(), kept.state_tensors())
        return owned != self._run

    def own_only(self, numbers: Collection[int]) -> None:
        self._assigned, self._in_background, self._initial = set(numbers), set(), None
        self._settle_shards()
        for shards, numbers_of_stage in self._by_stage(self._assigned):
            shards.own(numbers_of_stage)
            shards.incomplete = frozenset()
        self._record_shards()

    def restore_confirmed(self) -> bool:
        """Also own the shards of the last complete state again, if a generation has run."""
        are_others = super().restore_confirmed()
        if self._initial is None:
            self._own(self._shards.keys())
            self._record_shards()
        return are_others

    def confirm(self) -> None:
        super().confirm()
        self._record_shards()

    def _record_shards(self) -> None:
        self._run = self._assigned | self._in_background
        for stage in self.stages.values():
            _shards_of(stage).keep_only(self._run)
        self._shards = {number: self._placed_shard(number) for number in self._assigned}
        if self._initial is not None:
            self._initial = None
            self._settle_shards()

    def background_tensors(self, number: int) -> list[torch.Tensor]:
        """The tensors of a shard that are copied while a generation runs (`Shards.apart`)."""
        return self._shards_with(number).apart(number)

    def complete(self, numbers: Collection[int]) -> None:
        self._shards |= {number: self._placed_shard(number) for number in numbers}
        for shards, numbers_of_stage in self._by_stage(numbers):
            shards.incomplete -= set(numbers_of_stage)

    def tensors_to_send(self, first: int, last: int) -> list[torch.Tensor]:
        if lacking := set(range(first, last)) - self._shards.keys():
            self._create_shards(lacking)
        return tensors_of(self._shards[number] for number in range(first, last))

    def tensors_to_receive(self, first: int, last: int) -> list[torch.Tensor]:
        return tensors_of(self._placed_shard(number) for number in range(first, last))

    def hosts(self, record: GenerationRecord, schedule: Schedule) -> dict[int, list[str]]:
        owners = self._holds.hosts_of_stages()
        return {number: list(map(str, owners[number])) for number in self._holds.stages.get(self.worker, ())}

    def owners(self, record: GenerationRecord) -> tuple[OwnersOfStages, OwnersOfStages]:
        roles = {process: Worker.parse(place) for process, place in record.roles.items()}
        holders = self._holds.shards.in_order([Worker.parse(name) for name in record.live], self._holds)
        receivers: dict[int, list[Worker]] = {}
        for copy in record.behind:
            for number in range(copy.first, copy.last):
                receivers.setdefault(number, []).append(roles[copy.worker])
        givers, owners = OwnersOfStages(), OwnersOfStages()
        for stage, of_stage in holders.items():
            givers[stage] = tuple(tuple(roles[str(holder)] for holder in of_shard) for of_shard in of_stage)
            numbered = zip(self._holds.shards.numbers(stage), givers[stage], strict=True)
            owners[stage] = tuple((*of_shard, *receivers.get(number, ())) for number, of_shard in numbered)
        return owners, givers

    def gather(self, transport: GroupTransport, record: GenerationRecord, is_stale: bool) -> bool:
        if is_stale or plan_of(record.held) != plan_of(record.holds):
            for stage in self.stages.values():
                _shards_of(stage).publish()
            for index, stage in sorted(self.stages.items()):
                transport.gather(index, stage.layout.weights())
        return True

    def _placed_shard(self, number: int) -> StatePiece:
        return self._shards_with(number).pieces[number]

    def _create_shards(self, numbers: Collection[int]) -> None:
        named = self._holds.shards.named
        if self._initial is None:
            raise RunError(f"{named(min(numbers))} is requested from worker {self.worker}, which does not hold it")
        for stage in self._initial:
            layout = _shards_of(stage)
            if own_numbers := [number for number in numbers if number in layout.all_numbers]:
                layout.own(own_numbers)
                if self._read is not None:
                    self._read([stage])
                self._shards |= {number: layout.pieces[number] for number in own_numbers}
        if lacking := set(numbers) - self._shards.keys():
            raise RunError(f"{named(min(lacking))} does not belong to a stage that worker {self.worker} started with")

    def _by_stage(self, numbers: Collection[int]) -> list[tuple[Shards, list[int]]]:
        layouts = [_shards_of(self.stages[index]) for index in sorted(self.stages)]
        by_stage = [(shards, [number for number in numbers if number in shards.all_numbers]) for shards in layouts]
        return [(shards, own_numbers) for shards, own_numbers in by_stage if own_numbers]

    def _shards_with(self, number: int) -> Shards:
        ((shards, _),) = self._by_stage([number])
        return shards

    def _settle_shards(self) -> None:
        for stage in self.stages.values():
            _shards_of(stage).settled()


def _shards_of(stage: Stage) -> Shards:
    assert isinstance(stage.layout, Shards), "the job shards the optimizer's state"
    return stage.layout
