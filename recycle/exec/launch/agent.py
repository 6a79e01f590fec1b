"""The agent of a node: starts and watches the node's workers, and competes for the coordinator's role.

It is one loop: start and kill its workers as the coordinator asks, report which have ended, and, as long as it holds
the role, let the coordinator tick. Its presence and its role hang on one lease. An agent whose lease has ended takes
another one and goes on, without the role, unless it was given up meanwhile: then it kills its workers and ends. When it
dies its workers die with it, and the others see both at once when the lease runs out and nobody comes back. An agent
that is told to go has its workers leave first (node_departure.py).
"""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
import uuid
from enum import Enum
from pathlib import Path
from typing import Any

from recycle.endpoints import Endpoints, parse_endpoints
from recycle.errors import JobError, RunError
from recycle.exec.exit_description import with_last_lines
from recycle.exec.launch.agreement import open_agreed_directory
from recycle.exec.launch.contact import leave_contact, remove_contact
from recycle.exec.launch.node_departure import NodeDeparture
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.run_directory import RunDirectory, has_ended
from recycle.exec.launch.runtime import CoordinatorRuntime
from recycle.exec.leader.departures import withdraw
from recycle.exec.members import members_of
from recycle.exec.membership import schema
from recycle.exec.membership.etcd_client import Lease, LeaseEnded
from recycle.exec.membership.etcd_store import EtcdStore, RoleLost
from recycle.exec.membership.relay import Relay
from recycle.exec.processes.cluster_processes import ClusterProcesses
from recycle.exec.processes.open_files import require_open_files
from recycle.exec.processes.processes import LocalProcesses
from recycle.exec.processes.waker import Listener, Waker
from recycle.exec.protocol import ENDED_EARLY, StartRequest
from recycle.nodes import place_workers
from recycle.shape import Worker

LEAVE_SECONDS = 30.0
"""How long the end of the run waits for the other agents to leave."""


class Served(Enum):
    """How an agent's part in a run came to its end."""

    ENDED_BEFORE = "the run had ended before"
    DONE = "the run has ended after its last iteration"
    STOPPED = "the run was ended early, and can go on"
    LEFT = "the node has left, and the run goes on"


def serve(
    request: RunRequest,
    *,
    node: int,
    run: str,
    directory: str | Path,
    address: str | None = None,
    resume: bool = False,
    stop: threading.Event | None = None,
) -> Served:
    """Be the agent of `node` until the run has ended, or the node has left it.

    Args:
        request: the same on all nodes; its job's `[membership] store` is an etcd.
        node: number of this node, from 0.
        run: name of the run in the store, the same on all nodes.
        directory: the run directory, which all nodes share.
        address: of this node, for the workers of others; found by the way to the store when left out.
        resume: go on from the newest complete checkpoint of the run directory, if there is a run in it; the same on all
            nodes. A run that the store still has goes on in any case.
        stop: set from a signal handler or another thread, has the node leave the run.

    Raises:
        JobError: the request is impossible, or not that of the other nodes.
        RunError: the run cannot go on, or this agent cannot.
    """
    job = request.job
    nodes = place_workers(job.shape, job.cluster.workers_per_node)
    if not 0 <= node < len(nodes):
        raise JobError(f"node {node}: the job's {job.shape.worker_count} workers lie on nodes 0 to {len(nodes) - 1}")
    if job.membership.store == "launcher":
        raise JobError('[membership] store: agents need an etcd: store = "etcd://host:port", or --store')
    if has_ended(directory, job, request.steps):
        return Served.ENDED_BEFORE
    tensor_parallel = job.grid.tensor_parallel
    require_open_files(len(nodes[node]) * tensor_parallel, job.shape.worker_count * tensor_parallel)
    address = address or own_address(parse_endpoints(job.membership.store))
    with contextlib.ExitStack() as closing:
        store = EtcdStore.connect(job.membership.store, run, job.membership)
        waker = Waker()
        closing.callback(waker.close)
        shared = open_agreed_directory(request, store, node=node, run=run, path=Path(directory), resume=resume)
        closing.callback(shared.close)
        leave_contact(shared.path, job.membership.store, run)
        relay = Relay(store.clone(), node, job.membership.heartbeat)
        closing.callback(relay.close)
        specification = request.specification(shared, store=relay.url, run=run, address=address)
        server = request.fork_server(shared.logs / f"forkserver.{node}.log")
        closing.callback(server.close)
        processes = LocalProcesses(server, specification, nodes[node], waker, tensor_parallel)
        agent = _Agent(request, node, run, store, shared, processes, waker, relay, stop or threading.Event())
        closing.callback(agent.close)
        closing.callback(processes.end, patience=0.0)
        gc.collect()
        gc.freeze()  # else each full collection looks through all that was imported, while everybody waits for a commit
        return agent.serve()


