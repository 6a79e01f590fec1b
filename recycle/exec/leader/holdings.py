"""Holdings: the units of the model that each live worker holds, and the copies that a plan needs before it runs.

Holdings change at one moment only: when a generation may run, its workers hold what the plan assigns. Until then
workers keep their old units and copy the new ones, so an abandoned generation loses nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from recycle.exec.checksums import PARAMETERS
from recycle.exec.protocol import Copied, Copy
from recycle.job.sections import Sections
from recycle.job.shape import Worker
from recycle.plans.edge_coloring import color_edges
from recycle.plans.hosting import Hosts, UnitRange, is_same, joined, layers_in, unit_name, without
from recycle.plans.shards import LACKS, ShardHosts, Shards, has_unit_shards, held_by, plan_of, text_of


class Holdings:
    """The units that the workers of one run hold.

    Args:
        initial: what processes hold that start with the initial state or a checkpoint.

    Attributes:
        plan: name of the present holdings; empty for `initial`.
        hosts: hosts by that plan.
    """

    def __init__(self, initial: Hosts) -> None:
        self._initial = initial
        self.start_over()

    def start_over(self) -> None:
        self.plan, self.hosts = "", self._initial

    def set_current(self, plan: str, hosts: Hosts) -> None:
        self.plan, self.hosts = plan, hosts if plan else self._initial

    @property
    def is_restoring(self) -> bool:
        """Whether workers still copy units while they run (`behind`)."""
        return LACKS in self.plan

    def target(self, hosts: Hosts | None, live: Collection[Worker], holders: Collection[Worker]) -> Hosts:
        """Return what workers hold once a plan runs; `hosts` is None for the initial ones."""
        return hosts or self._initial

    def background_copies(self, wanted: Hosts, live: Collection[Worker]) -> list[Copy]:
        """Return the background copies of a plan whose workers hold `wanted` from its first iteration on."""
        return []

    def add_copied(self, worker: Worker, units: UnitRange) -> None:
        raise NotImplementedError

    def by_name(self, name: str, plan: Callable[[str], Hosts | None]) -> Hosts | None:
        """Return the holdings with this name (`name_of`); None if unknown. `plan` returns hosts by hash."""
        return plan(name) if name else self._initial

    def spare(self, live: Collection[Worker]) -> dict[int, int]:
        """Return stage -> deaths of any of its hosts that lose no state; empty if only the number of hosts counts."""
        return {}

    def name_of(self, digest: str, hosts: Hosts) -> str:
        """Return the hash of a plan that identifies its holdings; empty if all workers host their initial units."""
        return "" if is_same(hosts, self._initial) else digest

    def name_of_states(self, states: Mapping[Worker, Collection[int]]) -> str:
        """Return the name of the holdings in the states that workers reported by number (`Stage.compared`)."""
        return self.plan

    @property
    def layout(self) -> str:
        """Hash of the plan that defines the layout of tensors in a state; empty for the initial layout."""
        return self.plan

    def stage_of(self, number: int) -> int:
        return number

    def units_of(self, worker: Worker) -> tuple[UnitRange, ...]:
        return self.hosts.units.get(worker, ())

    def lost(self, holders: Iterable[Worker]) -> tuple[UnitRange, ...]:
        held = joined(units for worker in holders for units in self.units_of(worker))
        return without([(0, self.hosts.count)], held)

    def describe(self, units: UnitRange) -> str:
        """Return units as text with a verb: "stage 1 has" for an initial stage, else "layer 2 has"."""
        begin, end = units
        if not self.plan:
            of_stages = {
                stage: self.units_of(workers[0])[0]
                for stage, workers in self.hosts.hosts_of_stages().items()
                if len(self.hosts.stages[workers[0]]) == 1
            }
            inside = [stage for stage, (first, last) in of_stages.items() if begin <= first and last <= end]
            if joined(of_stages[stage] for stage in inside) == (units,):
                stages = " ".join(map(str, inside))
                return f"stage {stages} has" if len(inside) == 1 else f"stages {stages} have"
        first, last = (unit_name(unit, self.hosts.count) for unit in (begin, end - 1))
        return f"{first} has" if end - begin == 1 else f"{first} to {last} have"

    def copy_events(self, copies: Sequence[Copied]) -> list[tuple[dict[str, Any], list[Copied]]]:
        """Group copies into events, each with the names of the copied units."""
        count = self.hosts.count
        return [({"units": layers_in((copied.first, copied.last), count)}, [copied]) for copied in copies]

    def fewest_hosts(self, workers: Iterable[Worker], holders: Collection[Worker]) -> dict[Worker, int]:
        """Return for each worker the number of holders of its rarest unit."""
        counts = Counter(unit for holder in holders for units in self.units_of(holder) for unit in range(*units))
        return {
            worker: min(
                (counts[unit] for units in self.units_of(worker) for unit in range(*units)), default=len(holders)
            )
            for worker in workers
        }

    def copies(self, wanted: Hosts, live: Collection[Worker], holders: Collection[Worker]) -> list[Copy]:
        """Return the copies needed before workers hold `wanted`, in the order that all workers follow.

        The source has the fewest units to send. The order is by rounds, with at most one copy per worker in each.
        """
        return copies_between(wanted, live, set(holders), self.units_of)


class ShardHoldings(Holdings):
    """Holdings with a sharded optimizer: shards instead of units.

    Live parameters come from the owners of the shards at the start of a generation, so they are neither held nor
    copied. After a death the remaining owners continue at once and copy in the background (`behind`). If a worker joins
    or layers move, all copies precede the generation. `initial` and `workers` include dead workers.
    """

    def __init__(self, job: Sections, initial: Hosts, workers: Collection[Worker]) -> None:
        self._job, self._started, self._workers = job, initial, sorted(workers)
        self._given = Shards(job, initial)
        super().__init__(self._given.anything())

    @property
    def _shards(self) -> Shards:
        return _shards_of(self.hosts)

    def target(self, hosts: Hosts | None, live: Collection[Worker], holders: Collection[Worker]) -> Hosts:
        after = self._shards_by(hosts)
        if set(live) != set(holders) or self._shards.moves(after, live):
            return after.owned(live)
        return after.acting(live, lambda worker: self.hosts.stages.get(worker, ()))

    def _shards_by(self, hosts: Hosts | None) -> Shards:
        if hosts is None or is_same(hosts, self._started) or not has_unit_shards(self._job):
            return self._given
        return Shards(self._job, hosts)

    def background_copies(self, wanted: Hosts, live: Collection[Worker]) -> list[Copy]:
        return copies_between(_shards_of(wanted).owned(live), live, live, lambda worker: wanted.units[worker])

    def add_copied(self, worker: Worker, units: UnitRange) -> None:
        stages = self.hosts.stages
        held = self._shards.as_hosts({**stages, worker: {*stages[worker], *range(*units)}})
        self.set_current(self.name_of(plan_of(self.plan), held), held)

    def name_of(self, digest: str, hosts: Hosts) -> str:
        shards = _shards_of(hosts)
        return text_of(shards, self._workers, hosts, "" if shards is self._given else digest)

    def name_of_states(self, states: Mapping[Worker, Collection[int]]) -> str:
        """A worker has no state of a shard that it is still copying."""
        held = {worker: {number for number in numbers if number < PARAMETERS} for worker, numbers in states.items()}
        if all(held[worker] == set(self.hosts.stages.get(worker, ())) for worker in held):
            return self.plan  # computing the name takes a second with thousands of workers
        return self.name_of(plan_of(self.plan), self._shards.as_hosts(held))

    @property
    def layout(self) -> str:
        """A shard is the same in all plans."""
        return ""

    def stage_of(self, number: int) -> int:
        return number - PARAMETERS if number >= PARAMETERS else self._shards.stage_of(number)

    def by_name(self, name: str, plan: Callable[[str], Hosts | None]) -> Hosts | None:
        if not name:
            return self._initial
        digest = plan_of(name)
        hosts = plan(digest) if digest else None
        return None if digest and hosts is None else held_by(self._shards_by(hosts), self._workers, name)

    def describe(self, units: UnitRange) -> str:
        return f"{self._shards.named(units[0])}'s optimizer state has"

    def copy_events(self, copies: Sequence[Copied]) -> list[tuple[dict[str, Any], list[Copied]]]:
        """All copies from one source are one event."""
        sources: dict[str, list[Copied]] = {}
        for copied in copies:
            sources.setdefault(copied.source, []).append(copied)
        named = self._shards.named
        return [
            ({"shards": [named(number) for copied in group for number in range(copied.first, copied.last)]}, group)
            for group in sources.values()
        ]

    def spare(self, live: Collection[Worker]) -> dict[int, int]:
        return self._shards.spare(live, self.hosts)


def _shards_of(hosts: Hosts) -> Shards:
    assert isinstance(hosts, ShardHosts)
    return hosts.shards


def copies_between(
    hosts: Hosts,
    live: Collection[Worker],
    holders: Collection[Worker],
    units_of: Callable[[Worker], Sequence[UnitRange]],
) -> list[Copy]:
    """Return the copies between workers, as `Holdings.copies`; `holders` hold the units that `units_of` returns."""
    copies: list[tuple[Worker, Worker, int, int]] = []
    sent: Counter[Worker] = Counter()
    for worker in sorted(live):
        for begin, end in without(hosts.units.get(worker, ()), units_of(worker) if worker in holders else ()):
            while begin < end:
                candidates = [
                    (sent[holder], holder, last)
                    for holder in sorted(holders)
                    for first, last in units_of(holder)
                    if holder != worker and first <= begin < last
                ]
                if not candidates:
                    raise ValueError(f"unit {begin} has no live holder")
                _, source, last = min(candidates)
                copies.append((worker, source, begin, min(end, last)))
                sent[source] += min(end, last) - begin
                begin = min(end, last)
    number = {worker: place for place, worker in enumerate(sorted({w for copy in copies for w in copy[:2]}))}
    rounds = color_edges([(number[source], number[worker]) for worker, source, *_ in copies])
    in_order = sorted(zip(rounds, copies, strict=True), key=lambda entry: entry[0])
    return [Copy(str(worker), str(source), first, last) for _, (worker, source, first, last) in in_order]
