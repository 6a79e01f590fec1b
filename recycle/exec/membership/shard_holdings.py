"""Holdings where the optimizer's state is sharded: what workers hold and copy are shards in the place of units.

Live parameters are on every host of a stage and come from the owners of the shards when a generation begins, so they
are neither held nor copied. Who is to own what depends on who is alive alone. After a death the owners that are left go
on at once, and what their new fellows copy comes while the generation runs (`behind`). Who joins holds nothing and
copies before it runs, and so do all others that have anything to copy then, since they wait in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from recycle.exec.membership.holdings import Holdings, copies_between
from recycle.exec.membership.messages import Copy
from recycle.plans.hosting import Hosts, UnitRange
from recycle.plans.shard_holders import held_by, text_of
from recycle.plans.shards import StageShards
from recycle.shape import Worker


class ShardHoldings(Holdings):
    """What the workers of one run hold of the shards.

    Args:
        shards: of all stages.
        workers: of the run, dead ones too.
    """

    def __init__(self, shards: StageShards, workers: Collection[Worker]) -> None:
        self._shards, self._workers = shards, sorted(workers)
        super().__init__(shards.anything())

    @property
    def is_restoring(self) -> bool:
        return "~" in self.plan

    def wanted(self, hosts: Hosts | None, live: Collection[Worker], holders: Collection[Worker]) -> Hosts | None:
        if set(live) != set(holders):
            return self._shards.owned(live)
        return self._shards.acting(live, lambda worker: self.hosts.stages.get(worker, ()))

    def behind(self, wanted: Hosts | None, live: Collection[Worker]) -> list[Copy]:
        assert wanted is not None
        return copies_between(self._shards.owned(live), live, live, lambda worker: wanted.units[worker])

    def copied(self, worker: Worker, units: UnitRange) -> None:
        shards = {one: set(numbers) for one, numbers in self.hosts.stages.items()}
        shards[worker] |= set(range(*units))
        held = self._shards.as_hosts({one: sorted(numbers) for one, numbers in shards.items()})
        self.take_up(self.name_of("", held), held)

    def name_of(self, digest: str, hosts: Hosts | None) -> str:
        assert hosts is not None
        return text_of(self._shards, self._workers, hosts)

    def named(self, name: str, plan: Callable[[str], Hosts | None]) -> Hosts | None:
        return held_by(self._shards, self._workers, name)

    def described(self, units: UnitRange) -> str:
        return f"{self._shards.named(units[0])}'s optimizer state has"

    def event_fields(self, units: UnitRange) -> dict[str, Any]:
        return {"shards": [self._shards.named(number) for number in range(*units)]}

    def spare(self, live: Collection[Worker]) -> dict[int, int]:
        return self._shards.spare(live, self.hosts)
