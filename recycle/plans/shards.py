"""Shards: who owns which part of the optimizer's state, where that is sharded (docs/zero1.md).

The state of a stage is cut into as many shards as the job has pipelines, each with `copies` owners, which all step it;
the first of them sends the parameters. In a healthy run host i of a stage owns shards i, i - 1, …: each host as many as
every other. Of a shard whose owner dies the others go on, and the live host that owns fewest comes to it. So the owners
depend on who is alive and on nothing else, and every process derives them for itself. Two owners of one shard share a
node only where no other node has a live host.

Where layers may move it is the state of each unit that is cut like this (unit_shards.py), and the owners depend on who
hosts the unit by the plan besides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from recycle.errors import JobError
from recycle.job.sections import Sections
from recycle.job.shape import Worker, node_of
from recycle.plans.hosting import Hosts

Owners = tuple[tuple[Worker, ...], ...]
"""Of each shard of a stage, who owns it, the first first."""


def owners_of(
    hosts: Sequence[Worker],
    live: Collection[Worker],
    copies: int,
    nodes: Mapping[Worker, int] | None = None,
    there: Sequence[Worker] | None = None,
) -> Owners:
    """The owners of the shards of a stage, or of a unit of the model.

    Args:
        hosts: of it in a healthy run, dead ones too; as many shards as these.
        live: workers that are alive.
        copies: owners of each shard, as far as there are live hosts.
        nodes: of the hosts; where left out each has its own.
        there: who hosts it by the plan, where others may than `hosts`. Of these who owns a shard in a healthy run does.
    """
    order = list(dict.fromkeys([*hosts, *(there or ())]))
    nodes = nodes or {host: place for place, host in enumerate(order)}
    healthy = _filled([()] * len(hosts), hosts, hosts, copies, nodes)
    present = [host for host in order if host in live and (there is None or host in there)]
    left = [tuple(owner for owner in mine if owner in present) for mine in healthy]
    return _filled(left, order, present, copies, nodes)


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


@dataclass(frozen=True)
class ShardHosts(Hosts):
    """Who holds which shards, with shards in the place of units and of stages.

    Attributes:
        shards: that these are of.
    """

    shards: StageShards = field(kw_only=True, compare=False, repr=False)


class StageShards:
    """The shards of a job's stages, numbered through: shard i of stage s of D pipelines is s * D + i.

    Args:
        job: its `[train]` section says how many copies there are, `[cluster]` which workers share a node.
        hosts: of the stages, dead workers too.

    Attributes:
        count: of the shards of a part of the model, which is a stage here.

    Raises:
        JobError: a stage has not as many hosts as the job has pipelines.
    """

    def __init__(self, job: Sections, hosts: Mapping[int, Sequence[Worker]]) -> None:
        self._begin(job, hosts, {stage: range(stage, stage + 1) for stage in sorted(hosts)})
        for stage, of in self._given.items():
            if len(of) != self.count:
                raise JobError(
                    f"[train] sharded_optimizer: stage {stage} has {len(of)} hosts, dead ones too, and needs one in"
                    f" each of {self.count} pipelines; use another schedule, or set it to false"
                )

    def _begin(self, job: Sections, given: Mapping[int, Sequence[Worker]], stages: Mapping[int, range]) -> None:
        """What all kinds of parts have.

        Args:
            given: part -> its hosts in a healthy run.
            stages: stage -> its parts.
        """
        self._copies, self.count = job.train.optimizer_copies, job.shape.pipelines
        self._given = {part: sorted(of) for part, of in sorted(given.items())}
        self._stages = dict(stages)
        shape, per_node = job.shape, job.cluster.workers_per_node
        self._nodes = node_of(shape, per_node) if per_node > 1 and shape.pipelines > 1 else None

    def number(self, part: int, place: int) -> int:
        """Of a shard, in the whole model."""
        return part * self.count + place

    def place(self, number: int) -> tuple[int, int]:
        """The part of the model that a shard is of, and which of the part's it is."""
        return divmod(number, self.count)

    def stage_of(self, number: int) -> int:
        """The stage that a shard is of. Raises KeyError where no stage has it."""
        part = number // self.count
        return next(stage for stage, parts in self._stages.items() if part in parts)

    def numbers(self, stage: int) -> range:
        """Those of a stage's shards, in order."""
        parts = self._stages[stage]
        return range(self.number(parts.start, 0), self.number(parts.stop, 0))

    def of_stage(self, stage: int, numbers: Iterable[int]) -> list[int]:
        """Those of some shards that are a stage's."""
        mine = self.numbers(stage)
        return [number for number in numbers if number in mine]

    def named(self, number: int) -> str:
        """A shard in words."""
        part, place = self.place(number)
        return f"shard {place} of stage {part}"

    def moves(self, then: StageShards, live: Collection[Worker]) -> bool:
        """Whether one of these workers hosts other parts of the model by the plan of `then` than by this one's."""
        return False

    def owners(self, live: Collection[Worker]) -> dict[int, Owners]:
        """Stage -> the owners of its shards, in order, when these workers are alive."""
        return self._by_stage(self._owners(live))

    def _owners(self, live: Collection[Worker]) -> dict[int, Owners]:
        """Part -> the owners of its shards."""
        return {part: owners_of(hosts, live, self._copies, self._nodes) for part, hosts in self._given.items()}

    def _by_stage(self, of_parts: Mapping[int, Owners]) -> dict[int, Owners]:
        return {
            stage: tuple(owners for part in parts for owners in of_parts[part]) for stage, parts in self._stages.items()
        }

    def owned(self, live: Collection[Worker]) -> ShardHosts:
        """What each live worker owns, with shards in the place of units and of stages."""
        found = {worker: list[int]() for worker in live}
        for part, owners in self._owners(live).items():
            for place, mine in enumerate(owners):
                for owner in mine:
                    found[owner].append(self.number(part, place))
        return self.as_hosts(found)

    def acting(self, live: Collection[Worker], held: Callable[[Worker], Collection[int]]) -> ShardHosts:
        """What each live worker is an owner of without copying anything.

        A shard that all its owners hold is theirs alone. One that some of them have yet to copy is theirs who hold it,
        whoever they are.

        Args:
            held: numbers of the shards that a worker holds.
        """
        holds, found = {worker: set(held(worker)) for worker in live}, {worker: list[int]() for worker in live}
        for part, owners in self._owners(live).items():
            for place, mine in enumerate(owners):
                number = self.number(part, place)
                holders = [host for host in self._hosts(part) if number in holds.get(host, ())]
                for owner in mine if set(mine) <= set(holders) else holders:
                    found[owner].append(number)
        return self.as_hosts(found)

    def _hosts(self, part: int) -> Sequence[Worker]:
        """Who hosts a part by the plan."""
        return self._given[part]

    def in_order(self, live: Collection[Worker], held: Hosts) -> dict[int, Owners]:
        """Stage -> of each of its shards, who of the live workers holds it; first those who are to own it."""
        return self._by_stage(self._in_order(live, held))

    def _in_order(self, live: Collection[Worker], held: Hosts) -> dict[int, Owners]:
        found: dict[int, Owners] = {}
        holders = held.hosts_of_stages()
        for part, owners in self._owners(live).items():
            of_part = []
            for place, mine in enumerate(owners):
                there = [host for host in holders.get(self.number(part, place), []) if host in live]
                of_part.append((*(one for one in mine if one in there), *(one for one in there if one not in mine)))
            found[part] = tuple(of_part)
        return found

    def anything(self) -> ShardHosts:
        """What processes own that begin: each any shard of its stages, since all can make the initial state."""
        everything: dict[Worker, list[int]] = {}
        for part in self._given:
            for host in self._hosts(part):
                everything.setdefault(host, []).extend(self.number(part, place) for place in range(self.count))
        return self.as_hosts(everything)

    def spare(self, live: Collection[Worker], held: Hosts | None = None) -> dict[int, int]:
        """Stage, as the job gives it -> deaths of its hosts, whichever they are, that lose no shard.

        Args:
            held: what workers hold; what they own when left out.
        """
        of_parts = self._in_order(live, held or self.owned(live))
        return {stage: min(len(h) for part in parts for h in of_parts[part]) - 1 for stage, parts in self._told()}

    def _told(self) -> Iterable[tuple[int, range]]:
        """The stages that users know, each with its parts."""
        return self._stages.items()

    def as_hosts(self, shards: Mapping[Worker, Collection[int]]) -> ShardHosts:
        """Workers with the numbers of shards that each has, with shards in the place of units and of stages."""
        count = self.count * (max(self._given, default=-1) + 1)
        ranges = {worker: tuple(_ranges(sorted(mine))) for worker, mine in shards.items()}
        return ShardHosts(count, ranges, {w: tuple(sorted(mine)) for w, mine in shards.items()}, shards=self)


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
