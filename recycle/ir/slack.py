"""Slack: how much later each instruction could start without the iteration taking longer.

The longest chain behind an instruction is found by the walk that found the earliest starts, on the graph turned round.
What has no slack lies on a critical path, of which there may be many; `Timeline.critical_path` is one of them.
Limits: nothing else moves along, and the period is not looked at.
"""

from __future__ import annotations

import numpy as np

from recycle.ir.columns import Floats
from recycle.ir.event_graph import event_graph
from recycle.ir.graph import earliest, group_edges
from recycle.ir.simulate import Timeline


def slack(timeline: Timeline) -> Floats:
    """Seconds that each row of `timeline.schedule` may start later; at least 0, O(n log n).

    Of a simulated timeline without serialised transports: its order and dependencies decide.
    """
    graph = timeline.dependencies
    rows, nodes = graph.rows, graph.nodes
    if not rows:
        return np.zeros(0)
    events = event_graph(timeline.schedule, graph=graph)
    source, target = events.edges
    offsets, followers = group_edges(target, source, nodes)
    seconds = np.zeros(nodes)
    seconds[:rows] = timeline.end - timeline.start
    behind, _ = earliest(events.order[::-1].copy(), offsets, followers, seconds, np.zeros(nodes))
    return np.maximum(float(timeline.end.max()) - timeline.end - behind[:rows], 0.0)
