"""Which shards of its stages' optimizer state one worker holds, from generation to generation.

A generation's workers own the shards that follow from who is alive (`recycle.plans.shards`). What is new to a worker is
copied from an owner before the generation runs, or, where others go on with it meanwhile, while it runs
(background_copies.py). What a worker owns no more it keeps until the generation runs, because others may copy it, and a
generation that comes to nothing loses nothing. What it has copied a part of when a generation ends is let go of. A
process that begins with the initial state, or a checkpoint's, makes any shard from that until its first generation has
run.

Where layers move the worker's stages are built anew around other units. The shards that it keeps outlive the stages
that they were made in: their state is copied into the new ones, and the old ones are let go of once the generation
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from recycle.errors import RunError
from recycle.exec.model.shards import Shard, Shards
from recycle.exec.model.stage import Stage, copy_state
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.plans.shards import Owners, StageShards
from recycle.plans.unit_shards import shards_of_schedule
from recycle.shape import Worker


def hold_initial(job: Job, schedule: Schedule, stages: Mapping[Worker, Mapping[int, Stage]]) -> dict[int, Owners]:
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
            assert stage.shards is not None
            stage.shards.own(shards.of_stage(index, owned.stages[worker]))
            stage.shards.settled()
    return shards.owners(schedule.live)


class HeldShards:
    """The shards of one worker process.

    Args:
        stages: that it hosts, at any time.
        begins: whether its initial state counts.
        read: called with stages whose shards have been made; fills them from a checkpoint. None for the initial state.
    """

    def __init__(
        self, stages: Mapping[int, Stage], begins: bool, read: Callable[[Collection[Stage]], object] | None = None
    ) -> None:
        self._stages, self._read = stages, read
        self._initial: list[Stage] | None = None
        self._held: dict[int, Shard] = {}
        self._wanted: set[int] = set()
        self._behind: set[int] = set()
        self._run: set[int] = set()
        if begins:
            self._initial = list(stages.values())
        else:
            self._settle()

    def place(
        self,
        shards: StageShards,
        wanted: Collection[int],
        copied: Collection[int],
        behind: Collection[int] = (),
    ) -> bool:
        """Own these shards from now on; whether they are others than before.

        Args:
            shards: of all stages.
            wanted: their numbers.
            copied: those that come from other workers.
            behind: of others besides, which come from other workers while the generation runs.

        Raises:
            RunError: one is neither there nor to be copied; a bug.
        """
        self._shards, self._wanted, self._behind = shards, set(wanted), set(behind)
        for stage in self._stages.values():
            of = _of(stage)
            of.keep_only(self._held.keys())
            of.incomplete = frozenset()
            if self._initial is None or stage not in self._initial:
                of.settled()
        if lacking := self._wanted - self._held.keys() - set(copied):
            self._make(lacking)
        owned = self._wanted | self._behind
        for shards_of_stage, numbers in self._by_stage(owned):
            shards_of_stage.own(numbers)
            shards_of_stage.incomplete = frozenset(self._behind)
        for number in self._wanted & self._held.keys():
            here, there = self._placed(number), self._held[number]
            if here is not there:  # the stage has been built anew
                copy_state(here.state_tensors(), there.state_tensors())
        return owned != self._run

    def hold_only(self, numbers: Collection[int]) -> None:
        """Hold these shards of the hosted stages, whose state is written next: a kept one, which is gone back to."""
        self._wanted, self._behind, self._initial = set(numbers), set(), None
        self._settle()
        for shards, numbers_of_stage in self._by_stage(self._wanted):
            shards.own(numbers_of_stage)
            shards.incomplete = frozenset()
        self.confirm()

    def place_held(self) -> None:
        """Own the shards again whose state was complete last, if a generation has run; of the same stages as then."""
        if self._initial is None:
            self.place(self._shards, self._held.keys(), ())
            self.confirm()

    def confirm(self) -> None:
        """The state of all wanted shards is complete, and nothing else counts from now on."""
        self._run = self._wanted | self._behind
        for stage in self._stages.values():
            _of(stage).keep_only(self._run)
        self._held = {number: self._placed(number) for number in self._wanted}
        if self._initial is not None:
            self._initial = None
            self._settle()

    def apart(self, number: int) -> list[torch.Tensor]:
        """What of a shard is copied while a generation runs: `Shards.apart`."""
        return self._shards_with(number).apart(number)

    def complete(self, numbers: Collection[int]) -> None:
        """All of these shards has come while the generation runs."""
        self._held |= {number: self._placed(number) for number in numbers}
        for shards, numbers_of_stage in self._by_stage(numbers):
            shards.incomplete -= set(numbers_of_stage)

    def held(self, first: int, last: int) -> list[torch.Tensor]:
        """The state of shards from `first` up to but without `last`, to be sent.

        Raises:
            RunError: one is not held.
        """
        if lacking := set(range(first, last)) - self._held.keys():
            self._make(lacking)
        return _tensors([self._held[number] for number in range(first, last)])

    def placed(self, first: int, last: int) -> list[torch.Tensor]:
        """The same of wanted shards, to be received."""
        return _tensors([self._placed(number) for number in range(first, last)])

    def publish(self) -> None:
        """Write the live parameters of the owned shards."""
        for shards, _ in self._by_stage(self._wanted):
            shards.publish()

    def _placed(self, number: int) -> Shard:
        """A shard as the stage has it that is hosted now."""
        return self._shards_with(number).shard(number)

    def _make(self, numbers: Collection[int]) -> None:
        """Make the initial state of shards, or read it. Raises RunError where that does not count any more."""
        if self._initial is None:
            raise RunError(f"{self._shards.named(min(numbers))} was to come from a worker that does not hold it")
        for stage in self._initial:
            of = _of(stage)
            if mine := [number for number in numbers if number in of.all_numbers]:
                of.own(mine)
                if self._read is not None:
                    self._read([stage])
                self._held |= {number: of.shard(number) for number in mine}
        if lacking := set(numbers) - self._held.keys():
            raise RunError(f"{self._shards.named(min(lacking))} is of no stage that this process began with")

    def _by_stage(self, numbers: Collection[int]) -> list[tuple[Shards, list[int]]]:
        """The shards of each hosted stage that has some of these, and which."""
        every = [_of(self._stages[index]) for index in sorted(self._stages)]
        by_stage = [(shards, [number for number in numbers if number in shards.all_numbers]) for shards in every]
        return [(shards, numbers_of_stage) for shards, numbers_of_stage in by_stage if numbers_of_stage]

    def _shards_with(self, number: int) -> Shards:
        ((shards, _),) = self._by_stage([number])
        return shards

    def _settle(self) -> None:
        for stage in self._stages.values():
            _of(stage).settled()


def _of(stage: Stage) -> Shards:
    assert stage.shards is not None
    return stage.shards


def _tensors(shards: Sequence[Shard]) -> list[torch.Tensor]:
    """The states of shards, what has anything in it."""
    return [tensor for shard in shards for tensor in shard.state_tensors() if tensor.numel()]
