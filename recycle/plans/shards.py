"""Shards: ownership of the parts of a sharded optimizer's state (docs/explanations/shards.md).

The state of a stage (of a unit, if layers may move) is split into as many shards as the job has pipelines. Each shard
has `copies` owners, a function of the live workers and of the plan's hosts: host i of a healthy run owns shards i,
i - 1, ..., and the live host with the fewest shards replaces a dead owner. Owners of one shard share a node only if no
other node has a live host. Shard i of unit u has the same elements on every host.

The record of a generation states the held shards as one line (`text_of`, `held_by`): `shards -1.1 ~2.1:5 +0.1:7` says
that 1.1 is dead, 2.1 lacks its shard 5, and 0.1 holds shard 7 without owning it. After layers moved,
`@0123456789abcdef` names the plan that determines the hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from recycle.errors import JobError, RunError
from recycle.ir.schedule import Schedule
from recycle.job.sections import Sections
from recycle.job.shape import Worker, node_of
from recycle.plans.hosting import Hosts, joined, layers_of, stage_units, unit_name

Owners = tuple[tuple[Worker, ...], ...]
"""The owners of each shard of a stage, the first owner first."""


def owners_of(
    hosts: Sequence[Worker],
    live: Collection[Worker],
    copies: int,
    nodes: Mapping[Worker, int] | None = None,
    planned: Sequence[Worker] | None = None,
) -> Owners:
    """Return the owners of the shards of a stage, or of a unit of the model.

    Args:
        hosts: hosts in a healthy run, including dead hosts; their number is the number of shards.
        live: live workers.
        copies: owners of each shard, limited by the number of live hosts.
        nodes: node of each host; None for one node per host.
        planned: hosts by the plan, if they may differ from `hosts`; owners of a healthy run come first.
    """
    order = list(dict.fromkeys([*hosts, *(planned or ())]))
    nodes = nodes or {host: place for place, host in enumerate(order)}
    healthy = _filled([()] * len(hosts), hosts, hosts, copies, nodes)
    present = dict.fromkeys(host for host in order if host in live and (planned is None or host in planned))
    surviving = [tuple(owner for owner in owners if owner in present) for owners in healthy]
    return _filled(surviving, order, present, copies, nodes)


def _filled(
    owned: Sequence[tuple[Worker, ...]],
    hosts: Sequence[Worker],
    live: Collection[Worker],
    copies: int,
    nodes: Mapping[Worker, int],
) -> Owners:
    result = list(owned)
    load = dict.fromkeys(live, 0) | Counter(chain.from_iterable(result))
    for count in range(min(copies, len(live))):
        for place, owners in enumerate(result):
            if len(owners) > count:
                continue
            taken, least = {nodes[owner] for owner in owners}, min(load.values())
            chosen, best = None, (True, inf)
            for host in chain(hosts[place:], hosts[:place]):
                if host in load and host not in owners and (key := (nodes[host] in taken, load[host])) < best:
                    chosen, best = host, key
                    if best == (False, least):
                        break
            assert chosen is not None
            result[place] = (*owners, chosen)
            load[chosen] += 1
    return tuple(result)


@dataclass(frozen=True)
class ShardHosts(Hosts):
    """Hosts of `shards`: shard numbers take the role of units and stages."""

    shards: Shards = field(kw_only=True, compare=False, repr=False)


class Shards:
    """The shards of a job's model, numbered consecutively: shard i of part p of D pipelines is p * D + i.

    The parts are the model's units if layers may move, otherwise its stages. `count` is D, `hosting` the hosts by the
    plan, including dead workers if shards belong to stages. Raises JobError if a stage then has not D hosts.
    """

    def __init__(self, job: Sections, hosting: Hosts) -> None:
        self.hosting, self._are_of_units = hosting, has_unit_shards(job)
        self._copies, self.count = job.train.optimizer_copies, job.shape.pipelines
        shape, per_node = job.shape, job.cluster.workers_per_node
        self._nodes = node_of(shape, per_node) if per_node > 1 and shape.pipelines > 1 else None
        self._owners_of_live: dict[frozenset[Worker], dict[int, Owners]] = {}
        # Part -> hosts (healthy run; by the plan). Stage -> parts (by the plan; by the job).
        if self._are_of_units:
            self._given, self._planned = _hosts_of_units(Hosts.at_start(job, None)), _hosts_of_units(hosting)
            self._stages = _unit_ranges(layers_of(job, hosting.cut))
            self._stages_of_job = _unit_ranges(layers_of(job))
            return
        self._given = self._planned = hosting.hosts_of_stages()
        self._stages = self._stages_of_job = {stage: range(stage, stage + 1) for stage in sorted(self._given)}
        for stage, hosts in sorted(self._given.items()):
            if len(hosts) != self.count:
                raise JobError(
                    f"[train] sharded_optimizer: stage {stage} has {len(hosts)} hosts, dead ones included, and needs"
                    f" one in each of {self.count} pipelines; use another schedule, or set it to false"
                )

    def number(self, part: int, place: int) -> int:
        """Return the number of a shard in the whole model."""
        return part * self.count + place

    def place(self, number: int) -> tuple[int, int]:
        """Return the part of a shard and the index of the shard in the part."""
        return divmod(number, self.count)

    def stage_of(self, number: int) -> int:
        """Return the stage of a shard. Raises KeyError if no stage has it."""
        part = number // self.count
        return next(stage for stage, parts in self._stages.items() if part in parts)

    def numbers(self, stage: int) -> range:
        """Return the shard numbers of a stage, ascending."""
        parts = self._stages[stage]
        return range(self.number(parts.start, 0), self.number(parts.stop, 0))

    def of_stage(self, stage: int, numbers: Iterable[int]) -> list[int]:
        """Return the shards in `numbers` that belong to `stage`."""
        own_numbers = self.numbers(stage)
        return [number for number in numbers if number in own_numbers]

    def named(self, number: int) -> str:
        """Return the name of a shard for messages."""
        part, place = self.place(number)
        return f"shard {place} of {unit_name(part, self.hosting.count) if self._are_of_units else f'stage {part}'}"

    def moves(self, then: Shards, live: Collection[Worker]) -> bool:
        """Return whether a worker in `live` hosts other parts of the model in the plan of `then`."""
        units_now, units_then = self.hosting.units, then.hosting.units
        return self._are_of_units and any(units_then.get(worker) != units_now.get(worker) for worker in live)

    def owners(self, live: Collection[Worker]) -> dict[int, Owners]:
        """Return stage -> owners of its shards in order, given the live workers."""
        return self._by_stage(self._owners(live))

    def _owners(self, live: Collection[Worker]) -> dict[int, Owners]:
        key = frozenset(live)
        if key not in self._owners_of_live:
            owners = self._owners_of_live[key] = {}
            for part, hosts in self._given.items():
                first = part % len(hosts) if self._are_of_units else 0
                ring = [*hosts[first:], *hosts[:first]]
                owners[part] = owners_of(ring, key, self._copies, self._nodes, self._planned.get(part, []))
        return self._owners_of_live[key]

    def _by_stage(self, of_parts: Mapping[int, Owners]) -> dict[int, Owners]:
        return {
            stage: tuple(owners for part in parts for owners in of_parts[part]) for stage, parts in self._stages.items()
        }

    def owned(self, live: Collection[Worker]) -> ShardHosts:
        """Return the shards that each live worker owns."""
        numbers = {worker: list[int]() for worker in live}
        for part, owners in self._owners(live).items():
            for place, workers in enumerate(owners):
                for owner in workers:
                    numbers[owner].append(self.number(part, place))
        return self.as_hosts(numbers)

    def acting(self, live: Collection[Worker], held: Callable[[Worker], Collection[int]]) -> ShardHosts:
        """Return the owners of each shard if all of them hold it, otherwise its holders, by live worker."""
        holds, numbers = {worker: set(held(worker)) for worker in live}, {worker: list[int]() for worker in live}
        for part, owners in self._owners(live).items():
            for place, workers in enumerate(owners):
                number = self.number(part, place)
                holders = [host for host in self._planned.get(part, []) if number in holds.get(host, ())]
                for owner in workers if set(workers) <= set(holders) else holders:
                    numbers[owner].append(number)
        return self.as_hosts(numbers)

    def in_order(self, live: Collection[Worker], held: Hosts) -> dict[int, Owners]:
        """Return stage -> live holders of each shard, future owners first."""
        return self._by_stage(self._in_order(live, held))

    def _in_order(self, live: Collection[Worker], held: Hosts) -> dict[int, Owners]:
        result: dict[int, Owners] = {}
        holders = held.hosts_of_stages()
        for part, owners in self._owners(live).items():
            of_part = []
            for place, workers in enumerate(owners):
                current = [host for host in holders.get(self.number(part, place), []) if host in live]
                of_part.append(
                    (
                        *(worker for worker in workers if worker in current),
                        *(worker for worker in current if worker not in workers),
                    )
                )
            result[part] = tuple(of_part)
        return result

    def anything(self) -> ShardHosts:
        """Return the initial shards: all shards of all hosts, since any host can create the initial state."""
        numbers: dict[Worker, list[int]] = {}
        for part in self._given:
            for host in self._planned.get(part, []):
                numbers.setdefault(host, []).extend(self.number(part, place) for place in range(self.count))
        return self.as_hosts(numbers)

    def spare(self, live: Collection[Worker], held: Hosts | None = None) -> dict[int, int]:
        """Return stage of the job -> number of hosts that may die without losing a shard; `held` None: as owned."""
        owners = self._in_order(live, held or self.owned(live))
        return {
            stage: min(len(holders) for part in parts for holders in owners[part]) - 1
            for stage, parts in self._stages_of_job.items()
        }

    def as_hosts(self, shards: Mapping[Worker, Collection[int]]) -> ShardHosts:
        """Convert worker -> shard numbers to `ShardHosts`."""
        count = self.count * (max(self._given, default=-1) + 1)
        ranges = {worker: joined((number, number + 1) for number in numbers) for worker, numbers in shards.items()}
        return ShardHosts(count, ranges, {w: tuple(sorted(numbers)) for w, numbers in shards.items()}, shards=self)


def has_unit_shards(job: Sections) -> bool:
    """Return whether the shards of a job belong to units rather than stages."""
    return job.train.sharded_optimizer and (job.planner.layout == "elastic" or job.planner.move)


def shards_of_schedule(job: Sections, schedule: Schedule, roles: Mapping[Worker, Worker] | None = None) -> Shards:
    """Build the shards for a schedule; every worker plays its own position if `roles` is None. Raises JobError."""
    if not has_unit_shards(job):
        roles = {worker: worker for worker in schedule.shape.workers()}  # includes dead workers
    roles = roles or {worker: worker for worker in schedule.live}
    stages = {worker: tuple(sorted(schedule.stages_of(role))) for worker, role in roles.items()}
    return Shards(job, Hosts.of(job, stages, schedule.shape.cut))


def _unit_ranges(layers: Sequence[int]) -> dict[int, range]:
    return {stage: range(*units) for stage, units in enumerate(stage_units(layers))}


def _hosts_of_units(hosting: Hosts) -> dict[int, list[Worker]]:
    hosts: dict[int, list[Worker]] = {unit: [] for unit in range(hosting.count)}
    for worker in sorted(hosting.units):
        for unit in chain.from_iterable(range(*units) for units in hosting.units[worker]):
            hosts[unit].append(worker)
    return hosts


_NAME = "shards"
_PLAN, _DEAD, LACKS, _HAS_BESIDES = "@", "-", "~", "+"


def text_of(shards: Shards, workers: Collection[Worker], held: Hosts, plan: str = "") -> str:
    """Return the record text of the held shards; `workers` includes dead ones, `plan` is empty for initial hosts."""
    live = [worker for worker in sorted(workers) if worker in held.units]
    owned = shards.owned(live).stages
    words = [_NAME, *([f"{_PLAN}{plan}"] if plan else [])]
    words += [f"{_DEAD}{worker}" for worker in sorted(workers) if worker not in held.units]
    for worker in live:
        wanted, current = set(owned[worker]), set(held.stages[worker])
        words += [f"{LACKS}{worker}:{number}" for number in sorted(wanted - current)]
        words += [f"{_HAS_BESIDES}{worker}:{number}" for number in sorted(current - wanted)]
    return " ".join(words)


def plan_of(text: str) -> str:
    """Return the plan hash in a record text; empty without one."""
    return next((word[1:] for word in text.split(" ") if word[:1] == _PLAN), "")


def held_by(shards: Shards, workers: Collection[Worker], text: str) -> ShardHosts:
    """Parse a record text, given the shards of its plan. Raises RunError if the text is not such a record."""
    name, *words = text.split(" ")
    if name != _NAME:
        raise RunError(f"the register's list of shards is {text!r}: the run that wrote it had no sharded optimizer")
    dead = {Worker.parse(word[1:]) for word in words if word[0] == _DEAD}
    live = [worker for worker in workers if worker not in dead]
    numbers_of = {worker: set(numbers) for worker, numbers in shards.owned(live).stages.items()}
    for word in words:
        if word[0] in (LACKS, _HAS_BESIDES):
            worker, number = word[1:].split(":")
            (numbers_of[Worker.parse(worker)].discard if word[0] == LACKS else numbers_of[Worker.parse(worker)].add)(
                int(number)
            )
    return shards.as_hosts({worker: sorted(numbers) for worker, numbers in numbers_of.items()})
