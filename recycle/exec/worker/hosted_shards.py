"""Which shards of its stages' optimizer state one worker holds, from generation to generation.

A generation's workers own the shards that follow from who is alive (`recycle.plans.shards`). What is new to a worker is
copied from an owner before the generation runs, or, where others go on with it meanwhile, while it runs
(recycle.exec.hooks.background_copies). What a worker owns no more it keeps until the generation runs, because others
may copy it, and a generation that comes to nothing loses nothing. What it has copied a part of when a generation ends
is let go of. A process that begins with the initial state, or a checkpoint's, makes any shard from that until its first
generation has run.

Where layers move the worker's stages are built anew around other units. The shards that it keeps outlive the stages
that they were made in: their state is copied into the new ones, and the old ones are let go of once the generation
runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from recycle.errors import RunError
from recycle.exec.model.stage import Stage, StatePiece, copy_state
from recycle.exec.model.state.layouts import Shards
from recycle.exec.protocol import GenerationRecord
from recycle.exec.transport.groups import GroupTransport
from recycle.exec.worker.hosted import Build, Hosted, OwnersOfStages, Read, copied_to, tensors_of
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.job.shape import Worker
from recycle.plans.shards import ShardHosts, held_by, plan_of, shards_of_schedule


def hold_initial(job: Job, schedule: Schedule, stages: Mapping[Worker, Mapping[int, Stage]]) -> OwnersOfStages:
    """Have workers own their shards of the initial state in a run without membership, where nobody fails.

    Args:
        stages: of these workers.

    Returns:
        the owners of each stage's shards.
    """
    shards = shards_of_schedule(job, schedule)
    owned = shards.owned(schedule.live)
    for worker, hosted in stages.items():
        for index, stage in hosted.items():
            of = _of(stage)
            of.own(shards.of_stage(index, owned.stages[worker]))
            of.settled()
    return shards.owners(schedule.live)


class HostedShards(Hosted):
    """The stages of one worker process, and the shards that it holds of them.

    Args:
        job: the job.
        worker: position that the process started in.
        build, cut, indices, holds: as of `Hosted`.
    """

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
        self._wanted: set[int] = set()
        self._behind: set[int] = set()
        self._run: set[int] = set()
        if not holds:
            self._settle()

    def read(self, read: Read) -> None:
        """Fill the shards that are made of the initial state."""
        self._read = read

    def take(self, record: GenerationRecord, schedule: Schedule) -> bool:
        roles = {Worker.parse(process): Worker.parse(role) for process, role in record.roles.items()}
        self._holds: ShardHosts = held_by(
            shards_of_schedule(self._job, schedule, roles), list(self._job.shape.workers()), record.holds
        )
        copied, behind = (copied_to(self.worker, copies) for copies in (record.copies, record.behind))
        return self._own(self._holds.stages[self.worker], copied, behind)

    def _own(self, wanted: Collection[int], copied: Collection[int] = (), behind: Collection[int] = ()) -> bool:
        """Own these shards from now on; whether they are others than before.

        Args:
            wanted: their numbers.
            copied: those that come from other workers.
            behind: of others besides, which come from other workers while the generation runs.

        Raises:
            RunError: one is neither there nor to be copied; a bug.
        """
        self._wanted, self._behind = set(wanted), set(behind)
        for stage in self.stages.values():
            of = _of(stage)
            of.keep_only(self._shards.keys())
            of.incomplete = frozenset()
            if self._initial is None or stage not in self._initial:
                of.settled()
        if lacking := self._wanted - self._shards.keys() - set(copied):
            self._make(lacking)
        owned = self._wanted | self._behind
        for shards_of_stage, numbers in self._by_stage(owned):
            shards_of_stage.own(numbers)
            shards_of_stage.incomplete = frozenset(self._behind)
        for number in self._wanted & self._shards.keys():
            here, there = self._placed_shard(number), self._shards[number]
            if here is not there:  # the stage has been built anew
                copy_state(here.state_tensors(), there.state_tensors())
        return owned != self._run

    def hold_only(self, numbers: Collection[int]) -> None:
        self._wanted, self._behind, self._initial = set(numbers), set(), None
        self._settle()
        for shards, numbers_of_stage in self._by_stage(self._wanted):
            shards.own(numbers_of_stage)
            shards.incomplete = frozenset()
        self._hold_shards()

    def place_held(self) -> bool:
        """Also own the shards again whose state was complete last, if a generation has run; of the same stages."""
        are_others = super().place_held()
        if self._initial is None:
            self._own(self._shards.keys())
            self._hold_shards()
        return are_others

    def confirm(self) -> None:
        super().confirm()
        self._hold_shards()

    def _hold_shards(self) -> None:
        """The state of all wanted shards is complete, and nothing else counts from now on."""
        self._run = self._wanted | self._behind
        for stage in self.stages.values():
            _of(stage).keep_only(self._run)
        self._shards = {number: self._placed_shard(number) for number in self._wanted}
        if self._initial is not None:
            self._initial = None
            self._settle()

    def apart(self, number: int) -> list[torch.Tensor]:
        """What of a shard is copied while a generation runs: `Shards.apart`."""
        return self._shards_with(number).apart(number)

    def complete(self, numbers: Collection[int]) -> None:
        """All of these shards has come while the generation runs."""
        self._shards |= {number: self._placed_shard(number) for number in numbers}
        for shards, numbers_of_stage in self._by_stage(numbers):
            shards.incomplete -= set(numbers_of_stage)

    def held(self, first: int, last: int) -> list[torch.Tensor]:
        if lacking := set(range(first, last)) - self._shards.keys():
            self._make(lacking)
        return tensors_of(self._shards[number] for number in range(first, last))

    def placed(self, first: int, last: int) -> list[torch.Tensor]:
        return tensors_of(self._placed_shard(number) for number in range(first, last))

    def hosts(self, record: GenerationRecord, schedule: Schedule) -> dict[int, list[str]]:
        owners = self._holds.hosts_of_stages()
        return {number: list(map(str, owners[number])) for number in self._holds.stages.get(self.worker, ())}

    def owners(self, record: GenerationRecord) -> tuple[OwnersOfStages, OwnersOfStages]:
        roles = {process: Worker.parse(place) for process, place in record.roles.items()}
        holders = self._holds.shards.in_order([Worker.parse(name) for name in record.live], self._holds)
        comes_to: dict[int, list[Worker]] = {}
        for copy in record.behind:
            for number in range(copy.first, copy.last):
                comes_to.setdefault(number, []).append(roles[copy.worker])
        givers, owners = OwnersOfStages(), OwnersOfStages()
        for stage, of_stage in holders.items():
            givers[stage] = tuple(tuple(roles[str(holder)] for holder in of_shard) for of_shard in of_stage)
            numbered = zip(self._holds.shards.numbers(stage), givers[stage], strict=True)
            owners[stage] = tuple((*of_shard, *comes_to.get(number, ())) for number, of_shard in numbered)
        return owners, givers

    def gather(self, transport: GroupTransport, record: GenerationRecord, is_stale: bool) -> bool:
        if is_stale or plan_of(record.held) != plan_of(record.holds):
            for stage in self.stages.values():
                _of(stage).publish()
            for index, stage in sorted(self.stages.items()):
                transport.gather(index, stage.layout.weights())
        return True

    def _placed_shard(self, number: int) -> StatePiece:
        """A shard as the stage has it that is hosted now."""
        return self._shards_with(number).pieces[number]

    def _make(self, numbers: Collection[int]) -> None:
        """Make the initial state of shards, or read it. Raises RunError where that does not count any more."""
        named = self._holds.shards.named
        if self._initial is None:
            raise RunError(f"{named(min(numbers))} was to come from a worker that does not hold it")
        for stage in self._initial:
            of = _of(stage)
            if mine := [number for number in numbers if number in of.all_numbers]:
                of.own(mine)
                if self._read is not None:
                    self._read([stage])
                self._shards |= {number: of.pieces[number] for number in mine}
        if lacking := set(numbers) - self._shards.keys():
            raise RunError(f"{named(min(lacking))} is of no stage that this process began with")

    def _by_stage(self, numbers: Collection[int]) -> list[tuple[Shards, list[int]]]:
        """The shards of each hosted stage that has some of these, and which."""
        every = [_of(self.stages[index]) for index in sorted(self.stages)]
        by_stage = [(shards, [number for number in numbers if number in shards.all_numbers]) for shards in every]
        return [(shards, numbers_of_stage) for shards, numbers_of_stage in by_stage if numbers_of_stage]

    def _shards_with(self, number: int) -> Shards:
        ((shards, _),) = self._by_stage([number])
        return shards

    def _settle(self) -> None:
        for stage in self.stages.values():
            _of(stage).settled()


def _of(stage: Stage) -> Shards:
    assert isinstance(stage.layout, Shards), "the job shards the optimizer's state"
    return stage.layout
