"""The leader's runtime: passes messages to the leader and carries out its actions.

`recycle train` has one for its machine; on a cluster, the agent with the leader's role has one for all nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from recycle.errors import JobError, RecycleError
from recycle.exec.agent.node_agent import StandingOrders
from recycle.exec.checkpoint.completion import CheckpointCompletion
from recycle.exec.checkpoint.resume import ResumePoint
from recycle.exec.faults.kinds import KINDS
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.run_address import resume_command
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.launch.trackers import Observer, Trackers
from recycle.exec.leader.actions import (
    Action,
    AgentAbsent,
    Ask,
    Begin,
    CompleteCheckpoint,
    DepartureAsked,
    DiscardCheckpoint,
    EndEarly,
    Event,
    Fail,
    FindCheckpoint,
    Finish,
    Line,
    Persist,
    Rewind,
    Send,
    StoredCheckpoint,
    Tell,
    Tick,
    Waiting,
)
from recycle.exec.leader.leader import Leader
from recycle.exec.leader.plans import first_plan
from recycle.exec.leader.state import Phase, PlannedFault, RunDescription
from recycle.exec.planning.planning import PlanService
from recycle.exec.processes.processes import Waker
from recycle.exec.protocol import (
    IS_DEAD,
    Alive,
    Batch,
    Cursor,
    Drain,
    Drained,
    GenerationRecord,
    Hello,
    Keys,
    LeaderMessage,
    Order,
    Over,
    Refused,
    Rejected,
)
from recycle.job.shape import Worker
from recycle.plans.shards import plan_of
from recycle.runs.logs import merge_logs

ALIVE_PER_LEASE = 6
"""How often per lease the leader tells agents that its process runs."""


Peer = Callable[[Order, bytes | None], None]
"""Sends (order, encoded order or None) to an agent, as soon as its connection allows."""


class LeaderRuntime:
    """Runs the leader of one run; call `tick` twice per heartbeat and at every event, until `over`.

    Args:
        register: persists the register; raises RoleLost if another agent leads.
        homes: node of each position.
        waker: is woken when a plan or a checkpoint is ready.
        restarts: how often a dead worker is restarted automatically.

    Attributes:
        over: the run has ended, and `digests` is set.
        digests: worker -> stage -> sha256 of the stage's final state.
        agents: node -> its connected agent.
    """

    def __init__(
        self,
        *,
        request: RunRequest,
        register: Callable[[Persist], None],
        homes: Mapping[Worker, int],
        directory: RunDirectory,
        waker: Waker,
        restarts: int = 0,
    ) -> None:
        job = request.job
        self._request, self._job, self._register = request, job, register
        self._directory = directory
        self._observers: list[Observer] = [request.observer]
        self.over = False
        self.digests: Mapping[str, Mapping[int, str]] = {}
        directory.warn = self._warn
        self._plans = PlanService(
            job,
            request.planner,
            directory.plans,
            directory.profiles,
            waker,
            request.schedule,
            bool(request.command and first_plan(job)),
        )
        self._judged_at = self._alive_sent_at = 0.0
        self._checkpoints = CheckpointCompletion(
            job, directory.checkpoints, request.text_digest, directory.has_metrics_of, waker.wake
        )
        self.agents: dict[int, Peer] = {}
        self._standing = StandingOrders()
        self._drains: dict[Worker, list[Callable[[Refused], None]]] = {}
        self._early_drains: list[tuple[Drain, Callable[[Drained | Refused], None]]] = []
        self._over: Over | None = None  # once the run has ended
        run = RunDescription(
            job=job,
            steps=request.steps,
            initial=request.hosts,
            homes=homes,
            absent=request.absent,
            faults=[
                PlannedFault(str(fault), fault.worker, fault.step, KINDS[fault.kind].struck) for fault in request.faults
            ],
            restarts=restarts,
            own=self._plans.own(),
            can_search=self._plans.can_search,
            started=time.monotonic() - directory.elapsed(),
            logs=str(directory.logs),
            resume_command=resume_command(directory.path, bool(request.command)),
            script_restarts=request.script_restarts if request.command else None,
        )
        self.leader = Leader(run, time.monotonic())

    @property
    def record(self) -> GenerationRecord:
        return self.leader.record

    @property
    def ends_early(self) -> bool:
        return self.leader.ends_early

    @property
    def ends(self) -> bool:
        """Whether the run ends, early or after its last step."""
        return self.ends_early or self.leader.phase in (Phase.FINISHED, Phase.OVER)

    # The beginning.

    def start_run(self, earlier: ResumePoint | None = None) -> None:
        """Start the run, or resume from an earlier part's checkpoint; call before the first tick."""
        begin = Begin(kept=self._checkpoints.kept())
        if earlier is not None:
            for warning in earlier.warnings:
                self._warn(warning)
            begin = msgspec.structs.replace(begin, generation=earlier.generation, committed=len(earlier.metrics) - 1)
            if earlier.checkpoint is not None:
                manifest = earlier.checkpoint.manifest
                has_metrics = self._directory.has_metrics_of(manifest.step)
                begin = msgspec.structs.replace(
                    begin, checkpoint=StoredCheckpoint(manifest.step, manifest.commit, has_metrics)
                )
        self._take(begin)
        self._start_trackers()

    def take_over(self, node: int, record: GenerationRecord | None, cursor: Cursor | None) -> None:
        """Continue from another leader's register, or start the run if it is empty; call before the first tick."""
        if record is None:
            self.start_run(self._request.earlier_part(self._directory.path) if self._directory.resumes else None)
            return
        failed = frozenset(self._job.shape.workers()) - {Worker.parse(worker) for worker in record.live}
        kept = [state for part in (record, cursor) if part is not None for state in (part.verified, part.candidate)]
        names = [record.plan, record.held, record.holds, *(state.holds for state in kept if state is not None)]
        digests = {plan_of(name) if " " in name else name for name in names}
        hosts = {digest: hosts for digest in digests if digest and (hosts := self._plans.hosts(digest)) is not None}
        plan = self._plans.adopted(failed, record.plan) if record.plan else None
        times = self._plans.times(record.times) if record.times else None
        self._take(Begin(node, record, cursor, plan, hosts, times, kept=self._checkpoints.kept()))
        self._start_trackers()

    def _start_trackers(self) -> None:
        step = self.leader.next_step
        self._observers.append(Trackers(self._job, self._directory.path, step, self._warn, self._request.findings.gpu))

    # Agents.

    def connect_agent(self, peer: Peer, hello: Hello) -> bool:
        """Accept a connected agent; return False if its node already has an agent."""
        node = hello.node
        if node in self.agents:
            peer(Rejected(), None)
            return False
        self.agents[node] = peer
        if self._over is not None:  # the agent's last connection may have broken before
            peer(self._over, None)
            return True
        for order in self._standing.messages():
            peer(order, None)
        if self._standing.keys:
            peer(Keys(self._standing.keys), None)
        self._take(hello)
        return True

    def disconnect_agent(self, node: int, peer: Peer) -> None:
        if self.agents.get(node) is peer:
            del self.agents[node]
            self._take(AgentAbsent(node))

    def take(self, node: int, batch: Batch) -> None:
        self._take(batch)
        if batch.keys:
            self._standing.keys.update(batch.keys)
            keys = Keys(batch.keys)
            body = msgspec.msgpack.encode(keys)
            for other, peer in self.agents.items():
                if other != node:
                    peer(keys, body)

    def drain(self, request: Drain, answer: Callable[[Drained | Refused], None]) -> None:
        try:
            workers = self._workers_of(request.target)
        except JobError as error:
            answer(Refused("", str(error)))
            return
        if self.leader.is_awaited(workers):  # its agent will tell which processes run
            self._early_drains.append((request, answer))
            return
        live, processes = self.leader.live, self.leader.processes
        present = [worker for worker in workers if worker in live or processes[worker].is_present]
        for worker in present:
            self._drains.setdefault(worker, []).append(answer)
        if present:
            answer(Drained(list(map(str, present))))
        elif len(workers) == 1:
            answer(Refused(str(workers[0]), IS_DEAD))
        else:
            answer(Refused("", f"all workers of node {request.target}: {IS_DEAD}"))
        self._take(DepartureAsked(workers, request.seconds))

    def _workers_of(self, target: str) -> list[Worker]:
        shape = self._job.shape
        if not target.isdecimal():
            return [shape.require(Worker.parse(target), f"worker {target}")]
        if int(target) > (last := max(self.leader.run.homes.values())):
            raise JobError(f"node {target}: the job's workers are on nodes 0 to {last}")
        return [worker for worker in shape.workers() if self.leader.node_of(worker) == int(target)]

    def send_outcome(self, outcome: str) -> None:
        self._over = Over(outcome)
        for peer in self.agents.values():
            peer(self._over, None)

    # Ticks.

    def tick(self, is_reached: bool = True) -> None:
        """Let the leader decide, after all messages so far were taken. Raises RunError, RoleLost.

        Without `is_reached` the silence of others may be this node's own fault, and does not count.
        """
        early, self._early_drains = self._early_drains, []
        for request, answer in early:
            self.drain(request, answer)
        for planned in self._plans.poll(self._warn):
            self._take(planned)
        for checkpoint in self._checkpoints.poll(self._warn):
            self._take(checkpoint)
        now = time.monotonic()
        if now - self._alive_sent_at >= self._job.membership.lease / ALIVE_PER_LEASE:
            self._alive_sent_at = now
            for peer in self.agents.values():
                peer(Alive(), None)
        judges_beats = is_reached and now - self._judged_at >= self._job.membership.heartbeat / 2
        self._judged_at = now if judges_beats else self._judged_at
        self._take(Tick(judges_beats, is_reached))

    def end_early(self) -> None:
        self._take(EndEarly())

    def _take(self, message: Any) -> None:
        for action in self.leader.take(time.monotonic(), message):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Persist():
                self._register(action)
            case Tell(message=message):
                self._tell(message)
            case Event(kind=kind, fields=fields):
                self._event(kind, **fields)
            case Line(line=line):
                if self._directory.metric(dict(line)):
                    for observer in self._observers:
                        observer.committed(dict(line))
            case Send(node=node, order=order):
                if (peer := self.agents.get(node)) is not None:
                    peer(order, None)
            case Refused(worker=worker):
                for answer in self._drains.pop(Worker.parse(worker), []):
                    answer(action)
            case Ask(question=question, profile=profile):
                self._plans.ask(question, profile)
            case DiscardCheckpoint(step=step):
                self._checkpoints.discard(step)
            case CompleteCheckpoint():
                self._checkpoints.complete(action)
            case FindCheckpoint(upto=upto):
                self._checkpoints.find(upto)
            case Rewind(step=step, checkpoints=checkpoints):
                self._directory.rewind(step)
                if checkpoints:
                    self._checkpoints.rewind(step)
            case Waiting(what=what):
                self._request.observer.waiting(what)
            case Finish():
                self.digests = action.digests
                if action.merge:
                    self._merge_traces()
                self._directory.warn_of_lost_lines()
                self.over = True
            case Fail(error=error):
                raise error

    def _tell(self, message: LeaderMessage) -> None:
        self._standing.take(message)
        body = msgspec.msgpack.encode(message)
        for peer in self.agents.values():
            peer(message, body)

    def _merge_traces(self) -> None:
        """A failure only warns: the run has ended well."""
        if self._job.train.trace == "off":
            return
        try:
            every = merge_logs(self._directory.path, self._job.shape)
        except Exception as error:
            self._warn(f"no trace.json: {error if isinstance(error, RecycleError) else repr(error)}")
            return
        if every > 1:
            self._warn(f"trace.json has every {every}th iteration; logs/ has them all")

    def _event(self, kind: str, **fields: Any) -> None:
        event = self._directory.event(kind, **fields)
        for observer in self._observers:
            observer.event(event)

    def _warn(self, message: str) -> None:
        self._event("warning", message=message)

    def close(self) -> None:
        """Close the planners, the trackers, and the thread that completes checkpoints."""
        for trackers in self._observers[1:]:
            trackers.close()
        self._plans.close()
        self._checkpoints.close()
