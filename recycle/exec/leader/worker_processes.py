"""What the leader knows of agents and of the processes that they have started.

A lost connection is not a death: an agent that comes back with its session has kept its workers. It has half a lease
for that. A new session of a node means that the agent before has died, and its workers with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from recycle.exec.leader.actions import AgentAbsent, Outbox, Send
from recycle.exec.members import worker_of
from recycle.exec.protocol import Ended, Hello, Kill, Ready, Start
from recycle.job.shape import Shape, Worker


@dataclass
class WorkerProcess:
    """A worker's latest process.

    Attributes:
        incarnation: its number, from 0; -1 when there was none.
        generation: the last generation before the process; None when there was no process, or it is gone with its node
            and may be started again.
        node: that it was started on.
        how: how it ended; None while it runs.
        lines: the last lines of its log.
        is_killed: the leader has asked for its end.
        ready: its members that have started up.
    """

    incarnation: int = -1
    generation: int | None = None
    node: int = 0
    how: str | None = None
    lines: str = ""
    is_killed: bool = False
    ready: set[str] = field(default_factory=set)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.incarnation >= 0 and self.how is None


class WorkerProcesses:
    """The latest process of each worker, and the agents of the nodes.

    Args:
        homes: the node of each position.
        lease: twice the seconds that an agent may be away.
        outbox: takes the orders to start and kill processes.
        tensor_parallel: members of each worker.

    Attributes:
        places: position -> position whose place it has, where the two differ.
    """

    def __init__(self, homes: Mapping[Worker, int], lease: float, outbox: Outbox, tensor_parallel: int = 1) -> None:
        self._homes, self._lease, self._outbox, self._tensor_parallel = homes, lease, outbox, tensor_parallel
        self._latest = {worker: WorkerProcess() for worker in homes}
        self._fresh: dict[Worker, str] = {}
        self._sessions: dict[int, str] = {}
        self._present: set[int] = set()
        self._away: dict[int, float] = {}
        self.places: dict[Worker, Worker] = {}

    def __getitem__(self, worker: Worker) -> WorkerProcess:
        return self._latest[worker]

    # Agents.

    def greet(self, hello: Hello) -> bool:
        """An agent has connected; whether it is another one than before.

        What it says of its processes replaces what is known of them.
        """
        node, is_new = hello.node, self._sessions.get(hello.node) != hello.session
        told = {worker_of(process.worker): process for process in hello.processes}
        kept = {worker for worker, process in told.items() if process.incarnation >= self[worker].incarnation}
        self._lose(node, kept, f"the agent of node {node} is gone" if is_new else "was not started")
        self._sessions[node] = hello.session
        self._present.add(node)
        self._away.pop(node, None)
        for worker, process in told.items():
            known = self[worker]
            if process.incarnation > known.incarnation:
                if known.is_running:
                    self._fresh[worker] = "ended while there was no leader"
                self._latest[worker] = known = WorkerProcess(process.incarnation)
            is_over = process.incarnation < known.incarnation or known.how is not None
            if process.how is None and (is_over or known.is_killed):
                self._outbox.put(Send(node, Kill(process.worker, process.incarnation)))
            if not is_over:
                known.generation, known.node, known.lines = process.generation, node, process.lines
                if process.how is not None:
                    self._end(worker, process.how)
        return is_new

    def part(self, absent: AgentAbsent) -> None:
        """The connection to a node's agent is gone."""
        if absent.node in self._present:
            self._present.discard(absent.node)
            self._away[absent.node] = 0.0

    def tick(self, passed: float) -> None:
        """Give up the agents that have been away for too long.

        Args:
            passed: seconds that the leader has been running since the last tick.
        """
        for node in list(self._away):
            self._away[node] += passed
            if self._away[node] > self._lease / 2:
                del self._away[node]
                self._sessions.pop(node, None)  # if it comes back its processes are killed
                self._lose(node, (), f"the agent of node {node} is gone")

    def _lose(self, node: int, kept: Collection[Worker], how: str) -> None:
        """The processes of a node are gone."""
        for worker, process in self._latest.items():
            if process.node == node and process.is_running and worker not in kept:
                process.generation = None
                self._end(worker, how)

    def expect(
        self,
        live: Collection[Worker],
        incarnations: Mapping[str, int],
        places: Mapping[str, str],
        absent: Collection[Worker] = (),
    ) -> None:
        """Follow another leader: these workers run, unless their agents say otherwise or do not come.

        Args:
            incarnations, places: as of `GenerationRecord`.
            absent: workers that the run started without. The processes of all others are dead.
        """
        self.places = {Worker.parse(worker): Worker.parse(place) for worker, place in places.items()}
        for worker in self._homes:
            if worker in live or worker not in absent or str(worker) in incarnations:
                how = None if worker in live else "it was dead already"
                self._latest[worker] = WorkerProcess(incarnations.get(str(worker), 0), 0, self.node(worker), how)
        for worker in live:
            self._away.setdefault(self.node(worker), 0.0)

    @property
    def incarnations(self) -> dict[str, int]:
        """Worker -> number of its latest process, of those that had more than one."""
        return {str(worker): process.incarnation for worker, process in self._latest.items() if process.incarnation > 0}

    def node(self, worker: Worker) -> int:
        """The node that the worker has its place on."""
        return self._homes[self.places.get(worker, worker)]

    def workers_of(self, node: int) -> list[Worker]:
        """The workers that have their places on a node."""
        return [worker for worker in self._homes if self.node(worker) == node]

    def missing_nodes(self, workers: Iterable[Worker]) -> list[int]:
        """The nodes of these workers on which no process can be started now."""
        return sorted(set(map(self.node, workers)) - self._present)

    def is_awaited(self, workers: Iterable[Worker]) -> bool:
        """Whether the agent of one of these workers is away and not given up yet."""
        return any(self.node(worker) in self._away for worker in workers)

    # Processes.

    def take(self, ended: Ended) -> None:
        """A process has ended."""
        worker = Worker.parse(ended.worker)
        latest = self[worker]
        if ended.incarnation == latest.incarnation and latest.is_running:
            latest.lines = ended.lines
            self._end(worker, ended.how)

    def _end(self, worker: Worker, how: str) -> None:
        self[worker].how = self._fresh[worker] = how

    def take_ended(self) -> dict[Worker, str]:
        """The workers whose process has ended since the last call, with how."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def take_ready(self, member: str, ready: Ready) -> None:
        """A member of a worker's process has started up."""
        process = self[worker_of(member)]
        if ready.incarnation == process.incarnation:
            process.ready.add(member)

    def is_ready(self, worker: Worker) -> bool:
        """Whether all members of the worker's present process have started up, and are not to end."""
        process = self[worker]
        return not process.is_killed and len(process.ready) == self._tensor_parallel

    def start(self, worker: Worker, generation: int, restored: int | None = None) -> None:
        """Start another process for a worker whose last one has ended.

        Args:
            generation: the last one before the process.
            restored: step of the checkpoint to start from; None for the initial state.
        """
        incarnation, node = self[worker].incarnation + 1, self.node(worker)
        self._latest[worker] = WorkerProcess(incarnation, generation, node)
        place = self.places.get(worker, worker)
        self._outbox.put(Send(node, Start(str(worker), incarnation, str(place), generation, restored)))

    def kill(self, worker: Worker) -> None:
        """Kill the worker's process, if it runs."""
        process = self[worker]
        if process.is_running:
            process.is_killed = True
            self._outbox.put(Send(process.node, Kill(str(worker), process.incarnation)))

    def move(self, positions: Collection[Worker], startable: Collection[Worker]) -> None:
        """Exchange places so that processes can be started for all `positions`.

        A position gets the place of a startable worker that is not among them, on a node without a peer of its stage if
        there is one. Startable positions keep their places. No process may run.
        """
        free = sorted(set(startable) - set(positions))
        for worker in sorted(set(positions) - set(startable)):
            peers = {self.node(peer) for peer in positions if peer.rank == worker.rank and peer in startable}
            other = min(free, key=lambda candidate: (self.node(candidate) in peers, candidate))
            free.remove(other)
            startable = {*startable, worker} - {other}
            own, others = self.places.get(worker, worker), self.places.get(other, other)
            self.places[worker], self.places[other] = others, own
        self.places = {worker: place for worker, place in sorted(self.places.items()) if worker != place}


def reassign(shape: Shape, live: Collection[Worker]) -> list[Worker] | None:
    """Positions for as many processes as are live, when a whole stage is lost; None if a rank would stay empty.

    The grid keeps its shape, and with it the micro-batches, the batch and every plan; an empty position counts as a
    failed worker, which peers stand in for. So every worker that is left has work, and any number from P on will do,
    where a smaller grid D' x P would leave those idle that do not fill a pipeline and needs a D' that divides D*m. The
    fewest hosts of a rank are never fewer than D' would be. Workers are as even over the ranks as can be: ranks with
    more live hosts keep the odd ones. A live position is kept where its rank has room.

    Limits: stages count alike, however long they take.
    """
    if len(live) < shape.ranks:
        return None
    hosts = [sorted(worker for worker in live if worker.rank == rank) for rank in range(shape.ranks)]
    share, odd = divmod(len(live), shape.ranks)
    fullest = sorted(range(shape.ranks), key=lambda rank: (-len(hosts[rank]), rank))[:odd]
    found: list[Worker] = []
    for rank in range(shape.ranks):
        free = [position for k in range(shape.pipelines) if (position := Worker(k, rank)) not in live]
        found += (hosts[rank] + free)[: share + (rank in fullest)]
    return sorted(found)
