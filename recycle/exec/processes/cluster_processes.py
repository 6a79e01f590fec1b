"""The workers' processes on all nodes, as the coordinator sees them: orders and answers in the store.

    start/<w>       the agent that is in this order's session shall start this process
    kill/<w>        incarnation up to which every process of the worker shall be dead
    gone/<w>        "<incarnation> <how>": this process has ended
    agent/<node>    the node's agent, with the session it is in; goes with the agent's lease
    seats           position -> position whose place on the nodes it has, where the two are not the same

An order is for a session, so that a process whose agent is gone is gone, whoever serves the node now. Everything is
read from the store: whoever coordinates next knows what this one knew.
"""

from __future__ import annotations

from collections.abc import Collection

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


class StartRequest(Struct, frozen=True):
    """Asks for a process.

    Attributes:
        incarnation: number of the worker's process, from 0; -1 for none.
        session: of the agent that is asked.
        seat: position whose place on its node the process takes.
        generation: the last one before the process.
        restored: step of the checkpoint to start from; None for the initial state.
    """

    incarnation: int = -1
    session: str = ""
    seat: str = ""
    generation: int = 0
    restored: int | None = None


def read_start_request(text: str | None) -> StartRequest:
    """The order that a text of the store gives; without a text none."""
    return StartRequest() if text is None else msgspec.json.decode(text, type=StartRequest)


class ClusterProcesses:
    """Worker processes that agents start and kill.

    Args:
        store: the coordinator's.
    """

    def __init__(self, job: Job, store: EtcdStore) -> None:
        self._store = store
        self._homes = node_of(job.shape, job.cluster.workers_per_node)
        self._told: dict[Worker, int] = {}
        moved = msgspec.json.decode(store.read("seats") or "{}", type=dict[str, str])
        self._seats = {Worker.parse(worker): Worker.parse(seat) for worker, seat in moved.items()}

    def nodes(self) -> list[int]:
        """The nodes whose agents are there."""
        return [node for node in sorted(set(self._homes.values())) if self._agent(node) is not None]

    def node(self, worker: Worker) -> int:
        """The node that the worker has its place on."""
        return self._homes[self._seat(worker)]

    def _seat(self, worker: Worker) -> Worker:
        return self._seats.get(worker, worker)

    def move(self, positions: Collection[Worker], startable: Collection[Worker]) -> None:
        """Give every one of `positions` the place of one that is startable, who gets its place for it.

        It goes to a node without a peer of its stage if there is one; whoever is startable and stays is not moved.
        No process may run.
        """
        free = sorted(set(startable) - set(positions))
        for worker in sorted(set(positions) - set(startable)):
            peers = {self.node(peer) for peer in positions if peer.rank == worker.rank and peer in startable}
            other = min(free, key=lambda candidate: (self.node(candidate) in peers, candidate))
            free.remove(other)
            startable = {*startable, worker} - {other}
            self._seats[worker], self._seats[other] = self._seat(other), self._seat(worker)
        seats = {str(worker): str(seat) for worker, seat in sorted(self._seats.items()) if worker != seat}
        self._store.set("seats", msgspec.json.encode(seats).decode())

    def _agent(self, node: int) -> AgentInfo | None:
        text = self._store.read(f"agent/{node}")
        return None if text is None else msgspec.json.decode(text, type=AgentInfo)

    def reachable(self, worker: Worker) -> bool:
        """Whether the worker's node has an agent."""
        return self._agent(self.node(worker)) is not None

    def order(self, worker: Worker) -> StartRequest:
        """The latest order to start the worker."""
        return read_start_request(self._store.read(f"start/{worker}"))

    def start(self, worker: Worker, generation: int = 0, restored: int | None = None) -> None:
        """Have the next process started. Nothing happens without an agent; it counts as gone then.

        Args:
            generation: the last one before it.
            restored: step of the checkpoint that it starts from.
        """
        agent = self._agent(self.node(worker))
        session = "" if agent is None else agent.session
        order = StartRequest(self.incarnation(worker) + 1, session, str(self._seat(worker)), generation, restored)
        self._store.set(f"start/{worker}", msgspec.json.encode(order).decode())

    def gone(self) -> dict[Worker, str]:
        """Processes that ended since the last call, with how."""
        found: dict[Worker, str] = {}
        for worker in self._homes:
            number = self.incarnation(worker)
            if number >= 0 and self._told.get(worker) != number and (how := self.ended(worker)) is not None:
                self._told[worker] = number
                found[worker] = how
        return found

    def ended(self, worker: Worker) -> str | None:
        """How the worker's latest process ended, None when it has not."""
        order = self.order(worker)
        ended, _, how = (self._store.read(f"gone/{worker}") or "-1 ").partition(" ")
        if int(ended) == order.incarnation:
            return how
        agent = self._agent(self.node(worker))
        if agent is None or agent.session != order.session:
            return self._lost(worker)
        return None

    def lost_its_agent(self, worker: Worker) -> bool:
        """Whether the worker's latest process ended with its node's agent."""
        return self.ended(worker) == self._lost(worker)

    def _lost(self, worker: Worker) -> str:
        return f"the agent of node {self.node(worker)} is gone"

    def running(self, worker: Worker) -> bool:
        """Whether the worker has a process, or will have one in a moment."""
        return self.incarnation(worker) >= 0 and self.ended(worker) is None

    def incarnation(self, worker: Worker) -> int:
        """Number of the worker's present process, from 0; -1 when it never had one."""
        return self.order(worker).incarnation

    def kill(self, worker: Worker) -> None:
        """Have every process of the worker so far killed."""
        self._store.set(f"kill/{worker}", str(self.incarnation(worker)))
