"""Which shards of its stages' optimizer state one worker holds, from generation to generation.

A generation's workers own the shards that follow from who is alive (`recycle.plans.shards`). What is new to a worker is
copied from an owner before the generation runs, or, where others go on with it meanwhile, while it runs
(background_copies.py). What a worker owns no more it keeps until the generation runs, because others may copy it, and a
generation that comes to nothing loses nothing. What it has copied a part of when a generation ends is let go of. A
process that begins with the initial state, or a checkpoint's, makes any shard from that until its first generation has
run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from recycle.errors import RunError
from recycle.exec.model.shards import Shards
from recycle.exec.model.stage import Stage
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.plans.shards import Owners, StageShards
from recycle.shape import Worker


def hold_initial(job: Job, schedule: Schedule, stages: Mapping[Worker, Mapping[int, Stage]]) -> dict[int, Owners]:
    """Have workers own their shards of the initial state in a run without membership, where nobody fails.

    Args:
        stages: of these workers.

    Returns:
        the owners of each stage's shards.
    """
    shards = StageShards.of_schedule(job, schedule)
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
        stages: that it hosts.
        begins: whether its initial state counts.
        read: called with stages whose shards have been made; fills them from a checkpoint. None for the initial state.
    """

    def __init__(
        self, stages: Mapping[int, Stage], begins: bool, read: Callable[[Collection[Stage]], object] | None = None
    ) -> None:
        self._stages, self._read, self._begins = stages, read, begins
        self._held: set[int] = set()
        self._wanted: set[int] = set()
        self._behind: set[int] = set()
        self._run: set[int] = set()
        if not begins:
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
            assert stage.shards is not None
            stage.shards.keep_only(self._held)
            stage.shards.incomplete = frozenset()
        new = self._wanted - self._held
        if lacking := new - set(copied):
            self._make(lacking)
        owned = self._wanted | self._behind
        for index, of in self._of_stages(owned):
            of.own(self._shards.of_stage(index, owned))
            of.incomplete = frozenset(self._behind)
        return owned != self._run

    def confirm(self) -> None:
        """The state of all wanted shards is complete, and nothing else counts from now on."""
        self._held, self._run = set(self._wanted), self._wanted | self._behind
        for stage in self._stages.values():
            assert stage.shards is not None
            stage.shards.keep_only(self._run)
        if self._begins:
            self._begins = False
            self._settle()

    def apart(self, number: int) -> list[torch.Tensor]:
        """What of a shard is copied while a generation runs: `Shards.apart`."""
        return self._of(self._shards.place(number)[0]).apart(number)

    def complete(self, numbers: Collection[int]) -> None:
        """All of these shards has come while the generation runs."""
        self._held |= set(numbers)
        for _, of in self._of_stages(numbers):
            of.incomplete -= set(numbers)

    def held(self, first: int, last: int) -> list[torch.Tensor]:
        """The state of shards from `first` up to but without `last`, to be sent.

        Raises:
            RunError: one is not held.
        """
        if lacking := set(range(first, last)) - self._held:
            self._make(lacking)
        return self.placed(first, last)

    def placed(self, first: int, last: int) -> list[torch.Tensor]:
        """The same of wanted shards, to be received."""
        tensors = [
            tensor
            for number in range(first, last)
            for tensor in self._of(self._shards.place(number)[0]).tensors(number)
        ]
        return [tensor for tensor in tensors if tensor.numel()]

    def publish(self) -> None:
        """Write the live parameters of the owned shards."""
        for _, of in self._of_stages(self._wanted):
            of.publish()

    def _make(self, numbers: Collection[int]) -> None:
        """Make the initial state of shards, or read it. Raises RunError where that does not count any more."""
        if not self._begins:
            raise RunError(f"{self._shards.named(min(numbers))} was to come from a worker that does not hold it")
        for stage, of in self._of_stages(numbers):
            of.own(self._shards.of_stage(stage, numbers))
            if self._read is not None:
                self._read([self._stages[stage]])
        self._held |= set(numbers)

    def _of_stages(self, numbers: Collection[int]) -> list[tuple[int, Shards]]:
        """The hosted stages that have some of these shards, each with its own."""
        stages = sorted({self._shards.place(number)[0] for number in numbers})
        return [(stage, self._of(stage)) for stage in stages]

    def _of(self, stage: int) -> Shards:
        shards = self._stages[stage].shards
        assert shards is not None
        return shards

    def _settle(self) -> None:
        for stage in self._stages.values():
            assert stage.shards is not None
            stage.shards.settled()
