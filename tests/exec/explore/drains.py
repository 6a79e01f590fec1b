"""`recycle drain NODE` in a simulated run, and what it promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle.errors import JobError, RunError
from recycle.exec.launch.run_address import drain
from tests.exec.explore.kernel import Process

if TYPE_CHECKING:
    from tests.exec.explore.cluster import Cluster

USER = -2
"""The machine of the user."""
LATE_SECONDS = 4.0
"""Seconds of quiet after which a command has noticed that processes have ended."""


class NodeDrain:
    """One command: it ends when the processes have ended, and none starts on the node until a new agent does."""

    def __init__(self, cluster: Cluster, node: int, seconds: float | None) -> None:
        self._cluster, self._node, self._seconds = cluster, node, seconds
        self._agent = cluster.agents.get(node)
        self._has_left, self._idle_since = False, cluster.kernel.now
        self._command = Process(cluster.kernel, f"drain of node {node}", USER)
        self._command.run(self._run)

    def _run(self) -> None:
        cluster = self._cluster
        try:
            drain(cluster.path, str(self._node), self._seconds, cluster.kernel.log)
        except (JobError, RunError) as error:
            cluster.kernel.log(f"recycle drain {self._node}: {error}")
            self._has_left = "dead already" in str(error)
        else:
            self._has_left = not cluster.has_ended
        self._command.end("", 0)

    def check(self) -> str:
        """Returns what is wrong; called regularly."""
        cluster, now = self._cluster, self._cluster.kernel.now
        running = [p for p in cluster.on_node(self._node) if p.worker is not None]
        rules = cluster.rules
        staying = [
            p.name
            for p in running
            if p.parent is self._agent
            and str(p.worker) not in rules.rejoining
            and (str(p.worker), p.incarnation) not in rules.given_up
        ]
        if self._has_left and staying:
            return f"node {self._node} was drained, and {staying} run there"
        if running or rules.is_loud:
            self._idle_since = now
        is_late = self._command.is_alive and now - self._idle_since > LATE_SECONDS
        return f"the command waits for node {self._node}, where no process runs" if is_late else ""
