"""The agent of a node: starts and watches the node's workers, and competes for the coordinator's role.

It is one loop: start and kill its workers as the coordinator asks, report which have ended, and, as long as it holds
the role, let the coordinator tick. Its presence and its role hang on one lease, whose term is half of `dead_after`. An
agent that loses the lease cannot know what the others have decided since: it kills its workers and ends. When it dies
its workers die with it, and the others see both at once when the lease runs out.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from recycle.endpoints import Endpoints, parse_endpoints
from recycle.errors import JobError, RunError
from recycle.exec.launch.coordination import Coordination
from recycle.exec.launch.observer import Observer
from recycle.exec.launch.shared_directory import SharedRunDirectory
from recycle.exec.membership.etcd_store import EtcdStore, RoleLost
from recycle.exec.membership.lease import Lease
from recycle.exec.membership.messages import AgentInfo, RunInfo, StartRequest
from recycle.exec.membership.schema import (
    AgentKey,
    CoordinatorKey,
    EndedKey,
    FailedKey,
    FinishedKey,
    KillRequestKey,
    RunKey,
    StartRequestKey,
)
from recycle.exec.planning.placement import stages_by_rank
from recycle.exec.planning.planning import Planner, require_valid
from recycle.exec.processes.processes import ForkServer, LocalProcesses
from recycle.exec.processes.waker import Waker
from recycle.exec.transport.transports import transport_of
from recycle.exec.worker.specification import WorkerSpecification
from recycle.ir.schedule import Schedule
from recycle.job import Job, PricedJob, price
from recycle.nodes import place_workers
from recycle.plans import with_ties
from recycle.shape import Worker


def serve(
    job: Job,
    node: int,
    run: str,
    directory: str | Path,
    *,
    steps: int | None = None,
    address: str | None = None,
    schedule: Schedule | None = None,
    planner: Planner | None = None,
    observer: Observer | None = None,
    text_digest: str | None = None,
) -> None:
    """Be the agent of `node` until the run has ended.

    Args:
        job: the same on all nodes; its `[membership] store` is an etcd.
        node: number of this node, from 0.
        run: name of the run in the store, the same on all nodes.
        directory: the run directory, which all nodes share.
        address: of this node, for the workers of others; found by the way to the store when left out.
        text_digest: of the training text, for checkpoints.

    Raises:
        JobError: the request is impossible, or not that of the other nodes.
        RunError: the run cannot go on, or this agent cannot.
    """
    job = price(job)
    nodes = place_workers(job.shape, job.cluster.workers_per_node)
    if not 0 <= node < len(nodes):
        raise JobError(f"node {node}: the job's {job.shape.worker_count} workers lie on nodes 0 to {len(nodes) - 1}")
    if job.membership.store == "launcher":
        raise JobError('[membership] store: agents need an etcd: store = "etcd://host:port", or --store')
    if schedule is not None:
        schedule = with_ties(schedule, job)
        require_valid(schedule, job)
    stages = stages_by_rank(job.shape, schedule)
    endpoints = parse_endpoints(job.membership.store)
    address = address or own_address(endpoints)
    store = EtcdStore.connect(job.membership.store, run, job.membership, "standby")
    agent = _Agent(job, node, nodes[node], run, Path(directory), store, address, steps or job.train.steps, stages)
    try:
        agent.run(schedule, planner, observer or Observer(), text_digest)
    finally:
        agent.close()


def own_address(endpoints: Endpoints) -> str:
    """The address by which this machine reaches the store, and by which the other nodes reach it."""
    host, port = endpoints.members[0]
    if endpoints.loopback:
        return "127.0.0.1"
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(f"{endpoints}: no way there from this machine ({error.strerror}); give --address") from None


class _Agent:
    def __init__(
        self,
        job: PricedJob,
        node: int,
        workers: tuple[Worker, ...],
        run: str,
        directory: Path,
        store: EtcdStore,
        address: str,
        steps: int,
        stages: Sequence[Sequence[int]],
    ) -> None:
        self._job, self._node, self._workers, self._run, self._store = job, node, workers, run, store
        self._address, self._stages = address, stages
        self._session = uuid.uuid4().hex
        self._waker = Waker()
        self._lost, self._closed = threading.Event(), False
        self._coordination: Coordination | None = None
        info = self._agree(steps)
        self._steps = info.steps
        self._directory = SharedRunDirectory(directory, job, info.identity, info.started)
        self._server = ForkServer(
            job.model.kind,
            job.train.threads,
            self._directory.logs / f"forkserver.{self._node}.log",
            0 < job.train.checkpoint_every <= self._steps,
            transport_of(job).environment,
        )
        self._tensor_parallel = job.grid.tensor_parallel
        self._processes = LocalProcesses(
            self._server, self._specification, self._directory.logs, self._waker, self._tensor_parallel
        )
        self._lease = Lease(store.client.clone(), self._term, self._lose)
        self._hearing = threading.Thread(target=self._hear, args=(store.clone(),), daemon=True)
        self._hearing.start()

    @property
    def _term(self) -> int:
        """Shorter than a worker's silence may be: a node is lost as a whole, not worker by worker."""
        return max(2, math.ceil(self._job.membership.dead_after / 2))

    def _agree(self, steps: int) -> RunInfo:
        """The run's description, which the first agent writes. Raises JobError when ours is another run."""
        digest = hashlib.sha256(self._job.to_toml().encode()).hexdigest()
        ours = RunInfo(uuid.uuid4().hex, digest, steps, time.time())
        self._store.compare_set(RunKey(), None, ours)
        info = self._store.read(RunKey()) or ours
        for what, mine, theirs in (("job file", digest, info.job), ("number of steps", steps, info.steps)):
            if mine != theirs:
                raise JobError(f"node {self._node}: its {what} is not that of run {self._run!r}; give another --id")
        return info

    def _lose(self) -> None:
        self._lost.set()
        self._waker.wake()

    def _hear(self, store: EtcdStore) -> None:
        """In a thread: wake the loop for whatever is ordered."""
        with contextlib.suppress(RunError):
            while not self._closed:
                store.wait_for_change(60.0)
                self._waker.wake()
        self._waker.wake()

    def _specification(self, worker: Worker, incarnation: int, tensor_rank: int) -> WorkerSpecification:
        request = self._store.read(StartRequestKey(worker)) or StartRequest()
        place = [str(place) for place in self._workers].index(request.place)
        return WorkerSpecification(
            self._job.to_toml(),
            str(worker),
            list(self._stages[worker.rank]),
            incarnation,
            self._job.membership.store,
            self._run,
            self._address,
            [],
            str(self._directory.logs / f"{worker}.trace.jsonl") if tensor_rank == 0 else None,
            os.getpid(),
            self._directory.started,
            str(self._directory.checkpoints),
            request.generation,
            request.restored,
            tensor_rank,
            place * self._tensor_parallel + tensor_rank,
        )

    def run(
        self, schedule: Schedule | None, planner: Planner | None, observer: Observer, text_digest: str | None
    ) -> None:
        """Serve until the run has ended."""
        self._arrive()
        while not self._over():
            if self._lost.is_set():
                raise RunError(
                    f"node {self._node}: the lease was lost, its workers are given up; start the agent again"
                )
            self._carry_out()
            self._coordinate(schedule, planner, observer, text_digest)
            self._processes.wait(self._job.membership.heartbeat / 2)
        self._leave()

    def _arrive(self) -> None:
        """Say that this node is there. An agent that was here before may take a term to be forgotten."""
        info = AgentInfo(self._session, self._address)
        deadline = time.monotonic() + self._term + 2
        while self._store.create(AgentKey(self._node), info, self._lease.id) is None:
            if time.monotonic() > deadline:
                raise JobError(f"node {self._node} has an agent already in run {self._run!r}")
            time.sleep(0.2)

    def _over(self) -> bool:
        """Whether all agents may go. Raises RunError when the run has failed."""
        failed = self._store.read(FailedKey())
        if failed is not None and self._coordination is None:
            raise RunError(failed)
        return self._store.read(FinishedKey()) is not None

    def _carry_out(self) -> None:
        """Start and kill as ordered, and say who has ended."""
        for worker in self._job.shape.workers():
            request = self._store.read(StartRequestKey(worker)) or StartRequest()
            if request.session == self._session and request.incarnation > self._processes.incarnation(worker):
                if self._processes.running(worker):
                    self._processes.kill(worker)
                else:
                    self._processes.start(worker, request.incarnation)
            dead = self._store.read(KillRequestKey(worker))
            if dead is not None and self._processes.running(worker) and self._processes.incarnation(worker) <= dead:
                self._processes.kill(worker)
        for worker, how in self._processes.gone().items():
            tail = "" if "killed by" in how else f"; its last lines: {self._processes.tail(worker)}"
            self._store.set(EndedKey(worker), (self._processes.incarnation(worker), how + tail))

    def _coordinate(
        self, schedule: Schedule | None, planner: Planner | None, observer: Observer, text_digest: str | None
    ) -> None:
        """Let the coordinator tick if this agent has the role, or try to get it when nobody has."""
        try:
            if self._coordination is None:
                if self._store.read(CoordinatorKey()) is not None:
                    return
                created = self._store.create(CoordinatorKey(), f"{self._node} {self._session}", self._lease.id)
                if created is None:
                    return
                mine = self._store.reading_as("coordinator").guarded(CoordinatorKey(), created)
                self._coordination = Coordination(
                    self._job,
                    self._steps,
                    mine,
                    self._node,
                    self._directory,
                    self._waker,
                    observer,
                    planner,
                    schedule,
                    text_digest,
                )
            self._coordination.tick()
        except RoleLost:
            self._give_up_role()
        except RunError as error:
            if self._coordination is not None:
                self._coordination.fail(str(error))
            raise

    def _give_up_role(self) -> None:
        if self._coordination is not None:
            self._coordination.close()
            self._coordination = None

    def _leave(self) -> None:
        """The run is over: what has not ended yet came back too late to have a part."""
        self._processes.end(patience=0.0)
        if self._coordination is not None:
            self._coordination.forget()

    def close(self) -> None:
        """End every process of this node and give the lease back."""
        self._closed = True
        self._processes.end(patience=0.0)
        self._server.close()
        self._give_up_role()
        self._lease.close()
        self._store.close()
        self._hearing.join()
        self._waker.close()
        self._directory.close()
