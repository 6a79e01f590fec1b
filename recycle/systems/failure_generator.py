"""Seeded generator of hardware failures, with defaults from public data.

Node rates are gamma-distributed around the mean. With shape 1 and the mean of the InfiniteHBD trace (584 faults on 400
servers) 41 % of the nodes never fail; in the trace 42 % do not. A node may fail repeatedly. Some failures take several
nodes. A failed node is down for a lognormal repair time.

Sources of the defaults: rate, bursts and repair times from the InfiniteHBD trace (stepfun-ai/InfiniteHBD-Trace, 349
days: 4.18 faults per 1,000 node-days, inter-arrival times with a coefficient of variation of 1.76, repair hours with
median 20.4 and p90 312); causes from the unexpected interruptions of Llama 3 405B (arXiv 2407.21783, table 5). Slow
nodes made large jobs take 1.34 times as long, for seconds to ten hours (arXiv 2410.12588); their rate is not published.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp, log

from recycle.systems.failures import ANNOUNCED, CORRUPTION, FailureTrace, Row, SlowPeriod, trace_from_rows

CAUSES = {
    "GPU": 148,
    "HBM3 memory": 72,
    "software": 54,
    "switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM": 19,
    "GPU system processor": 17,
    "NIC": 7,
    "NCCL watchdog": 7,
    CORRUPTION: 6,
    "thermal interface and sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}
"""Numbers of 419 unexpected interruptions in 54 days."""
_DAY = 86400.0
_P90 = 1.2815515655446004  # standard deviations above the median


@dataclass(frozen=True)
class Generator:
    """Parameters of generated failures.

    Attributes:
        days: length of the trace.
        rate: failures per 1,000 node-days of live nodes.
        burst: share of failures that take several nodes, uniformly 2 to `burst_nodes`.
        spread: shape of the gamma distribution of the nodes' rates; smaller is more uneven.
        repair_median, repair_p90: hours until a node returns.
        announced: share of failures with a notice, such as maintenance; see `failures.ANNOUNCED`.
        corrupt: share of the other failures that are silent corruption; see `failures.CORRUPTION`.
        slow: slow periods per 1,000 node-days.
        slow_factor, slow_hours: how much longer a slow node takes, and the mean length of a period.
    """

    days: float = 30.0
    rate: float = 4.2
    burst: float = 0.05
    burst_nodes: int = 8
    spread: float = 1.0
    repair_median: float = 20.0
    repair_p90: float = 312.0
    announced: float = 0.0
    corrupt: float = CAUSES[CORRUPTION] / sum(CAUSES.values())
    slow: float = 0.0
    slow_factor: float = 1.34
    slow_hours: float = 1.0
    seed: int = 0

    def trace(self, nodes: int) -> FailureTrace:
        chance, others = random.Random(self.seed), sum(CAUSES.values()) - CAUSES[CORRUPTION]
        corruption = others * self.corrupt / (1 - self.corrupt) if self.corrupt < 1 else 1e9
        causes = CAUSES | {CORRUPTION: corruption}
        weight = [chance.gammavariate(self.spread, 1 / self.spread) for _ in range(nodes)]
        most = min(self.burst_nodes, nodes)
        burst = self.burst if most >= 2 else 0.0
        nodes_per_event = 1 - burst + burst * (2 + most) / 2  # nodes per event
        per_day = self.rate / 1000 * sum(weight) / nodes_per_event
        sigma = log(self.repair_p90 / self.repair_median) / _P90
        back = [0.0] * nodes
        changes: list[tuple[float, bool, int, str]] = []
        day = chance.expovariate(per_day) if per_day else self.days
        while day < self.days:
            count = chance.randint(2, most) if chance.random() < burst else 1
            cause = chance.choices(list(causes), list(causes.values()))[0]
            if self.announced and chance.random() < self.announced:
                cause = ANNOUNCED
            for node in _distinct(chance, weight, count):
                if back[node] <= day:
                    back[node] = day + self.repair_median / 24 * exp(chance.gauss(0.0, sigma))
                    changes.append((day, True, node, cause))
                    if back[node] < self.days:
                        changes.append((back[node], False, node, cause))
            day += chance.expovariate(per_day)
        rows = [
            Row(number, round(day * _DAY, 3), goes, f"node{node}", cause)
            for number, (day, goes, node, cause) in enumerate(sorted(changes), 1)
        ]
        name = f"generated, {self.rate:g} per 1,000 node-days, seed {self.seed}"
        trace_changes = trace_from_rows(rows, name, population=nodes, counted=True).changes if rows else ()
        end = self.days * _DAY
        return FailureTrace(name, nodes, frozenset(range(nodes)), trace_changes, end, slow=self._slow(nodes, end))

    def _slow(self, nodes: int, end: float) -> tuple[SlowPeriod, ...]:
        chance, periods = random.Random(f"slow {self.seed}"), list[SlowPeriod]()
        rate = self.slow / 1000 / _DAY * nodes
        begin = chance.expovariate(rate) if rate else end
        while begin < end:
            length = chance.expovariate(1 / (3600 * self.slow_hours))
            periods.append(SlowPeriod(begin, begin + length, chance.randrange(nodes), self.slow_factor))
            begin += chance.expovariate(rate)
        return tuple(periods)


def _distinct(chance: random.Random, weight: list[float], count: int) -> list[int]:
    nodes: list[int] = []
    for node in chance.choices(range(len(weight)), weight, k=count):
        at = node
        while at in nodes:
            at = (at + 1) % len(weight)
        nodes.append(at)
    return nodes
