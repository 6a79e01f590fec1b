"""Routes: which worker runs which units of each micro-batch, as legs.

A leg is what one worker runs of one micro-batch without handing it over: a run of neighbouring units. How many
micro-batches of each unit each worker runs is given; at every boundary between two units as few micro-batches as that
allows change workers, those that leave a worker are spread evenly over its others, and they stay in a pipeline where
they can. So a worker whose units are also hosted by others gets an even stream of micro-batches from all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recycle.job.shape import MicroBatch, Shape, Worker
from recycle.solve.layout.units import Parts
from recycle.solve.problem_arrays import Operations


@dataclass(frozen=True, eq=False)
class Routes:
    """The legs of all micro-batches of an iteration: by micro-batch, then unit.

    Attributes:
        workers: those that run something.
        host: [legs], of each its worker's place in `workers`.
        begin, end: [legs], its first unit, and that behind its last.
        micro_batch: [legs], in the order in which they are to go through the model.
        parts: the units that each worker hosts.
    """

    workers: tuple[Worker, ...]
    host: Operations
    begin: Operations
    end: Operations
    micro_batch: Operations
    parts: tuple[Parts, ...]

    def __len__(self) -> int:
        return len(self.host)

    @property
    def micro_batches(self) -> int:
        return int(self.micro_batch[-1]) + 1

    @property
    def after(self) -> Operations:
        """[legs], the next leg of the same micro-batch, -1 behind the last."""
        following = np.arange(1, len(self) + 1)
        following[-1] = -1
        following[:-1][np.diff(self.micro_batch) != 0] = -1
        return following

    def common_cut(self) -> tuple[int, ...]:
        """Units of each stage that lies between neighbouring ends of any legs."""
        return tuple(np.diff(np.unique(np.concatenate([self.begin, self.end]))).tolist())

    def names(self, shape: Shape) -> list[MicroBatch]:
        """The micro-batch that goes each route: of the pipeline of its first worker where there is one left."""
        first = np.flatnonzero(np.diff(self.micro_batch, prepend=-1))
        free = {k: list(range(shape.micro_batches))[::-1] for k in range(shape.pipelines)}
        names: list[MicroBatch | None] = []
        for host in self.host[first].tolist():
            home = self.workers[host].pipeline
            names.append(MicroBatch(home, free[home].pop()) if free[home] else None)
        spare = (MicroBatch(k, j) for k, left in free.items() for j in left[::-1])
        return [name or next(spare) for name in names]


def routes_of(workers: Sequence[Worker], quotas: Operations, groups: Sequence[int], parts: Sequence[Parts]) -> Routes:
    """Routes in which each worker runs so many micro-batches of each unit.

    Args:
        quotas: [workers, units]; of each unit they add up to all micro-batches.
        groups: of each worker, its pipeline or chain, in which micro-batches stay where they can.
        parts: of each worker, the units that it hosts, the first and the last of each range with a micro-batch.
    """
    count = int(quotas[:, 0].sum())
    here = np.array(_evenly_mixed(dict(enumerate(quotas[:, 0].tolist()))), dtype=np.int64)
    hosts = [here]
    for before, wanted in zip(quotas.T[:-1], quotas.T[1:], strict=True):
        here = here.copy()
        change = wanted - before
        for worker, flows in _flows(groups, change).items():
            mine = np.flatnonzero(hosts[-1] == worker)
            leaving = sum(flows.values())
            chosen = mine[((np.arange(leaving) + 0.5) * len(mine) / leaving).astype(np.int64)]
            here[chosen] = _evenly_mixed(flows)
        hosts.append(here)
    by_unit = np.array(hosts)
    starts = np.ones_like(by_unit, dtype=bool)
    starts[1:] = by_unit[1:] != by_unit[:-1]
    micro_batch, begin = np.nonzero(starts.T)
    end = np.append(begin[1:], 0)
    end[np.append(np.diff(micro_batch) != 0, True)] = len(by_unit)
    host = by_unit[begin, micro_batch]
    used = np.unique(host)
    assert len(np.unique(micro_batch)) == count
    return Routes(
        tuple(workers[w] for w in used),
        np.searchsorted(used, host),
        begin,
        end,
        micro_batch,
        tuple(parts[w] for w in used),
    )


def _flows(groups: Sequence[int], change: Operations) -> dict[int, dict[int, int]]:
    """How many micro-batches each worker hands over to each other between two units: in its group first."""
    left = {w: -c for w, c in enumerate(change.tolist()) if c < 0}
    wanted = {w: c for w, c in enumerate(change.tolist()) if c > 0}
    flows: dict[int, dict[int, int]] = {w: {} for w in left}
    in_group = [(w, v) for w in left for v in wanted if groups[w] == groups[v]]
    for w, v in in_group + [(w, v) for w in left for v in wanted]:
        amount = min(left[w], wanted[v])
        if amount:
            flows[w][v] = flows[w].get(v, 0) + amount
            left[w] -= amount
            wanted[v] -= amount
    return flows


def _evenly_mixed(counts: dict[int, int]) -> list[int]:
    """Each key as often as it counts, as evenly mixed as can be."""
    places = sorted(((i + 0.5) / count, key) for key, count in counts.items() for i in range(count))
    return [key for _, key in places]
