"""What the leader knows of agents and of the processes that they have started.

A lost connection is not a death: an agent that comes back with its session has kept its workers. It has half a lease
for that. A new session of a node means that the agent before has died, and its workers with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from recycle.exec.leader.actions import KillWorker, Outbox, StartWorker, WorkerProcess
from recycle.exec.protocol import AgentProcess, Ended
from recycle.job.sections import MembershipSection
from recycle.job.shape import Worker

_NONE = WorkerProcess()


class WorkerProcesses:
    """The latest process of each worker, and the agents of the nodes.

    Args:
        homes: the node of each position.
        limits: says how long an agent may be away.
        outbox: takes the actions that start and kill processes, and has the time.

    Attributes:
        places: position -> position whose place it has, where the two differ.
    """

    def __init__(self, homes: Mapping[Worker, int], limits: MembershipSection, outbox: Outbox) -> None:
        self._homes, self._limits, self._outbox = homes, limits, outbox
        self._latest: dict[Worker, WorkerProcess] = {}
        self._fresh: dict[Worker, str] = {}
        self._sessions: dict[int, str] = {}
        self._present: set[int] = set()
        self._away: dict[int, float] = {}
        self._looked = outbox.now
        self.places: dict[Worker, Worker] = {}

    # Agents.

    def greet(self, node: int, session: str, processes: Sequence[AgentProcess]) -> bool:
        """An agent has connected; whether it is another one than before.

        What it says of its processes replaces what is known of them.
        """
        is_new = self._sessions.get(node) != session
        there = {p.worker for p in processes if p.incarnation >= self.incarnation(Worker.parse(p.worker))}
        self._lose(node, there, f"the agent of node {node} is gone" if is_new else "was not started")
        self._sessions[node] = session
        self._present.add(node)
        self._away.pop(node, None)
        for process in processes:
            worker = Worker.parse(process.worker)
            known = self._latest.get(worker, WorkerProcess())
            is_known = process.incarnation == known.incarnation
            is_over = process.incarnation < known.incarnation or (is_known and known.how is not None)
            if process.how is None and (is_over or (is_known and known.is_killed)):
                self._outbox.put(KillWorker(worker, process.incarnation, node))
            if is_over:
                continue
            if known.how is None and 0 <= known.incarnation < process.incarnation:
                self._fresh[worker] = "ended while there was no leader"
            self._latest[worker] = WorkerProcess(
                process.incarnation,
                process.generation,
                node,
                process.how,
                process.lines,
                is_killed=is_known and known.is_killed,
            )
            if process.how is not None:
                self._fresh[worker] = process.how
        return is_new

    def part(self, node: int) -> None:
        """The connection to a node's agent is gone."""
        if node in self._present:
            self._present.discard(node)
            self._away[node] = 0.0

    def tick(self) -> None:
        """Give up the agents that have been away for too long; time counts as far as the leader itself was running."""
        now = self._outbox.now
        passed, self._looked = min(now - self._looked, self._limits.heartbeat), now
        for node in list(self._away):
            self._away[node] += passed
            if self._away[node] > self._limits.lease / 2:
                del self._away[node]
                self._sessions.pop(node, None)  # if it comes back its processes are killed
                self._lose(node, (), f"the agent of node {node} is gone")

    def _lose(self, node: int, without: Collection[str], how: str) -> None:
        """The processes of a node are gone."""
        for worker, process in self._latest.items():
            if process.node == node and process.how is None and str(worker) not in without:
                self._latest[worker] = replace(process, how=how, is_lost=True)
                self._fresh[worker] = how

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

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes whose agent is connected."""
        return frozenset(self._present)

    def node(self, worker: Worker) -> int:
        """The node that the worker has its place on."""
        return self._homes[self.places.get(worker, worker)]

    def workers_of(self, node: int) -> list[Worker]:
        """The workers that have their places on a node."""
        return [worker for worker, home in self._nodes_of(self._homes) if home == node]

    def missing_nodes(self, workers: Collection[Worker]) -> list[int]:
        """The nodes of these workers on which no process can be started now."""
        return sorted({home for _, home in self._nodes_of(workers)} - self._present)

    def _nodes_of(self, workers: Iterable[Worker]) -> Iterator[tuple[Worker, int]]:
        homes, place = self._homes, self.places.get
        return ((worker, homes[place(worker, worker)]) for worker in workers)

    def is_awaited(self, workers: Collection[Worker]) -> bool:
        """Whether the agent of one of these workers is away and not given up yet."""
        return any(self.node(worker) in self._away for worker in workers)

    # Processes.

    def take(self, ended: Ended) -> None:
        """A process has ended."""
        worker = Worker.parse(ended.worker)
        latest = self._process(worker)
        if ended.incarnation == latest.incarnation and latest.how is None:
            self._latest[worker] = replace(latest, how=ended.how, lines=ended.lines)
            self._fresh[worker] = ended.how

    def take_ended(self) -> dict[Worker, str]:
        """The workers whose process has ended since the last call, with how."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def _process(self, worker: Worker) -> WorkerProcess:
        return self._latest.get(worker, _NONE)

    def start(self, worker: Worker, generation: int, restored: int | None = None) -> None:
        """Start another process for a worker whose last one has ended.

        Args:
            generation: the last one before the process.
            restored: step of the checkpoint to start from; None for the initial state.
        """
        incarnation, node = self._process(worker).incarnation + 1, self.node(worker)
        self._latest[worker] = WorkerProcess(incarnation, generation, node)
        place = self.places.get(worker, worker)
        self._outbox.put(StartWorker(worker, incarnation, node, place, generation, restored))

    def kill(self, worker: Worker) -> None:
        """Kill the worker's process, if it runs."""
        process = self._process(worker)
        if self.is_running(worker):
            self._latest[worker] = replace(process, is_killed=True)
            self._outbox.put(KillWorker(worker, process.incarnation, process.node))

    def is_running(self, worker: Worker) -> bool:
        """Whether the worker has a process."""
        process = self._process(worker)
        return process.incarnation >= 0 and process.how is None

    def is_killed(self, worker: Worker) -> bool:
        """Whether the leader has asked for the end of the worker's latest process."""
        return self._process(worker).is_killed

    def incarnation(self, worker: Worker) -> int:
        """Number of the worker's latest process, from 0; -1 when there was none."""
        return self._process(worker).incarnation

    def generation_before(self, worker: Worker) -> int | None:
        """The last generation before the worker's latest process; None when there is no such process, or it is gone
        with its node and may be started again."""
        process = self._process(worker)
        return None if process.incarnation < 0 or process.is_lost else process.generation

    def how_ended(self, worker: Worker) -> str | None:
        """How the worker's latest process ended; None when it has not."""
        return self._process(worker).how

    def last_lines(self, worker: Worker) -> str:
        """The last lines of the log of the worker's latest process, where it has ended."""
        return self._process(worker).lines

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
