"""The workers' processes on all nodes, as the coordinator sees them: orders and answers in the store.

    start/<w>       "<incarnation> <session>": the agent of this session shall start this process
    kill/<w>        incarnation up to which every process of the worker shall be dead
    gone/<w>        "<incarnation> <how>": this process has ended
    agent/<node>    the node's agent, with the session it is in; goes with the agent's lease

An order is for a session, so that a process whose agent is gone is gone, whoever serves the node now. Everything is
read from the store: whoever coordinates next knows what this one knew.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from recycle.exec.membership.etcd_store import EtcdStore
from recycle.job import Job
from recycle.nodes import node_of
from recycle.shape import Worker


class AgentInfo(Struct, frozen=True):
    """What an agent says of itself.

    Attributes:
        session: changes with every agent process.
        address: of the node.
    """

    session: str
    address: str


def read_order(text: str | None) -> tuple[int, str]:
    """Number and addressee of a start order; (-1, "") when there is none."""
    if text is None:
        return -1, ""
    number, _, session = text.partition(" ")
    return int(number), session


class ClusterProcesses:
    """Worker processes that agents start and kill.

    Args:
        store: the coordinator's.
    """

    def __init__(self, job: Job, store: EtcdStore) -> None:
        self._store = store
        self._nodes = node_of(job.shape, job.cluster.workers_per_node)
        self._told: dict[Worker, int] = {}

    def nodes(self) -> list[int]:
        """The nodes whose agents are there."""
        return [node for node in sorted(set(self._nodes.values())) if self._agent(node) is not None]

    def _agent(self, node: int) -> AgentInfo | None:
        text = self._store.read(f"agent/{node}")
        return None if text is None else msgspec.json.decode(text, type=AgentInfo)

    def reachable(self, worker: Worker) -> bool:
        """Whether the worker's node has an agent."""
        return self._agent(self._nodes[worker]) is not None

    def start(self, worker: Worker) -> None:
        """Have the next process started. Nothing happens without an agent; it counts as gone then."""
        agent = self._agent(self._nodes[worker])
        session = "" if agent is None else agent.session
        self._store.set(f"start/{worker}", f"{self.incarnation(worker) + 1} {session}")

    def gone(self) -> dict[Worker, str]:
        """Processes that ended since the last call, with how."""
        found: dict[Worker, str] = {}
        for worker in self._nodes:
            number = self.incarnation(worker)
            if number >= 0 and self._told.get(worker) != number and (how := self.ended(worker)) is not None:
                self._told[worker] = number
                found[worker] = how
        return found

    def ended(self, worker: Worker) -> str | None:
        """How the worker's latest process ended, None when it has not."""
        number, session = read_order(self._store.read(f"start/{worker}"))
        ended, _, how = (self._store.read(f"gone/{worker}") or "-1 ").partition(" ")
        if int(ended) == number:
            return how
        agent = self._agent(self._nodes[worker])
        if agent is None or agent.session != session:
            return self._lost(worker)
        return None

    def lost_its_agent(self, worker: Worker) -> bool:
        """Whether the worker's latest process ended with its node's agent."""
        return self.ended(worker) == self._lost(worker)

    def _lost(self, worker: Worker) -> str:
        return f"the agent of node {self._nodes[worker]} is gone"

    def running(self, worker: Worker) -> bool:
        """Whether the worker has a process, or will have one in a moment."""
        return self.incarnation(worker) >= 0 and self.ended(worker) is None

    def incarnation(self, worker: Worker) -> int:
        """Number of the worker's present process, from 0; -1 when it never had one."""
        return read_order(self._store.read(f"start/{worker}"))[0]

    def kill(self, worker: Worker) -> None:
        """Have every process of the worker so far killed."""
        self._store.set(f"kill/{worker}", str(self.incarnation(worker)))
