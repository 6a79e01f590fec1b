"""Shards: who owns which part of the optimizer's state, where that is sharded (docs/guides/sharded-optimizer.md).

The state of a stage is cut into as many shards as the job has pipelines, each with `copies` owners, which all step it;
the first of them sends the parameters. In a healthy run host i of a stage owns shards i, i - 1, …: each host as many as
every other. Of a shard whose owner dies the others go on, and the live host that owns fewest comes to it. So the owners
depend on who is alive and on nothing else, and every process derives them for itself. Two owners of one shard share a
node only where no other node has a live host.

Where layers may move it is the state of each unit that is cut like this, and the owners depend on who
hosts the unit by the plan besides.

Shard i of unit u has the same elements whoever hosts the unit, in whichever stage. So a move copies whole shards
between workers, as a death does, and a record says who holds which in the same words. Its owners follow from who is
alive and from who hosts the unit by the plan: of the hosts in the given stages those who own it in a healthy run, as
far as they host the unit, and then whoever hosts it and owns fewest of its shards. The ring of owners begins with
another host in each unit, so that what a dead worker owned comes to all its peers.

The record of a generation says in one line of text who holds which shards (`text_of`, `held_by`).
Who is to own a shard follows from who is alive, and in the end its owners hold it. Between a death and the
last copy that it calls for some of them hold less, and somebody else may hold more. The text names who is dead, and of
the others what differs: `shards -1.1 ~2.1:5 +0.1:7` says that 1.1 is dead, that 2.1 does not hold shard 5, which it is
to own, and that 0.1 holds shard 7, which it is not to own. Where layers have moved it says by which plan the workers
host them: `shards @0123456789abcdef -1.1`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from recycle.errors import JobError, RunError
from recycle.ir.schedule import Schedule
from recycle.job.sections import Sections
from recycle.job.shape import Worker, node_of
from recycle.plans.hosting import Hosts, joined, layers_of, stage_units, unit_name

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

    shards: Shards = field(kw_only=True, compare=False, repr=False)


class Shards:
    """The shards of a job's parts of the model, numbered through: shard i of part p of D pipelines is p * D + i.

    The parts are the model's units where layers may move, else its stages.

    Args:
        job: its `[train]` section says how many copies there are, `[cluster]` which workers share a node.
        hosting: who hosts what by the plan; where shards are of stages, dead workers too.

    Attributes:
        hosting: as given.
        count: of the shards of a part of the model.

    Raises:
        JobError: shards are of stages, of which one has not as many hosts as the job has pipelines.
    """

    def __init__(self, job: Sections, hosting: Hosts) -> None:
        self.hosting, self._are_of_units = hosting, has_unit_shards(job)
        self._copies, self.count = job.train.optimizer_copies, job.shape.pipelines
        shape, per_node = job.shape, job.cluster.workers_per_node
        self._nodes = node_of(shape, per_node) if per_node > 1 and shape.pipelines > 1 else None
        self._found: dict[frozenset[Worker], dict[int, Owners]] = {}
        # Part -> its hosts, in a healthy run and by the plan; stage, by the plan and as the job gives it -> its parts.
        if self._are_of_units:
            self._given, self._there = _hosts_of_units(Hosts.at_start(job, None)), _hosts_of_units(hosting)
            self._stages = _unit_ranges(layers_of(job, hosting.cut))
            self._stages_of_job = _unit_ranges(layers_of(job))
            return
        self._given = self._there = hosting.hosts_of_stages()
        self._stages = self._stages_of_job = {stage: range(stage, stage + 1) for stage in sorted(self._given)}
        for stage, hosts in sorted(self._given.items()):
            if len(hosts) != self.count:
                raise JobError(
                    f"[train] sharded_optimizer: stage {stage} has {len(hosts)} hosts, dead ones too, and needs one in"
                    f" each of {self.count} pipelines; use another schedule, or set it to false"
                )

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
        return f"shard {place} of {unit_name(part, self.hosting.count) if self._are_of_units else f'stage {part}'}"

    def moves(self, then: Shards, live: Collection[Worker]) -> bool:
        """Whether one of these workers hosts other parts of the model by the plan of `then` than by this one's."""
        here, there = self.hosting.units, then.hosting.units
        return self._are_of_units and any(there.get(worker) != here.get(worker) for worker in live)

    def owners(self, live: Collection[Worker]) -> dict[int, Owners]:
        """Stage -> the owners of its shards, in order, when these workers are alive."""
        return self._by_stage(self._owners(live))

    def _owners(self, live: Collection[Worker]) -> dict[int, Owners]:
        """Part -> the owners of its shards."""
        key = frozenset(live)
        if key not in self._found:
            found = self._found[key] = {}
            for part, hosts in self._given.items():
                first = part % len(hosts) if self._are_of_units else 0
                ring = [*hosts[first:], *hosts[:first]]
                found[part] = owners_of(ring, key, self._copies, self._nodes, self._there.get(part, []))
        return self._found[key]

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
                holders = [host for host in self._there.get(part, []) if number in holds.get(host, ())]
                for owner in mine if set(mine) <= set(holders) else holders:
                    found[owner].append(number)
        return self.as_hosts(found)

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
            for host in self._there.get(part, []):
                everything.setdefault(host, []).extend(self.number(part, place) for place in range(self.count))
        return self.as_hosts(everything)

    def spare(self, live: Collection[Worker], held: Hosts | None = None) -> dict[int, int]:
        """Stage, as the job gives it -> deaths of its hosts, whichever they are, that lose no shard.

        Args:
            held: what workers hold; what they own when left out.
        """
        owners = self._in_order(live, held or self.owned(live))
        return {
            stage: min(len(mine) for part in parts for mine in owners[part]) - 1
            for stage, parts in self._stages_of_job.items()
        }

    def as_hosts(self, shards: Mapping[Worker, Collection[int]]) -> ShardHosts:
        """Workers with the numbers of shards that each has, with shards in the place of units and of stages."""
        count = self.count * (max(self._given, default=-1) + 1)
        ranges = {worker: joined((number, number + 1) for number in mine) for worker, mine in shards.items()}
        return ShardHosts(count, ranges, {w: tuple(sorted(mine)) for w, mine in shards.items()}, shards=self)


