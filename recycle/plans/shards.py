"""Shards: who owns which part of the optimizer's state, where that is sharded (docs/guides/sharded-optimizer.md).

The state of a stage is cut into as many shards as the job has pipelines, each with `copies` owners, which all step it;
the first of them sends the parameters. In a healthy run host i of a stage owns shards i, i - 1, …: each host as many as
every other. Of a shard whose owner dies the others go on, and the live host that owns fewest comes to it. So the owners
depend on who is alive and on nothing else, and every process derives them for itself. Two owners of one shard share a
node only where no other node has a live host.

Where layers may move it is the state of each unit that is cut like this (`UnitShards`), and the owners depend on who
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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from recycle.errors import JobError, RunError
from recycle.ir.schedule import Schedule
from recycle.job.sections import Sections
from recycle.job.shape import Worker, node_of
from recycle.plans.hosting import Hosts, layers_of, stage_units, unit_name

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


_NAME = "shards"
_PLAN, _DEAD, LACKS, _HAS_BESIDES = "@", "-", "~", "+"


def text_of(shards: StageShards, workers: Collection[Worker], held: Hosts, plan: str = "") -> str:
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


def held_by(shards: StageShards, workers: Collection[Worker], text: str) -> ShardHosts:
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
