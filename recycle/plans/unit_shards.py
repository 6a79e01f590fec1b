"""Shards of units, where layers may move: each unit of the model is cut by itself, and takes its shards along.

Shard i of unit u has the same elements whoever hosts the unit, in whichever stage. So a move copies whole shards
between workers, as a death does, and a record says who holds which in the same words. Its owners follow from who is
alive and from who hosts the unit by the plan: of the hosts in the given stages those who own it in a healthy run, as
far as they host the unit, and then whoever hosts it and owns fewest of its shards. The ring of owners begins with
another host in each unit, so that what a dead worker owned comes to all its peers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from recycle.ir.schedule import Schedule
from recycle.job.sections import Sections
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts, layers_of, stage_units, unit_name
from recycle.plans.shards import Owners, StageShards, owners_of


def has_unit_shards(job: Sections) -> bool:
    """Whether the shards of a job are of units, else of stages."""
    return job.train.sharded_optimizer and (job.planner.layout == "elastic" or job.planner.move)


def shards_of(job: Sections, hosting: Hosts) -> StageShards:
    """The shards of a job.

    Args:
        hosting: who hosts what; where shards are of stages, dead workers too.

    Raises:
        JobError: as `StageShards`.
    """
    return UnitShards(job, hosting) if has_unit_shards(job) else StageShards(job, hosting.hosts_of_stages())


def shards_of_schedule(job: Sections, schedule: Schedule, roles: Mapping[Worker, Worker] | None = None) -> StageShards:
    """The shards of what runs by a schedule.

    Args:
        roles: of each live worker; itself when left out.

    Raises:
        JobError: as `StageShards`.
    """
    if has_unit_shards(job):
        roles = roles or {worker: worker for worker in schedule.live}
        stages = {worker: tuple(sorted(schedule.stages_of(role))) for worker, role in roles.items()}
        return UnitShards(job, Hosts.of(job, stages, schedule.shape.cut))
    hosts: dict[int, list[Worker]] = {}
    for worker, of in zip(schedule.shape.workers(), schedule.placement, strict=True):
        for stage in of:
            hosts.setdefault(stage, []).append(worker)
    return StageShards(job, hosts)


class UnitShards(StageShards):
    """The shards of a model's units, numbered through: shard i of unit u is u * D + i.

    Args:
        job: as of `StageShards`.
        hosting: who hosts what by the plan.

    Attributes:
        hosting: as given.
    """

    def __init__(self, job: Sections, hosting: Hosts) -> None:
        self.hosting, self._units = hosting, hosting.count
        given = Hosts.at_start(job, None)
        stages = {s: range(*units) for s, units in enumerate(stage_units(layers_of(job, hosting.cut)))}
        self._begin(job, _hosts_of_units(given), stages)
        self._of_job = {s: range(*units) for s, units in enumerate(stage_units(layers_of(job)))}
        self._there = _hosts_of_units(hosting)
        self._found: dict[frozenset[Worker], dict[int, Owners]] = {}

    def named(self, number: int) -> str:
        unit, place = self.place(number)
        return f"shard {place} of {unit_name(unit, self._units)}"

    def moves(self, then: StageShards, live: Collection[Worker]) -> bool:
        assert isinstance(then, UnitShards)
        return any(then.hosting.units.get(worker) != self.hosting.units.get(worker) for worker in live)

    def _owners(self, live: Collection[Worker]) -> dict[int, Owners]:
        key = frozenset(live)
        if key not in self._found:
            self._found[key] = {
                unit: owners_of(_turned(hosts, unit), key, self._copies, self._nodes, self._hosts(unit))
                for unit, hosts in self._given.items()
            }
        return self._found[key]

    def _hosts(self, part: int) -> Sequence[Worker]:
        return self._there.get(part, [])

    def _told(self) -> Iterable[tuple[int, range]]:
        return self._of_job.items()


def _turned(hosts: Sequence[Worker], by: int) -> list[Worker]:
    """A ring that begins elsewhere."""
    by %= len(hosts)
    return [*hosts[by:], *hosts[:by]]


def _hosts_of_units(hosting: Hosts) -> dict[int, list[Worker]]:
    found: dict[int, list[Worker]] = {unit: [] for unit in range(hosting.count)}
    for worker in sorted(hosting.units):
        for unit in chain.from_iterable(range(*units) for units in hosting.units[worker]):
            found[unit].append(worker)
    return found
