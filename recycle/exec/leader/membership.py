"""Membership: agents and their processes, workers that leave, and workers that rejoin.

**Agents.** A lost connection is not a death: an agent that reconnects with its session within half a lease has kept its
workers. A new session of a node means that the previous agent died with its workers.

**Departures.** SIGTERM, the node's agent or `recycle drain` ask a worker to leave. Training continues until there is a
plan without the worker; then all stop after the same iteration. A worker that misses its deadline is killed. The last
host of a unit stays. If signals ask all workers to leave, the run ends with a checkpoint.

**Rejoins.** Processes of workers that are expected back start early, and the run waits for them up to a deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from recycle.errors import RunError
from recycle.exec.leader.actions import AgentAbsent, DepartureAsked, Send
from recycle.exec.leader.plans import Plans
from recycle.exec.leader.state import Phase, RunDescription, RunState, WorkerProcess
from recycle.exec.members import worker_of
from recycle.exec.protocol import Ended, Hello, Kill, Leave, Leaving, Ready, Refused, Start, Value
from recycle.job.shape import Shape, Worker

END_SECONDS = 60.0
"""Seconds that a released worker may take to end, for example to write its part of a checkpoint; then it is killed."""


class Notice(Value):
    """A request for a worker to leave.

    Attributes:
        since: time of the request, monotonic seconds.
        seconds: time until the worker is killed; None for no deadline.
        by_signal: a signal asked, not a user of the run.
    """

    incarnation: int
    since: float
    seconds: float | None
    by_signal: bool


@dataclass
class Rejoin:
    """A worker's expected return at iteration `step` or soon after.

    Attributes:
        started: its process was requested.
        deadline: until when the run waits, monotonic seconds; None before the run reaches `step`.
    """

    worker: Worker
    step: int
    started: bool = False
    deadline: float | None = None


@dataclass
class _Agent:
    """A node's agent: its session, empty until it connects, and the seconds since its connection was lost."""

    session: str = ""
    absent: float | None = None