def own_address(endpoints: Endpoints) -> str:
    """The address by which this machine reaches the store, and by which the other nodes reach it.

    Raises RunError when there is no way to any member.
    """
    if endpoints.loopback:
        return "127.0.0.1"
    why: str | None = None
    for host, port in endpoints.members:
        try:
            family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            why = error.strerror
    raise RunError(f"{endpoints}: no way there from this machine ({why}); give --address")


class _Agent:
    """The agent's loop.

    Args:
        request: what is trained.
        node, run: of this agent.
        store: this agent's client, on which it does not coordinate.
        directory: the run directory.
        processes: the workers' processes of this node.
        waker: is woken for whatever changes in the store.
        relay: the processes' way to the store.
        stop: is set when the node is to leave.
    """

    def __init__(
        self,
        request: RunRequest,
        node: int,
        run: str,
        store: EtcdStore,
        directory: RunDirectory,
        processes: LocalProcesses,
        waker: Waker,
        relay: Relay,
        stop: threading.Event,
    ) -> None:
        self._request, self._job, self._node, self._run = request, request.job, node, run
        self._store, self._directory, self._processes, self._waker = store, directory, processes, waker
        self._relay, self._stop = relay, stop
        self._departure: NodeDeparture | None = None
        self._ended_early = False
        self._session = uuid.uuid4().hex
        self._asked: list[int] = []
        self._lost = threading.Event()
        self._runtime: CoordinatorRuntime | None = None
        self._role = contextlib.ExitStack()  # what ends with the coordinator's role
        self._lease = self._take_lease()
        self._listener = Listener(store.clone(), waker)

    def _take_lease(self) -> Lease:
        self._lost.clear()
        return Lease(self._store.client.clone(), self._job.membership, self._lose)

    def _renew_lease(self) -> None:
        self._lease.close()
        self._lease = self._take_lease()

    def _lose(self) -> None:
        self._lost.set()
        self._waker.wake()

    def serve(self) -> Served:
        """Serve until the run has ended, or the node has left it."""
        self._arrive()
        homes = place_workers(self._job.shape, self._job.cluster.workers_per_node)[self._node]
        withdraw(self._store, homes)  # what told them to leave was meant for the agent before
        while not self._over():
            if self._lost.is_set():
                self._come_back()
            self._start_and_kill()
            if self._stop.is_set() and self._leaves():
                return Served.LEFT
            self._coordinate()
            self._processes.wait(self._job.membership.heartbeat / 2)
        self._processes.end(patience=0.0)  # what has not ended yet came back too late to have a part
        self._forget_run()
        return Served.STOPPED if self._ended_early else Served.DONE

    def _leaves(self) -> bool:
        """The node was told to leave; whether it has, and another agent coordinates."""
        if self._departure is None:
            self._departure = NodeDeparture(self._store, self._processes, list(self._job.shape.workers()))
            self._hand_over()
        if not self._departure.is_over() or (self._runtime is not None and self._runtime.ends_early):
            return False  # who ends the run for all goes when that is done, and not before
        self._hand_over()  # nobody else took it at first
        return self._runtime is None

    def _hand_over(self) -> None:
        """Let another agent's coordinator go on from here."""
        if self._runtime is not None and not self._runtime.over:
            with contextlib.suppress(RoleLost):
                self._runtime.coordinator.store.delete([schema.CoordinatorKey()])
            self._give_up_role()

    def _arrive(self) -> None:
        """Announce this node. An agent that was here before may take a term to be forgotten."""
        deadline = time.monotonic() + self._job.membership.lease + 2
        while True:
            try:
                if self._announce():
                    return
            except LeaseEnded:  # this process or etcd stood still since it was taken
                self._renew_lease()
                continue
            if time.monotonic() > deadline:
                raise JobError(f"node {self._node} has an agent already in run {self._run!r}")
            time.sleep(0.2)

    def _announce(self) -> bool:
        """Say that this agent is there, unless there is another, or this one was given up; whether it is there."""
        key, gone = schema.AgentKey(self._node), schema.GoneKey(self._node, self._session)
        return self._store.decide_unless(key, self._session, gone, self._lease.id)

    def _come_back(self) -> None:
        """The lease has ended: this process stood still, or etcd did, or was cut off. Raises RunError if given up."""
        self._give_up_role()
        failures = self._lease.failures
        self._renew_lease()
        try:
            is_there = self._announce()
        except LeaseEnded:
            return  # again
        if not is_there:
            raise RunError(
                f"node {self._node}: the lease was lost ({failures} renewals were not answered) and its workers are"
                " given up; start the agent again"
            )

    def _over(self) -> bool:
        """Whether all agents may go. Raises RunError when the run has failed."""
        outcome = self._store.read(schema.OutcomeKey())
        self._ended_early = outcome == ENDED_EARLY
        if outcome and not self._ended_early and self._runtime is None:
            raise RunError(outcome)
        return outcome in ("", ENDED_EARLY)

    def _start_and_kill(self) -> None:
        """Start and kill as the coordinator asks, and report who has ended."""
        asked = [self._store.version(kind) for kind in (schema.StartRequestKey, schema.KillRequestKey)]
        if asked != self._asked:
            self._asked = asked if self._do_as_asked() else []
        gone = self._processes.gone()
        if gone:
            self._asked = []  # one that was to end before it is started again may have
            self._relay.forget(members_of(gone, self._job.grid.tensor_parallel))
            self._relay.flush()  # what they have said counts, and stands before their end
        for worker, how in gone.items():
            said = with_last_lines(how, "" if "killed by" in how else self._processes.tail(worker))
            self._store.set(schema.EndedKey(worker), (self._processes.incarnation(worker), said))

    def _do_as_asked(self) -> bool:
        """Start and kill as the coordinator asks; whether all was done."""
        is_done = True
        for worker in self._job.shape.workers():
            request = self._store.read(schema.StartRequestKey(worker)) or StartRequest()
            if request.session == self._session and request.incarnation > self._processes.incarnation(worker):
                if self._processes.running(worker):
                    self._processes.kill(worker)
                    is_done = False
                else:
                    self._processes.start(
                        worker,
                        request.generation,
                        request.restored,
                        incarnation=request.incarnation,
                        place=Worker.parse(request.place),
                    )
            dead = self._store.read(schema.KillRequestKey(worker))
            if dead is not None and self._processes.running(worker) and self._processes.incarnation(worker) <= dead:
                self._processes.kill(worker)
        return is_done

    def _coordinate(self) -> None:
        """Let the coordinator tick if this agent has the role, or try to get it when nobody has."""
        try:
            if self._runtime is None:
                self._take_role()
            if self._runtime is not None and not self._runtime.over:
                runtime = self._runtime
                runtime.tick()
                if runtime.over:
                    if not runtime.ends_early:
                        event = self._directory.event("finished", step=self._request.steps - 1, digests=runtime.digests)
                        self._request.observer.event(event)
                    runtime.coordinator.store.set(schema.OutcomeKey(), ENDED_EARLY if runtime.ends_early else "")
        except LeaseEnded:
            self._lose()
        except RoleLost:
            self._give_up_role()
        except RunError as error:
            if self._runtime is not None:
                with contextlib.suppress(RunError):
                    self._runtime.coordinator.store.set(schema.OutcomeKey(), str(error))
                self._forget_run()
            raise

    def _take_role(self) -> None:
        """Become the coordinator, if nobody is."""
        if self._store.read(schema.CoordinatorKey()) is not None:
            return
        if self._departure is not None and self._departure.gives_way():
            return
        created = self._store.create(schema.CoordinatorKey(), f"{self._node} {self._session}", self._lease.id)
        if created is None:
            return
        store = self._store.coordinating(schema.CoordinatorKey(), created)
        self._runtime = CoordinatorRuntime(
            request=self._request,
            store=store,
            processes=ClusterProcesses(self._job, store),
            directory=self._directory,
            waker=self._waker,
            restarts=self._job.cluster.restarts,
        )
        self._role.callback(self._runtime.close)
        self._role.callback(Listener(store.clone(), self._waker).close)
        self._runtime.take_over(self._node)

    def _give_up_role(self) -> None:
        self._role.close()
        self._runtime = None

    def _forget_run(self) -> None:
        """As coordinator: once the other agents have left, or after a while, leave nothing of the run in the store.

        Of a run that was ended early all stays that agents go on from, once a step is committed.
        """
        self._relay.close()
        if self._runtime is None:
            return
        store, nodes = (
            self._runtime.coordinator.store,
            place_workers(self._job.shape, self._job.cluster.workers_per_node),
        )
        others = [schema.AgentKey(node) for node in range(len(nodes)) if node != self._node]
        deadline = time.monotonic() + LEAVE_SECONDS
        with contextlib.suppress(RunError):
            while any(store.has_all([agent]) for agent in others) and time.monotonic() < deadline:
                store.wait_for_change(0.5)
            if self._runtime.ends_early and self._runtime.coordinator.record.commit is not None:
                members = members_of(self._job.shape.workers(), self._job.grid.tensor_parallel)
                of_the_end: list[schema.Key[Any]] = [schema.OutcomeKey(), schema.OverKey(), schema.NoticesKey()]
                store.delete([*of_the_end, *map(schema.FinalKey, members)])
            else:
                store.erase()
        remove_contact(self._directory.path)

    def close(self) -> None:
        """Write nothing any more, and give the role and the lease back; without a lease the run may be erased."""
        self._relay.close()
        self._give_up_role()
        self._lease.close()
        self._listener.close()
