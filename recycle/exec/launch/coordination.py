"""What the agent that holds the coordinator's role does: start the run or take it over, and bring it to its end.

All it knows is in the store, so another agent can go on at any moment. Of what it keeps in memory, the age of
heartbeats, the number of attempts to form and the one retry of a step that was not finite begin anew.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection
from typing import Any

from recycle.errors import RunError
from recycle.exec.checkpoint.checkpoint_manager import CheckpointManager
from recycle.exec.launch.metrics import metrics_line
from recycle.exec.launch.observer import Observer
from recycle.exec.launch.restart import ClusterRestart
from recycle.exec.launch.shared_directory import SharedRunDirectory
from recycle.exec.membership.coordinator import Coordinator, GenerationPhase, StageLost
from recycle.exec.membership.etcd_store import EtcdStore
from recycle.exec.membership.members import joined_digests, members_of
from recycle.exec.membership.messages import Commit, GenerationRecord
from recycle.exec.membership.schema import FailedKey, FinalKey, FinishedKey, ReadyKey, RegisterKey
from recycle.exec.planning.placement import rank_of_stages, stages_by_rank
from recycle.exec.planning.planning import Planner, PlanService
from recycle.exec.planning.replanning import Replanner
from recycle.exec.processes.cluster_processes import ClusterProcesses
from recycle.exec.processes.waker import Waker
from recycle.ir.schedule import Schedule
from recycle.job import PricedJob
from recycle.runs import merge_logs
from recycle.shape import Worker

LEAVE_SECONDS = 30.0
"""How long the end of the run waits for the other agents to leave."""


class Coordination:
    """One agent's term as coordinator.

    Args:
        store: writes only as long as this agent holds the role.
        node: of this agent.
        schedule: a schedule of one's own, for the set of workers that it leaves alive.
        planner: makes the schedule of any other.
        text_digest: of the training text.
    """

    def __init__(
        self,
        job: PricedJob,
        steps: int,
        store: EtcdStore,
        node: int,
        directory: SharedRunDirectory,
        waker: Waker,
        observer: Observer,
        planner: Planner | None,
        schedule: Schedule | None = None,
        text_digest: str | None = None,
    ) -> None:
        self._job, self._steps, self._store, self._node = job, steps, store, node
        self._directory, self._waker, self._observer = directory, waker, observer
        self._processes = ClusterProcesses(job, store)
        self._plans = PlanService(job, planner, directory.plans, waker, schedule, self._warn)
        self._replanner = Replanner(job, self._plans, directory.profiles, self._event)
        self._checkpoints = CheckpointManager(
            job,
            directory.checkpoints,
            text_digest,
            store,
            self._event,
            waker.wake,
            time.monotonic,
            rank_of_stages(stages_by_rank(job.shape, schedule)),
        )
        absent = schedule.failed if schedule is not None else frozenset()
        self._coordinator = Coordinator(
            job,
            steps,
            {worker for worker in job.shape.workers() if worker not in absent},
            store,
            self._processes,
            self._replanner,
            self._event,
            self._committed,
            time.monotonic,
            self._checkpoints.due,
        )
        self._absent = absent
        self._going_back = ClusterRestart(
            job, self._processes, self._coordinator, self._checkpoints, directory, absent, self._event
        )
        self._last_commit = time.monotonic()
        self._deadline = time.monotonic() + job.membership.start_deadline
        self._said = ""
        self._begun = self._started = self._closed = False
        self._hearing = threading.Thread(target=self._hear_posts, args=(store.clone(),), daemon=True)
        self._hearing.start()

    def tick(self) -> None:
        """Do what is due. Raises RunError when the run cannot go on, RoleLost when another agent coordinates."""
        if not self._begun:
            self._begin()
        if self._going_back.under_way:
            self._going_back.tick()
            self._deadline = time.monotonic() + self._job.membership.start_deadline
        elif not self._started:
            self._start()
        else:
            self._restart()
            live = [str(worker) for worker in self._coordinator.live]
            self._checkpoints.tick(live, self._coordinator.record.committed)
            try:
                self._coordinator.tick()
            except StageLost as lost:
                self._go_back(lost, self._coordinator.live)
        if self._coordinator.phase is GenerationPhase.FINISHED:
            self._finish()

    def _begin(self) -> None:
        """Take the run over where the register says that it is under way."""
        record = self._store.read(RegisterKey())
        if record is not None:
            self._event("coordinator", node=self._node, generation=record.generation, step=record.committed + 1)
            self._coordinator.take_over(record)
            self._started = bool(record.plan)
            if not record.plan:
                self._directory.rewind(record.committed + 1)
        self._begun = True

    def _start(self) -> None:
        """Have all workers started once their agents are there, and wait for them."""
        live, there = sorted(self._coordinator.live), self._processes.nodes()
        missing = [str(node) for node in sorted({self._processes.node(worker) for worker in live}) if node not in there]
        generation = self._coordinator.record.generation
        for worker in live if not missing else []:
            request = self._processes.request(worker)
            if request.incarnation < 0 or request.generation != generation or self._processes.lost_its_agent(worker):
                self._processes.start(worker, generation, self._coordinator.record.committed if generation else None)
            elif (how := self._processes.ended(worker)) is not None:
                self._fail_to_start(worker, how)
                return
        if generation and missing:
            self._go_back(StageLost(f"nodes {' '.join(missing)} are gone again"), live)
            return
        slow = [str(worker) for worker in live if not self._is_ready(worker)]
        if not missing and not slow:
            self._started, self._last_commit = True, time.monotonic()
            return
        waited_for = f"agents of nodes {' '.join(missing)}" if missing else f"workers {' '.join(slow)}"
        if time.monotonic() > self._deadline:
            limit = self._job.membership.start_deadline
            raise RunError(f"{waited_for} were not ready within {limit:g} s; see {self._directory.logs}")
        kind = "agents" if missing else "workers"
        if kind != self._said:
            self._said = kind
            self._observer.waiting(f"{waited_for} to start")

    def _fail_to_start(self, worker: Worker, how: str) -> None:
        """At the start of the run that is its end; on the way back from a lost stage others may do."""
        message = f"worker {worker} {how} during start-up"
        if not self._coordinator.record.generation:
            raise RunError(message)
        self._event("detected", worker=str(worker), step=self._coordinator.next_step, cause=f"{how} during start-up")
        self._go_back(StageLost(message), self._coordinator.live - {worker})

    def _go_back(self, lost: StageLost, left: Collection[Worker]) -> None:
        """Training goes on from a checkpoint, with whoever can be started."""
        self._started = False
        self._going_back.begin(lost, left)

    def _restart(self) -> None:
        """Start workers that died again where their node has an agent, and admit them when they are ready."""
        if self._coordinator.phase is not GenerationPhase.RUNNING:
            return
        for worker in self._job.shape.workers():
            if worker in self._coordinator.live or worker in self._coordinator.awaited or worker in self._absent:
                continue
            number = self._processes.incarnation(worker)
            if self._processes.running(worker):
                if self._is_ready(worker):
                    self._coordinator.admit(worker)
            elif number < self._job.cluster.restarts and self._processes.reachable(worker):
                self._processes.start(worker)

    def _is_ready(self, worker: Worker) -> bool:
        """Whether all of the worker's present processes have started up."""
        number = self._processes.incarnation(worker)
        members = members_of([worker], self._job.grid.tensor_parallel)
        return self._store.has_all([ReadyKey(name, number) for name in members])

    def _finish(self) -> None:
        """After the last iteration: keep the digests, merge the trace, let all agents go."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while not (self._coordinator.ended() and not self._checkpoints.busy) and time.monotonic() < deadline:
            left = [str(worker) for worker in self._coordinator.live if self._processes.running(worker)]
            self._checkpoints.tick(left, self._coordinator.record.committed)
            self._store.wait_for_change(0.2)
        digests: dict[str, Any] = {}
        for worker in sorted(self._coordinator.live):
            keys = [FinalKey(name) for name in members_of([worker], self._job.grid.tensor_parallel)]
            for key in keys:
                while self._processes.running(worker) and time.monotonic() < deadline:
                    if self._store.wait(key, 0.2) is not None:
                        break
            parts = [part for part in self._store.read_all(keys) if part is not None]
            if len(parts) == len(keys):
                digests[str(worker)] = joined_digests(parts)
        self._event("finished", step=self._coordinator.record.committed, digests=digests)
        merge_logs(self._directory.path, self._job.shape)
        self._store.set(FinishedKey(), True)

    def fail(self, message: str) -> None:
        """Tell all agents that the run cannot go on."""
        with contextlib.suppress(RunError):
            self._store.set(FailedKey(), message)
            self.forget()

    def forget(self) -> None:
        """Once the other agents have left, or after a while, leave nothing of the run in the store."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while set(self._processes.nodes()) - {self._node} and time.monotonic() < deadline:
            self._store.wait_for_change(0.5)
        self._store.erase()

    def close(self) -> None:
        """End the planners and stop listening."""
        self._closed = True
        self._store.close()
        self._hearing.join()
        self._plans.close()
        self._checkpoints.close()

    def _hear_posts(self, store: EtcdStore) -> None:
        with contextlib.suppress(RunError):
            while not self._closed:
                store.wait_for_change(60.0)
                self._waker.wake()

    def _warn(self, message: str) -> None:
        self._event("warning", message=message)

    def _event(self, kind: str, **details: Any) -> None:
        self._observer.event(self._directory.event(kind, **details))

    def _committed(self, commit: Commit, record: GenerationRecord, period: float) -> None:
        now = time.monotonic()
        line = metrics_line(self._job, commit, record, period, self._directory.now(), now - self._last_commit)
        line |= {"compute": self._replanner.compute}
        self._last_commit = now
        self._checkpoints.committed(commit, record)
        if self._directory.metric(line):
            self._observer.committed(line)