def has_unit_shards(job: Sections) -> bool:
    """Whether the shards of a job are of units, else of stages."""
    return job.train.sharded_optimizer and (job.planner.layout == "elastic" or job.planner.move)


def shards_of_schedule(job: Sections, schedule: Schedule, roles: Mapping[Worker, Worker] | None = None) -> Shards:
    """The shards of what runs by a schedule.

    Args:
        roles: of each live worker; itself when left out.

    Raises:
        JobError: as `Shards`.
    """
    if not has_unit_shards(job):
        roles = {worker: worker for worker in schedule.shape.workers()}  # dead ones too, all by their own positions
    roles = roles or {worker: worker for worker in schedule.live}
    stages = {worker: tuple(sorted(schedule.stages_of(role))) for worker, role in roles.items()}
    return Shards(job, Hosts.of(job, stages, schedule.shape.cut))


def _unit_ranges(layers: Sequence[int]) -> dict[int, range]:
    return {stage: range(*units) for stage, units in enumerate(stage_units(layers))}


def _hosts_of_units(hosting: Hosts) -> dict[int, list[Worker]]:
    found: dict[int, list[Worker]] = {unit: [] for unit in range(hosting.count)}
    for worker in sorted(hosting.units):
        for unit in chain.from_iterable(range(*units) for units in hosting.units[worker]):
            found[unit].append(worker)
    return found


_NAME = "shards"
_PLAN, _DEAD, LACKS, _HAS_BESIDES = "@", "-", "~", "+"


def text_of(shards: Shards, workers: Collection[Worker], held: Hosts, plan: str = "") -> str:
    """The text of what live workers hold.

    Args:
        workers: of the run, dead ones too.
        held: by the live ones.
        plan: hash of that by which the workers host what they do; empty for what processes start with.
    """
    live = [worker for worker in sorted(workers) if worker in held.units]
    owned = shards.owned(live).stages
    words = [_NAME, *([f"{_PLAN}{plan}"] if plan else [])]
    words += [f"{_DEAD}{worker}" for worker in sorted(workers) if worker not in held.units]
    for worker in live:
        wanted, there = set(owned[worker]), set(held.stages[worker])
        words += [f"{LACKS}{worker}:{number}" for number in sorted(wanted - there)]
        words += [f"{_HAS_BESIDES}{worker}:{number}" for number in sorted(there - wanted)]
    return " ".join(words)


def plan_of(text: str) -> str:
    """Hash of the plan that a text names; empty where it names none."""
    return next((word[1:] for word in text.split(" ") if word[:1] == _PLAN), "")


def held_by(shards: Shards, workers: Collection[Worker], text: str) -> ShardHosts:
    """What live workers hold by a text, given the shards of its plan. Raises RunError where it is none."""
    name, *words = text.split(" ")
    if name != _NAME:
        raise RunError(f"the register says {text!r} of who holds which shard; it is of a run without them")
    dead = {Worker.parse(word[1:]) for word in words if word[0] == _DEAD}
    live = [worker for worker in workers if worker not in dead]
    found = {worker: set(numbers) for worker, numbers in shards.owned(live).stages.items()}
    for word in words:
        if word[0] in (LACKS, _HAS_BESIDES):
            worker, number = word[1:].split(":")
            (found[Worker.parse(worker)].discard if word[0] == LACKS else found[Worker.parse(worker)].add)(int(number))
    return shards.as_hosts({worker: sorted(numbers) for worker, numbers in found.items()})
