"""Holdings where the optimizer's state is sharded: what workers hold and copy are shards in the place of units.

Live parameters are on every host of a stage and come from the owners of the shards when a generation begins, so they
are neither held nor copied. Who owns what depends on who is alive alone, and that is how the holdings are named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from recycle.exec.membership.holdings import Holdings
from recycle.plans.hosting import Hosts, Units
from recycle.plans.shards import StageShards
from recycle.shape import Worker

_NAME = "shards"


class ShardHoldings(Holdings):
    """What the workers of one run hold of the shards.

    Args:
        shards: of all stages.
        workers: of the run, dead ones too.
    """

    def __init__(self, shards: StageShards, workers: Collection[Worker]) -> None:
        self._shards, self._workers = shards, sorted(workers)
        super().__init__(shards.anything())

    def wanted(self, hosts: Hosts | None, live: Collection[Worker]) -> Hosts | None:
        return self._shards.owned(live)

    def name_of(self, digest: str, hosts: Hosts | None) -> str:
        assert hosts is not None
        return " -".join([_NAME, *(str(worker) for worker in self._workers if worker not in hosts.units)])

    def named(self, name: str, plan: Callable[[str], Hosts | None]) -> Hosts | None:
        dead = {Worker.parse(worker) for worker in name.split(" -")[1:]}
        return self._shards.owned([worker for worker in self._workers if worker not in dead])

    def described(self, units: Units) -> str:
        return f"{self._shards.named(units[0])}'s optimizer state has"

    def told(self, units: Units) -> dict[str, Any]:
        return {"shards": [self._shards.named(number) for number in range(*units)]}

    def spare(self, live: Collection[Worker]) -> dict[int, int]:
        return self._shards.spare(live)
