"""Holdings where the optimizer's state is sharded: what workers hold and copy are shards in the place of units.

Live parameters are on every host of a stage and come from the owners of the shards when a generation begins, so they
are neither held nor copied. Who is to own what depends on who is alive, and where layers move on the plan. After a
death the owners that are left go on at once, and what their new fellows copy comes while the generation runs
(`behind`). Who joins holds nothing and copies before it runs, and so do all others that have anything to copy then,
since they wait in any case. So do all where layers move: they stand still until their stages are built anew, and a
shard may have no holder among those who host its unit next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from recycle.exec.checksums import PARAMETERS
from recycle.exec.leader.holdings import Holdings, copies_between
from recycle.exec.protocol import Copy
from recycle.job.sections import Sections
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts, UnitRange, is_same
from recycle.plans.shard_holders import held_by, plan_of, text_of
from recycle.plans.shards import ShardHosts, StageShards
from recycle.plans.unit_shards import has_unit_shards, shards_of


class ShardHoldings(Holdings):
    """What the workers of one run hold of the shards.

    Args:
        job: says what is cut into shards.
        initial: what processes host that start with the initial state, or a checkpoint's; dead ones too.
        workers: of the run, dead ones too.
    """

    def __init__(self, job: Sections, initial: Hosts, workers: Collection[Worker]) -> None:
        self._job, self._started, self._workers = job, initial, sorted(workers)
        self._given = shards_of(job, initial)
        super().__init__(self._given.anything())

    @property
    def is_restoring(self) -> bool:
        return "~" in self.plan

    @property
    def _shards(self) -> StageShards:
        """As workers host their units now."""
        return _of(self.hosts)

    def wanted(self, hosts: Hosts | None, live: Collection[Worker], holders: Collection[Worker]) -> Hosts | None:
        then = self._shards_by(hosts)
        if set(live) != set(holders) or self._shards.moves(then, live):
            return then.owned(live)
        return then.acting(live, lambda worker: self.hosts.stages.get(worker, ()))

    def _shards_by(self, hosts: Hosts | None) -> StageShards:
        """Those of a plan."""
        moved = has_unit_shards(self._job) and hosts is not None and not is_same(hosts, self._started)
        return shards_of(self._job, hosts) if moved and hosts is not None else self._given

    def behind(self, wanted: Hosts | None, live: Collection[Worker]) -> list[Copy]:
        assert wanted is not None
        return copies_between(_of(wanted).owned(live), live, live, lambda worker: wanted.units[worker])

    def copied(self, worker: Worker, units: UnitRange) -> None:
        shards = {one: set(numbers) for one, numbers in self.hosts.stages.items()}
        shards[worker] |= set(range(*units))
        held = self._shards.as_hosts({one: sorted(numbers) for one, numbers in shards.items()})
        self.take_up(self.name_of(plan_of(self.plan), held), held)

    def name_of(self, digest: str, hosts: Hosts | None) -> str:
        assert hosts is not None
        shards = _of(hosts)
        return text_of(shards, self._workers, hosts, "" if shards is self._given else digest)

    def name_of_states(self, states: Mapping[Worker, Collection[int]]) -> str:
        """A worker has no state of a shard that it is still copying."""
        held = {worker: {number for number in numbers if number < PARAMETERS} for worker, numbers in states.items()}
        if all(held[worker] == set(self.hosts.stages.get(worker, ())) for worker in held):
            return self.plan  # to work the name out takes a second with thousands of workers
        return self.name_of(plan_of(self.plan), self._shards.as_hosts(held))

    @property
    def layout(self) -> str:
        """A shard is the same in all plans."""
        return ""

    def stage_of(self, number: int) -> int:
        return number - PARAMETERS if number >= PARAMETERS else self._shards.stage_of(number)

    def named(self, name: str, plan: Callable[[str], Hosts | None]) -> Hosts | None:
        digest = plan_of(name)
        hosts = plan(digest) if digest else None
        if digest and hosts is None:
            return None
        return held_by(self._shards_by(hosts), self._workers, name)

    def described(self, units: UnitRange) -> str:
        return f"{self._shards.named(units[0])}'s optimizer state has"

    @property
    def are_logged_together(self) -> bool:
        return True

    def event_fields(self, ranges: Sequence[UnitRange]) -> dict[str, Any]:
        return {"shards": [self._shards.named(number) for units in ranges for number in range(*units)]}

    def spare(self, live: Collection[Worker]) -> dict[int, int]:
        return self._shards.spare(live, self.hosts)


def _of(hosts: Hosts) -> StageShards:
    assert isinstance(hosts, ShardHosts)
    return hosts.shards
