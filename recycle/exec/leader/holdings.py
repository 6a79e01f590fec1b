"""Holdings: which units of the model each live worker holds, and what has to be copied before a plan can run.

What the workers hold changes in one moment only: when a generation may run, its workers hold what its plan gives them.
Until then they keep what they had and copy what is new to them, so that a generation that comes to nothing loses
nothing, and any plan can follow on any other. A worker that joins holds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from recycle.exec.protocol import Copy
from recycle.job.shape import Worker
from recycle.plans.edge_coloring import color_edges
from recycle.plans.hosting import Hosts, UnitRange, is_same, joined, layers_in, unit_name, without


class Holdings:
    """What the workers of one run hold.

    Args:
        initial: what processes start with that hold the initial state, or a checkpoint's.

    Attributes:
        plan: hash of the plan that the workers hold the units of; empty for `initial`.
        hosts: of that plan.
    """

    def __init__(self, initial: Hosts) -> None:
        self._initial = initial
        self.start_over()

    def start_over(self) -> None:
        """All processes are new."""
        self.plan, self.hosts = "", self._initial

    def take_up(self, plan: str, hosts: Hosts | None) -> None:
        """The workers hold what the plan of this name (`name_of`) gives them."""
        self.plan, self.hosts = plan, (hosts if plan else None) or self._initial

    @property
    def is_restoring(self) -> bool:
        """Whether the workers copy something while they run (`behind`)."""
        return False

    def wanted(self, hosts: Hosts | None, live: Collection[Worker], holders: Collection[Worker]) -> Hosts | None:
        """What workers hold once a plan runs.

        Args:
            hosts: of the plan; None for what processes start with.
            live: all workers. holders: those that have not joined since.
        """
        return hosts

    def behind(self, wanted: Hosts | None, live: Collection[Worker]) -> list[Copy]:
        """What is to be copied while a plan runs whose workers hold `wanted` from its first iteration on."""
        return []

    def copied(self, worker: Worker, units: UnitRange) -> None:
        """A worker has copied units that were `behind`."""
        raise NotImplementedError

    def named(self, name: str, plan: Callable[[str], Hosts | None]) -> Hosts | None:
        """What holdings of this name (`name_of`) are; None where that is not known any more.

        Args:
            plan: gives who hosts what by a plan.
        """
        return plan(name)

    def spare(self, live: Collection[Worker]) -> dict[int, int]:
        """Stage -> deaths of its hosts, whichever they are, that lose nothing, where that depends on more than how many
        hosts there are; else empty."""
        return {}

    def name_of(self, digest: str, hosts: Hosts | None) -> str:
        """The hash of a plan by which its holdings are known; empty where each hosts what it started with."""
        return "" if hosts is None or is_same(hosts, self._initial) else digest

    def name_of_states(self, states: Mapping[Worker, Collection[int]]) -> str:
        """The name of what workers hold in the states that they have kept.

        Args:
            states: of each worker, the numbers of the states that it has reported (`Stage.compared`).
        """
        return self.plan

    @property
    def layout(self) -> str:
        """Hash of the plan that says how the tensors of a state lie in it; empty for what processes start with."""
        return self.plan

    def stage_of(self, number: int) -> int:
        """The stage that reports speak of by a number."""
        return number

    def of(self, worker: Worker) -> tuple[UnitRange, ...]:
        """What a worker holds that has not joined since."""
        return self.hosts.units.get(worker, ())

    def lost(self, holders: Iterable[Worker]) -> tuple[UnitRange, ...]:
        """The units that none of these workers holds."""
        held = joined(units for worker in holders for units in self.of(worker))
        return without([(0, self.hosts.count)], held)

    def described(self, units: UnitRange) -> str:
        """Units in words, with a verb: "stage 1 has" where processes start with such a one, else "layer 2 has"."""
        if not self.plan:
            for stage, workers in self.hosts.hosts_of_stages().items():
                if all(units in self.of(worker) for worker in workers) and len(self.hosts.stages[workers[0]]) == 1:
                    return f"stage {stage} has"
        begin, end = units
        first, last = (unit_name(unit, self.hosts.count) for unit in (begin, end - 1))
        return f"{first} has" if end - begin == 1 else f"{first} to {last} have"

    @property
    def are_logged_together(self) -> bool:
        """Whether one event tells of all that a worker has copied from another."""
        return False

    def event_fields(self, ranges: Sequence[UnitRange]) -> dict[str, Any]:
        """Ranges of units as the event of a copy names them; one of them, unless `are_logged_together`."""
        (units,) = ranges
        return {"units": layers_in(units, self.hosts.count)}

    def fewest_hosts(self, workers: Iterable[Worker], holders: Collection[Worker]) -> dict[Worker, int]:
        """Of each worker, how many holders there are of the unit of its own that has fewest."""
        found: dict[Worker, int] = {}
        for worker in workers:
            counts = [
                sum(any(first <= unit < last for first, last in self.of(holder)) for holder in holders)
                for begin, end in self.of(worker)
                for unit in range(begin, end)
            ]
            found[worker] = min(counts, default=len(holders))
        return found

    def copies(self, hosts: Hosts | None, live: Collection[Worker], holders: Collection[Worker]) -> list[Copy]:
        """What has to be copied, and from whom, before a plan can run; in an order that all keep.

        A unit comes from the holder that has fewest to send. Copies of different pairs of workers run at the same time:
        their order goes by rounds, in each of which a worker takes part in one copy at most.

        Args:
            hosts: of the plan; None for what processes start with.
            live: all workers. holders: those that have not joined since.
        """
        return copies_between(hosts or self._initial, live, set(holders), self.of)


def copies_between(
    hosts: Hosts, live: Collection[Worker], there: Collection[Worker], of: Callable[[Worker], Sequence[UnitRange]]
) -> list[Copy]:
    """As `Holdings.copies`.

    Args:
        of: what each of those who are there holds.
    """
    wanted = hosts.units
    found: list[tuple[Worker, Worker, int, int]] = []
    sent: Counter[Worker] = Counter()
    for worker in sorted(live):
        had = of(worker) if worker in there else ()
        for begin, end in without(wanted.get(worker, ()), had):
            while begin < end:
                candidates = [
                    (sent[holder], holder, last)
                    for holder in sorted(there)
                    for first, last in of(holder)
                    if holder != worker and first <= begin < last
                ]
                if not candidates:
                    raise ValueError(f"unit {begin} has no live holder")
                _, source, last = min(candidates)
                found.append((worker, source, begin, min(end, last)))
                sent[source] += min(end, last) - begin
                begin = min(end, last)
    number = {worker: place for place, worker in enumerate(sorted({w for copy in found for w in copy[:2]}))}
    rounds = color_edges([(number[source], number[worker]) for worker, source, *_ in found])
    order = sorted(range(len(found)), key=lambda place: (rounds[place], place))
    return [Copy(str(found[place][0]), str(found[place][1]), *found[place][2:]) for place in order]