class Membership(RunState):
    """The run's state, and how workers start, leave and rejoin.

    Attributes:
        all_leave: signals asked every live worker to leave, so the run ends.
        prepared: workers that may leave.
        is_prepared: the plan without them is ready.
    """

    def __init__(self, run: RunDescription, now: float) -> None:
        super().__init__(run, now)
        self.plans = Plans(self.job, self, run.own, run.can_search, run.is_script)
        self._fresh_ends = dict[Worker, str]()
        self._agents: dict[int, _Agent] = {}
        self._ticked = now
        self.is_reached = self._was_reached = True
        self._notices = dict[Worker, Notice]()
        self._refused = dict[Worker, int]()
        """Workers that stay as last hosts, though a signal asked them to leave -> incarnation. If signals have asked
        all live workers, the run ends."""
        self.prepared: list[Worker] = []
        self._leaving = dict[Worker, tuple[int, float, float]]()
        """Released workers that have not ended yet -> step, time of the request, and deadline."""
        self.all_leave = self.is_prepared = False
        self._rejoins: list[Rejoin] = []

    # Agents.

    def register_agent(self, hello: Hello) -> None:
        node = hello.node
        is_new = self._agents.get(node, _Agent()).session != hello.session
        reported = {worker_of(process.worker): process for process in hello.processes}
        kept = {
            worker for worker, process in reported.items() if process.incarnation >= self.processes[worker].incarnation
        }
        self._lose_processes(node, kept, f"the agent of node {node} is gone" if is_new else "was not started")
        self._agents[node] = _Agent(hello.session)
        self.detector.connected(reported, self.now)
        for worker, process in reported.items():
            known = self.processes[worker]
            if process.incarnation > known.incarnation:
                if known.is_running:
                    self._fresh_ends[worker] = "ended while no agent led the run"
                self.processes[worker] = known = WorkerProcess(process.incarnation)
            is_released = self.released[process.worker] - 1 == process.incarnation == known.incarnation
            if process.how is None and is_released and not known.is_killed:
                known.how = None  # the last leader may not have told it
                self.tell(self._expect_end(worker, self.now))
            is_over = process.incarnation < known.incarnation or known.how is not None
            if process.how is None and (is_over or known.is_killed):
                self.put(Send(node, Kill(process.worker, process.incarnation)))
            if not is_over:
                known.generation, known.node, known.lines = process.generation, node, process.lines
                if process.how is not None:
                    self._note_end(worker, process.how)
        if is_new:
            for worker in self.positions.difference(reported):
                if self.node_of(worker) == node:  # a departure request was for the previous agent
                    self._notices.pop(worker, None)
                    self.gone.pop(str(worker), None)
            for rejoin in self.awaited():  # another leader may have started it
                rejoin.started = rejoin.started or self.processes[rejoin.worker].is_running

    def lose_agent(self, absent: AgentAbsent) -> None:
        agent = self._agents.get(absent.node)
        if agent is not None:  # else its `Hello` has ended the run
            agent.absent = 0.0

    def count_time(self) -> None:
        """Count the time that the leader's process ran since the last call, and give up agents absent for too long."""
        passed, self._ticked = min(self.now - self._ticked, self.limits.heartbeat), self.now
        self.waited += passed
        was_reached, self._was_reached = self._was_reached, self.is_reached
        for node, agent in list(self._agents.items()):
            if agent.absent is None:
                continue
            # Without answers of etcd this node may be cut off, and the agent does not find its leader.
            agent.absent = agent.absent + passed if was_reached and self.is_reached else 0.0
            if agent.absent <= self.limits.lease / 2:
                continue
            # etcd may be slow to name this leader to it
            if agent.session or agent.absent > self.limits.store_timeout or not self._is_last_host(node):
                del self._agents[node]  # if it comes back its processes are killed
                self._lose_processes(node, (), f"the agent of node {node} is gone")

    def _is_last_host(self, node: int) -> bool:
        """Whether a layer would be lost with this node and with all stuck or silent workers and absent agents."""
        running = [worker for worker in self.holders if self.processes[worker].is_running]
        stuck = self.detector.stuck(running, self.limits.dead_after / 2)
        stuck.update(worker for worker in running if self.detector.is_silent(worker, self.now))
        away = {node for node, agent in self._agents.items() if agent.absent is not None}
        heard = [worker for worker in running if worker not in stuck and self.node_of(worker) not in away]
        own = [worker for worker in running if self.node_of(worker) == node]
        return self.holdings.lost(heard) != self.holdings.lost([*heard, *own])

    def silent_workers(self, done: Collection[str] = ()) -> dict[Worker, str]:
        """Return what `Detector.lost` finds, without workers of absent agents, which `count_time` judges."""
        lost = self.detector.lost(self.live, self.now, done)
        away = {node for node, agent in self._agents.items() if agent.absent is not None}
        return {worker: cause for worker, cause in lost.items() if self.node_of(worker) not in away}

    def _lose_processes(self, node: int, kept: Collection[Worker], cause: str) -> None:
        for worker, process in self.processes.items():
            if process.node == node and process.is_running and worker not in kept:
                process.generation = None
                self._note_end(worker, cause)

    def expect_processes(self, incarnations: Mapping[str, int], places: Mapping[str, str]) -> None:
        """Succeed another leader: its live workers run unless their agents report otherwise."""
        self.places = {Worker.parse(worker): Worker.parse(place) for worker, place in places.items()}
        for worker in self.processes:
            if worker in self.live or worker not in self.run.absent or str(worker) in incarnations:
                how = None if worker in self.live else "it was dead already"
                self.processes[worker] = WorkerProcess(incarnations.get(str(worker), 0), 0, self.node_of(worker), how)
        for worker in sorted(self.live):
            self._agents.setdefault(self.node_of(worker), _Agent(absent=0.0))

    def node_of(self, worker: Worker) -> int:
        return self.run.homes[self.places.get(worker, worker)]

    def missing_nodes(self, workers: Iterable[Worker]) -> list[int]:
        present = {node for node, agent in self._agents.items() if agent.absent is None}
        return sorted(set(map(self.node_of, workers)) - present)

    def is_awaited(self, workers: Iterable[Worker]) -> bool:
        absent = {node for node, agent in self._agents.items() if agent.absent is not None}
        return not absent.isdisjoint(map(self.node_of, workers))

    # Processes.

    def take_end(self, ended: Ended) -> None:
        worker = Worker.parse(ended.worker)
        latest = self.processes[worker]
        if ended.incarnation == latest.incarnation and latest.is_running:
            latest.lines = ended.lines
            self._note_end(worker, ended.how)
        self.detector.end(self.members(worker))

    def _note_end(self, worker: Worker, cause: str) -> None:
        self.processes[worker].how = self._fresh_ends[worker] = cause

    def take_fresh_ends(self) -> dict[Worker, str]:
        """Return the workers whose process has ended since the last call, with the cause."""
        fresh, self._fresh_ends = self._fresh_ends, {}
        return fresh

    def take_ready(self, member: str, ready: Ready) -> None:
        """Note that a member of a worker's process has started up."""
        process = self.processes[worker_of(member)]
        if ready.incarnation == process.incarnation:
            process.ready.add(member)
            process.at = ready.at
            self.plans.own_text = ready.schedule or self.plans.own_text

    def is_ready(self, worker: Worker) -> bool:
        process = self.processes[worker]
        return not process.is_killed and len(process.ready) == self.job.grid.tensor_parallel

    def start_process(self, worker: Worker, restored: int | None = None) -> None:
        """Start a worker's next process, from the checkpoint of step `restored` or the initial state."""
        incarnation, generation = self.processes[worker].incarnation + 1, self.record.generation
        node, place = self.node_of(worker), self.places.get(worker, worker)
        self.processes[worker] = WorkerProcess(incarnation, generation, node)
        self.put(Send(node, Start(str(worker), incarnation, str(place), generation, restored)))

    def kill(self, worker: Worker) -> None:
        process = self.processes[worker]
        if process.is_running:
            process.is_killed = True
            self.put(Send(process.node, Kill(str(worker), process.incarnation)))

    def exchange_places(self, positions: Collection[Worker], startable: Collection[Worker]) -> None:
        """Swap places so that every position in `positions` lies on a node that can start it. No process may run.

        A position gets the place of a startable worker outside `positions`, preferably on a node without a peer.
        """
        free, places = sorted(set(startable) - set(positions)), self.places
        for worker in sorted(set(positions) - set(startable)):
            peers = {self.node_of(peer) for peer in positions if peer.rank == worker.rank and peer in startable}
            other = min(free, key=lambda candidate: (self.node_of(candidate) in peers, candidate))
            free.remove(other)
            startable = {*startable, worker} - {other}
            places[worker], places[other] = places.get(other, other), places.get(worker, worker)
        self.places = {worker: place for worker, place in sorted(places.items()) if worker != place}

    # Departures.

    def take_leaving(self, member: str, leaving: Leaving) -> None:
        worker = worker_of(member)
        if leaving.incarnation == self.processes[worker].incarnation:
            if leaving.reason:
                self.log("warning", message=f"worker {worker} is asked to leave: {leaving.reason}")
            self._note_departure(worker, None, by_signal=True)

    def ask_to_leave(self, asked: DepartureAsked) -> None:
        for worker in asked.workers:
            self._note_departure(worker, asked.seconds, by_signal=False)

    def _note_departure(self, worker: Worker, seconds: float | None, by_signal: bool) -> None:
        """Only the first request counts, with its deadline. A dead worker is not started again."""
        process, notice = self.processes[worker], self._notices.get(worker)
        if not process.is_present and worker in self.live:
            self.put(Refused(str(worker), "its process has not started yet or has just ended; drain it again"))
        elif not process.is_present:
            self.gone[str(worker)] = process.incarnation
            self._persist_departure()
        elif not self.has_left(worker) and (notice is None or notice.incarnation != process.incarnation):
            self._notices[worker] = Notice(process.incarnation, self.now, seconds, by_signal)
            if worker not in self.live:  # it starts up, or waits to join
                leave = self.release(worker)
                self._persist_departure()
                self.tell(leave)

    def _persist_departure(self) -> None:
        if self.record.generation:
            self.persist()

    def prepare_departures(self) -> None:
        """Prepare the plan without leaving workers, release idle ones, and note completed departures."""
        self.check_leavers()
        live = self.live
        self.all_leave, self.is_prepared, self.prepared = False, False, []
        for worker, notice in list(self._notices.items()):
            process = self.processes[worker]
            if notice.incarnation != process.incarnation:
                del self._notices[worker]
            elif worker not in live:
                self.gone[str(worker)] = self._notices.pop(worker).incarnation
        self.all_leave = self.are_asked_to_leave(live)
        has_single_copies = self.job.train.sharded_optimizer and self.job.train.optimizer_copies == 1
        remedy = "set [train] optimizer_copies = 2" if has_single_copies else "let a peer re-join first"
        for worker in list(self._notices) if not self.all_leave else ():
            stay = live.difference(self.prepared, [worker])
            away = {other for other in stay if self.is_awaited([other])}  # perhaps dead with its agent
            if not (unit := self.lost_unit(stay - self.joined - away)):
                self.prepared.append(worker)
            elif not (stay & self.joined or away or self.holdings.is_restoring):
                self._refuse(
                    worker,
                    f"{unit} no other live host; {remedy}, or end the run with a checkpoint by SIGTERM to recycle"
                    " train, or to all agents",
                )
        if self.prepared:
            try:
                self.is_prepared = self.plans.plan_for(self.failed.union(self.prepared)) is not None
            except RunError as error:
                for worker in self.prepared:
                    self._refuse(worker, str(error))
                self.prepared = []

    def are_asked_to_leave(self, workers: Collection[Worker]) -> bool:
        """Whether signals have asked all these processes to leave, if there are any."""
        asked = {worker: notice.incarnation for worker, notice in self._notices.items() if notice.by_signal}
        asked |= self._refused
        return bool(workers) and all(asked.get(worker) == self.processes[worker].incarnation for worker in workers)

    def _refuse(self, worker: Worker, reason: str) -> None:
        notice = self._notices.pop(worker)
        if notice.by_signal:
            self._refused[worker] = notice.incarnation
        self.log("warning", message=f"worker {worker} cannot leave: {reason}")
        self.put(Refused(str(worker), reason))

    @property
    def live_or_leaving(self) -> set[Worker]:
        """The live workers, and released workers that have not ended yet."""
        return self.live | self._leaving.keys()

    def overdue_leavers(self) -> dict[Worker, str]:
        """Return workers that missed the deadline to leave, each with the reason for the kill."""
        return {
            worker: f"asked to leave within {notice.seconds:g} s, and no iteration ended in time"
            for worker, notice in self._notices.items()
            if notice.seconds is not None and self.now - notice.since >= notice.seconds
        }

    def has_left(self, worker: Worker) -> bool:
        """Return whether the worker's latest process left on request, so that the run starts no other."""
        process, notice = self.processes[worker], self._notices.get(worker)
        has_ended = notice is not None and notice.incarnation == process.incarnation and not process.is_running
        return has_ended or self.gone.get(str(worker)) == process.incarnation

    def release(self, worker: Worker) -> Leave:
        """Remove a worker that leaves; a live one may hear the message once a record without it is written."""
        self.remove_live(worker)
        notice, name = self._notices.pop(worker), str(worker)
        self.gone[name], self.released[name] = notice.incarnation, notice.incarnation + 1
        return self._expect_end(worker, notice.since)

    def _expect_end(self, worker: Worker, since: float) -> Leave:
        self._leaving[worker] = self.next_step, since, self.now + END_SECONDS
        return Leave(str(worker), self.processes[worker].incarnation)

    def remove_live(self, worker: Worker) -> None:
        self.processes[worker].ready.clear()  # its process may take a while to end, and does not wait to join
        self.live.discard(worker)
        self.joined.discard(worker)

    def check_leavers(self) -> None:
        for worker, (step, since, deadline) in list(self._leaving.items()):
            if not self.processes[worker].is_running:
                del self._leaving[worker]
                self.log("drained", worker=str(worker), step=step, seconds=round(self.now - since, 6))
            elif self.now > deadline:
                self.kill(worker)

    # Rejoins.

    def expect_rejoins(self) -> None:
        for fault in self.run.faults:
            if not fault.strikes and fault.step >= self.next_step:
                self._rejoins.append(Rejoin(fault.worker, fault.step))

    @property
    def script_ends(self) -> bool:
        """Whether the user's script has done its last step."""
        return self.run.is_script and self.record.commit is not None and self.record.commit.finished

    def awaited(self) -> list[Rejoin]:
        """Return the dead workers that are expected back, each with its next return; none when a script ends."""
        if self.script_ends:
            return []
        nearest: dict[Worker, Rejoin] = {}
        for rejoin in sorted(self._rejoins, key=lambda r: r.step):
            if rejoin.worker not in self.live:
                nearest.setdefault(rejoin.worker, rejoin)
        return list(nearest.values())

    def start_rejoins(self) -> None:
        """Start the processes of awaited workers, early if a generation runs, because imports take a while."""
        for rejoin in self.awaited():
            worker, process = rejoin.worker, self.processes[rejoin.worker]
            if process.generation is None:
                rejoin.started = False  # its process is gone with its node
            is_due = self.phase is Phase.RUNNING or rejoin.step <= self.next_step
            is_free = not process.is_running and not self.missing_nodes([worker])
            if is_due and not rejoin.started and is_free:
                rejoin.started = True
                self.start_process(worker)

    def admit_rejoins(self) -> bool:
        """Admit the workers that join at the next step; return False while one of them must be waited for."""
        for rejoin in self.awaited():
            worker, is_running = rejoin.worker, self.processes[rejoin.worker].is_running
            if rejoin.step > self.next_step:
                continue
            if rejoin.deadline is None:
                rejoin.deadline = self.now + self.limits.rejoin_deadline
            is_leaving = rejoin.started and self.has_left(worker)
            if rejoin.started and is_running and self.is_ready(worker) and not is_leaving:
                self.live.add(worker)
                self.joined.add(worker)
                self._refused.clear()  # the others may leave now, if they are asked again
                self.detector.forget([worker])
            elif (is_running or not rejoin.started) and self.now < rejoin.deadline and not is_leaving:
                return False  # it starts up, its last process is about to end, or its node is missing
            elif not self.has_left(worker):
                self.kill(worker)
                self.log("fault", worker=str(worker), step=rejoin.step, cause="did not re-join in time")
            self._rejoins.remove(rejoin)
        return True

    def restart_workers(self) -> None:
        """Restart workers that died, if the run does so by itself, and expect them when they are ready."""
        if not self.run.restarts or self.phase is not Phase.RUNNING or self.script_ends:
            return
        coming: list[Worker] = []
        awaited = {rejoin.worker for rejoin in self.awaited()}
        for worker in sorted(self.failed - awaited - self.run.absent):
            process = self.processes[worker]
            if self.has_left(worker):
                continue
            if process.is_running and self.is_ready(worker):
                self._rejoins.append(Rejoin(worker, self.next_step, started=True))
            elif process.is_running:
                coming.append(worker)
            elif self.may_restart(worker) and not self.missing_nodes([worker]):
                self.start_process(worker)
                self.detector.forget([worker])
        for worker, cause in self.detector.lost(coming, self.now, is_starting=True).items() if coming else ():
            self.kill(worker)  # the next one is started when it has ended
            self.log_detected(worker, f"{cause} in start-up")
            self.detector.forget([worker])

    def may_restart(self, worker: Worker) -> bool:
        return self.processes[worker].incarnation - self.released[str(worker)] < self.run.restarts

    def restart_all(self) -> None:
        """Enter the start phase, after a restore or at the start of the run: all deadlines count from now."""
        self.gone |= {str(worker): self._notices[worker].incarnation for worker in filter(self.has_left, self._notices)}
        self._notices.clear()
        self._refused.clear()
        self._leaving.clear()
        for rejoin in self._rejoins:
            rejoin.started, rejoin.deadline = False, None
        self.detector.forget(self.positions)
        self.start_deadline = self.now + self.limits.start_deadline
        self.enter(Phase.STARTING)


def reassign(shape: Shape, live: Collection[Worker]) -> list[Worker] | None:
    """Assign grid positions to the live processes when a whole stage is lost; None if a rank would stay empty.

    The grid keeps its shape; empty positions count as failed workers. Workers are spread evenly over the ranks, and
    ranks with more live hosts keep the odd ones. A live position is kept where its rank has room.
    """
    if len(live) < shape.ranks:
        return None
    hosts = [sorted(worker for worker in live if worker.rank == rank) for rank in range(shape.ranks)]
    share, odd = divmod(len(live), shape.ranks)
    fullest = sorted(range(shape.ranks), key=lambda rank: (-len(hosts[rank]), rank))[:odd]
    assigned: list[Worker] = []
    for rank in range(shape.ranks):
        free = [position for k in range(shape.pipelines) if (position := Worker(k, rank)) not in live]
        assigned += (hosts[rank] + free)[: share + (rank in fullest)]
    return sorted(assigned)
