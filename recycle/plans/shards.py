"""Shards: who owns which part of a stage's optimizer state, where that is sharded (docs/zero1.md).

The state of a stage is cut into as many shards as the stage has hosts, dead ones too. Each shard has `copies` owners,
which all step it; the first of them sends the parameters. In a healthy run host i of a stage owns shards i, i - 1, …:
each host as many as every other. Of a shard whose owner dies the others go on, and the live host that owns fewest comes
to it. So the owners depend on who is alive and on nothing else, and every process derives them for itself. Two owners
of one shard share a node only where no other node has a live host of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from recycle.errors import JobError
from recycle.ir.schedule import Schedule
from recycle.nodes import node_of
from recycle.plans.hosting import Hosts
from recycle.sections import Sections
from recycle.shape import Worker

Owners = tuple[tuple[Worker, ...], ...]
"""Of each shard of a stage, who owns it, the first first."""


def owners_of(
    hosts: Sequence[Worker], live: Collection[Worker], copies: int, nodes: Mapping[Worker, int] | None = None
) -> Owners:
    """The owners of a stage's shards.

    Args:
        hosts: of the stage, dead ones too; as many shards as these.
        live: workers that are alive.
        copies: owners of each shard, as far as there are live hosts.
        nodes: of the hosts; where left out each has its own.
    """
    nodes = nodes or {host: place for place, host in enumerate(hosts)}
    healthy = _filled([()] * len(hosts), hosts, hosts, copies, nodes)
    left = [tuple(owner for owner in mine if owner in live) for mine in healthy]
    return _filled(left, hosts, [host for host in hosts if host in live], copies, nodes)


def _filled(
    owned: Sequence[tuple[Worker, ...]],
    hosts: Sequence[Worker],
    live: Sequence[Worker],
    copies: int,
    nodes: Mapping[Worker, int],
) -> Owners:
    """The owners with live hosts added until each shard has `copies`, or all of them."""
    found = list(owned)
    load = {host: sum(host in mine for mine in found) for host in live}
    place_of = {host: place for place, host in enumerate(hosts)}
    for owners in range(min(copies, len(live))):
        for place, mine in enumerate(found):
            if len(mine) > owners:
                continue
            taken = {nodes[owner] for owner in mine}
            chosen = min(
                (host for host in live if host not in mine),
                key=lambda host: (nodes[host] in taken, load[host], (place_of[host] - place) % len(hosts)),
            )
            found[place] = (*mine, chosen)
            load[chosen] += 1
    return tuple(found)


def shard_name(count: int, number: int) -> str:
    """A shard in words, of its number in a model with so many shards of each stage."""
    stage, place = divmod(number, count)
    return f"shard {place} of stage {stage}"


class StageShards:
    """The shards of a job's stages, numbered through: shard i of stage s of H hosts each is s * H + i.

    Args:
        job: its `[train]` section says how many copies there are, `[cluster]` which workers share a node.
        hosts: of the stages, dead workers too.

    Raises:
        JobError: a stage has not as many hosts as the job has pipelines.
    """

    def __init__(self, job: Sections, hosts: Mapping[int, Sequence[Worker]]) -> None:
        self._copies, self.count = job.train.optimizer_copies, job.shape.pipelines
        self._hosts = {stage: sorted(of) for stage, of in sorted(hosts.items())}
        for stage, of in self._hosts.items():
            if len(of) != self.count:
                raise JobError(
                    f"[train] sharded_optimizer: stage {stage} has {len(of)} hosts, dead ones too, and needs one in"
                    f" each of {self.count} pipelines; use another schedule, or set it to false"
                )
        shape, per_node = job.shape, job.cluster.workers_per_node
        self._nodes = node_of(shape, per_node) if per_node > 1 and shape.pipelines > 1 else None

    def number(self, stage: int, place: int) -> int:
        """Of a shard, in the whole model."""
        return stage * self.count + place

    def place(self, number: int) -> tuple[int, int]:
        """The stage of a shard, and which of the stage's it is."""
        return divmod(number, self.count)

    def of_stage(self, stage: int, numbers: Iterable[int]) -> list[int]:
        """Those of some shards that are a stage's."""
        return [number for number in numbers if number // self.count == stage]

    @classmethod
    def of_schedule(cls, job: Sections, schedule: Schedule) -> StageShards:
        """Of the stages of a schedule, whose dead workers hosted some too."""
        hosts: dict[int, list[Worker]] = {}
        for worker, stages in zip(schedule.shape.workers(), schedule.placement, strict=True):
            for stage in stages:
                hosts.setdefault(stage, []).append(worker)
        return cls(job, hosts)

    def named(self, number: int) -> str:
        """A shard in words."""
        return shard_name(self.count, number)

    def owners(self, live: Collection[Worker]) -> dict[int, Owners]:
        """Stage -> the owners of its shards when these workers are alive."""
        return {stage: owners_of(hosts, live, self._copies, self._nodes) for stage, hosts in self._hosts.items()}

    def owned(self, live: Collection[Worker]) -> Hosts:
        """What each live worker owns, with shards in the place of units and of stages."""
        nothing: dict[Worker, Sequence[int]] = dict.fromkeys(live, ())
        return self.as_hosts(nothing | self._of_each(self.owners(live)))

    def acting(self, live: Collection[Worker], held: Callable[[Worker], Collection[int]]) -> Hosts:
        """What each live worker is an owner of without copying anything.

        A shard that all its owners hold is theirs alone. One that some of them have yet to copy is theirs who hold it,
        whoever they are.

        Args:
            held: numbers of the shards that a worker holds.
        """
        holds, found = {worker: set(held(worker)) for worker in live}, {worker: list[int]() for worker in live}
        for stage, owners in self.owners(live).items():
            for place, mine in enumerate(owners):
                number = self.number(stage, place)
                holders = [host for host in self._hosts[stage] if number in holds.get(host, ())]
                for owner in mine if set(mine) <= set(holders) else holders:
                    found[owner].append(number)
        return self.as_hosts(found)

    def in_order(self, live: Collection[Worker], held: Hosts) -> dict[int, Owners]:
        """Stage -> of each of its shards, who of the live workers holds it; first those who are to own it."""
        found: dict[int, Owners] = {}
        holders = held.hosts_of_stages()
        for stage, owners in self.owners(live).items():
            of_stage = []
            for place, mine in enumerate(owners):
                there = [host for host in holders.get(self.number(stage, place), []) if host in live]
                of_stage.append((*(one for one in mine if one in there), *(one for one in there if one not in mine)))
            found[stage] = tuple(of_stage)
        return found

    def anything(self) -> Hosts:
        """What processes own that begin: each any shard of its stages, since all can make the initial state."""
        everything: dict[Worker, list[int]] = {}
        for stage, hosts in self._hosts.items():
            for host in hosts:
                everything.setdefault(host, []).extend(self.number(stage, place) for place in range(self.count))
        return self.as_hosts(everything)

    def spare(self, live: Collection[Worker], held: Hosts | None = None) -> dict[int, int]:
        """Stage -> deaths of its hosts, whichever they are, that lose no shard.

        Args:
            held: what workers hold; what they own when left out.
        """
        held = held or self.owned(live)
        return {stage: min(map(len, holders)) - 1 for stage, holders in self.in_order(live, held).items()}

    def _of_each(self, owners: Mapping[int, Owners]) -> dict[Worker, Sequence[int]]:
        found: dict[Worker, list[int]] = {}
        for stage, of_stage in owners.items():
            for place, mine in enumerate(of_stage):
                for owner in mine:
                    found.setdefault(owner, []).append(self.number(stage, place))
        return dict(found)

    def as_hosts(self, shards: Mapping[Worker, Collection[int]]) -> Hosts:
        """Workers with the numbers of shards that each has, with shards in the place of units and of stages."""
        count = self.count * (max(self._hosts, default=-1) + 1)
        ranges = {worker: tuple(_ranges(sorted(mine))) for worker, mine in shards.items()}
        return Hosts(count, ranges, {worker: tuple(sorted(mine)) for worker, mine in shards.items()})


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as ranges, each with its end behind the last."""
    begin = end = -1
    for number in numbers:
        if number != end:
            if begin >= 0:
                yield begin, end
            begin = number
        end = number + 1
    if begin >= 0:
        yield begin, end
