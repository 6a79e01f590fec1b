"""The agent of a node: starts and watches the node's processes, and competes for the leader's role.

An agent without a leader connects to one or takes the role; its processes continue meanwhile. If an agent dies, its
processes die with it. An agent that is asked to leave drains its processes first.
"""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import threading
import time
import uuid
from collections import deque
from enum import Enum
from pathlib import Path
from typing import Any

from recycle.errors import JobError, RecycleError, RunError
from recycle.exec.election import Election, LeaderAddress, RoleLost
from recycle.exec.launch.agreement import open_agreed_directory
from recycle.exec.launch.node import Node
from recycle.exec.launch.peers import AgentServer
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.run_address import remove_address, resume_command, run_key, write_address
from recycle.exec.launch.run_directory import RunDirectory, has_ended
from recycle.exec.launch.runtime import LeaderRuntime
from recycle.exec.links import Link, LinkClosed, connect_to
from recycle.exec.ports import listen_within
from recycle.exec.processes.forkserver import ForkServerEnded
from recycle.exec.processes.processes import require_open_files
from recycle.exec.protocol import ENDED_EARLY, Order, Over, Rejected
from recycle.job.endpoints import Endpoints, parse_endpoints
from recycle.job.shape import node_of, place_workers
from recycle.runs.logs import EVENTS

LEAVE_SECONDS = 30.0
"""Seconds that the end of the run waits for the other agents to leave."""
GIVE_WAY_SECONDS = 2.0
"""Seconds during which a leaving agent does not take the role, so that a staying agent can."""
COLLECT_AFTER = 200_000
"""New containers before a garbage collection; reports of 16,384 processes are about half of this."""
POLL_SECONDS = 0.2
"""Mean seconds between two attempts to find a leader."""


class AgentExit(Enum):
    """How an agent's part in a run ended."""

    ENDED_BEFORE = "the run had ended before"
    DONE = "the run has ended after its last iteration"
    STOPPED = "the run was ended early; start all agents again with --resume to continue it"
    LEFT = "the node has left the run; start its agent again to rejoin"


def serve(
    request: RunRequest,
    *,
    node: int,
    run: str,
    directory: str | Path,
    address: str | None = None,
    resume: bool = False,
    stop: threading.Event | None = None,
) -> AgentExit:
    """Run the agent of `node` until the run has ended or the node has left the run.

    Args:
        request: the same on all nodes; its job's `[membership] store` is an etcd.
        node: number of this node, from 0.
        run: name of the run in etcd, the same on all nodes.
        directory: the run directory, shared by all nodes.
        address: address of this node for other nodes; None for the address that reaches etcd.
        resume: resume from the newest complete checkpoint in the run directory, if any; the same on all nodes. A run
            that is still in etcd continues in any case.
        stop: when set, the node leaves the run.

    Raises:
        JobError: the request is impossible, or differs from the other nodes' request.
        RunError: the run or this agent cannot continue.
    """
    job = request.job
    nodes = place_workers(job.shape, job.cluster.workers_per_node)
    if not 0 <= node < len(nodes):
        raise JobError(f"node {node}: the job's {job.shape.worker_count} workers are on nodes 0 to {len(nodes) - 1}")
    if job.membership.store == "launcher":
        raise JobError('[membership] store: agents need an etcd: store = "etcd://host:port", or --store')
    if has_ended(directory, job, request.steps):
        return AgentExit.ENDED_BEFORE
    tensor_parallel = job.grid.tensor_parallel
    processes_here = len(nodes[node]) * tensor_parallel
    require_open_files(processes_here, job.shape.worker_count * tensor_parallel)
    address = address or own_address(parse_endpoints(job.membership.store))
    require_own(address)
    with contextlib.ExitStack() as closing:
        server = request.fork_server()
        closing.callback(server.close)
        request = request.checked_by(server, processes_here)
        election = Election.connect(run, job.membership)
        try:
            shared = open_agreed_directory(request, election, node=node, run=run, path=Path(directory), resume=resume)
        except JobError:
            if has_ended(directory, job, request.steps):  # while this agent started
                return AgentExit.ENDED_BEFORE
            raise
        closing.callback(shared.close)
        server.log_to(shared.logs / f"forkserver.{node}.log")
        write_address(shared.path, job.membership.store, run)
        local_node = Node(request, shared, server, nodes[node], address=address, node=node, session=uuid.uuid4().hex)
        closing.callback(local_node.close)
        agent = _Agent(request, run, address, election, shared, local_node, stop or threading.Event())
        closing.callback(agent.give_up_role)
        closing.callback(local_node.processes.end, patience=0.0)
        rarely_collect_garbage()
        return agent.serve()


def rarely_collect_garbage() -> None:
    """Exclude imported objects from garbage collection, and make collections rare, because commits wait for them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


def own_address(endpoints: Endpoints) -> str:
    """Return this machine's address on the route to etcd. Raises RunError if no member can be reached."""
    if endpoints.loopback:
        return "127.0.0.1"
    reason: str | None = None
    for host, port in endpoints.members:
        try:
            family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            reason = error.strerror
    raise RunError(f"{endpoints}: cannot be reached from this machine ({reason}); give --address")


def require_own(address: str) -> None:
    """Raise JobError unless this machine can listen on the address, as it must when it leads."""
    try:
        with contextlib.closing(socket.socket()) as probe:
            probe.bind((address, 0))
    except (OSError, UnicodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "not a host name"
        raise JobError(
            f"address {address}: this machine cannot listen on it ({reason}); give --address one by which the other"
            " nodes reach this machine"
        ) from None


class _Agent:
    def __init__(
        self,
        request: RunRequest,
        run: str,
        address: str,
        election: Election,
        directory: RunDirectory,
        local_node: Node,
        stop: threading.Event,
    ) -> None:
        self._request, self._job, self._run = request, request.job, run
        self._address, self._election, self._directory = address, election, directory
        self._local_node, self._hub, self._agent, self._stop = local_node, local_node.hub, local_node.agent, stop
        self._node, self._session = local_node.agent.node, local_node.agent.session
        self._key = run_key(directory.path)
        self._server: AgentServer | None = None
        self._link: Link | None = None
        self._leader_session, self._heard = "", 0.0
        self._orders: deque[Order] = deque()
        self._next_search = 0.0
        self._is_rejected = False
        self._outcome: str | None = None
        self._leaves_since: float | None = None

    @property
    def _runtime(self) -> LeaderRuntime | None:
        return None if self._server is None else self._server.runtime

    def serve(self) -> AgentExit:
        while self._outcome is None:
            self._find_leader()
            self._lead_and_follow()
            if self._stop.is_set() and self._leaves():
                self._disconnect()
                return AgentExit.LEFT
            if self._outcome is None:
                self._local_node.wait()
        self._local_node.processes.end(patience=0.0)  # processes still running came back too late to take part
        self._disconnect()
        self._forget_run()
        if self._outcome in ("", ENDED_EARLY):
            return AgentExit.STOPPED if self._outcome else AgentExit.DONE
        exit_code, code, reason = self._outcome.split(" ", 2)
        error = RunError(reason)
        error.exit_code, error.code = int(exit_code), code
        raise error

    # The leader.

    def _find_leader(self) -> None:
        now = time.monotonic()
        is_heard = self._link is not None and now - self._heard < self._job.membership.lease / 2
        if self._runtime is not None or is_heard or now < self._next_search:
            return
        self._next_search = now + POLL_SECONDS * (0.5 + random.random())
        try:
            leader = self._election.leader(patience=None if self._link is None else 0.0)
        except RunError:
            if self._link is None or now - self._heard > self._job.membership.store_timeout:
                raise
            return  # without long waits, in which the leader would miss the node's heartbeats
        if leader is None:
            if (outcome := self._election.outcome()) is not None:
                self._outcome = outcome
            elif self._election.run() is None:  # it has ended and was erased, while this agent had no leader
                self._outcome = self._outcome_of_erased_run()
            elif self._leaves_since is None or now - self._leaves_since > GIVE_WAY_SECONDS:
                self._disconnect()
                self._take_role()
            return
        if leader.session in (self._session, self._leader_session if self._link is not None else ""):
            return  # this agent's own role is about to end, or the leader is stalled, perhaps briefly
        self._disconnect()
        try:  # a stalled leader gets less time than the next one gives this agent
            link = connect_to(leader.host, leader.port, self._key, Order, self._job.membership.lease / 3)
        except (OSError, LinkClosed):
            return
        link.owner = self._take_orders
        self._link, self._leader_session, self._heard = link, leader.session, now
        self._hub.add(link)
        self._hub.send(link, self._agent.hello())

    def _outcome_of_erased_run(self) -> str:
        path = self._directory.path
        if has_ended(path, self._job, self._request.steps):
            return ""
        raise RunError(
            f"the run has ended while this agent had no leader, or etcd has lost it; see {path / EVENTS}, and continue"
            f" with: {resume_command(path, bool(self._request.command))}"
        )

    def _take_orders(self, link: Link, orders: list[Any] | None) -> None:
        if link is not self._link:
            return
        self._heard = time.monotonic()
        if orders is None:
            self._link = None
        else:
            self._orders.extend(orders)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._hub.remove(self._link)
            self._link = None
        self._orders.clear()

    def _take_role(self) -> None:
        listener = listen_within(self._job.membership.ports, self._address, backlog=4096)
        election, address = self._election, LeaderAddress(self._node, self._session, *listener.getsockname()[:2])
        if not election.campaign(address) or election.run() is None:  # another leads, or has ended and erased the run
            election.resign()
            listener.close()
            return
        runtime = LeaderRuntime(
            request=self._request,
            register=self._election.persist,
            homes=node_of(self._job.shape, self._job.cluster.workers_per_node),
            directory=self._directory,
            waker=self._local_node.waker,
            restarts=self._job.cluster.restarts,
        )
        self._server = AgentServer(runtime, self._hub, listener, self._key)
        try:
            runtime.take_over(self._node, *self._election.register())
            runtime.connect_agent(self._obey, self._agent.hello())
        except RoleLost:
            self.give_up_role()

    def give_up_role(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self._directory.forget_waiting()
        self._election.resign()

    def _lead_and_follow(self) -> None:
        try:
            self._exchange()
        except RoleLost:
            self.give_up_role()
        except RecycleError as error:
            if self._runtime is None or isinstance(error, ForkServerEnded):
                raise
            self._fail(f"{error.exit_code} {error.code} {error}")

    def _exchange(self) -> None:
        if self._runtime is not None and self._election.is_lost:
            raise RoleLost("the lease of the role has ended")
        if self._server is not None:
            self._server.close_strangers()
        self._hub.dispatch()
        runtime = self._runtime
        batch = self._agent.batch(hold=runtime is None)
        if runtime is not None:
            if batch is not None:
                runtime.take(self._node, batch)
            if not runtime.over:
                runtime.tick(self._election.is_reached)
            if runtime.over:
                self._finish(runtime)
        elif batch is not None and self._link is not None:
            self._hub.send(self._link, batch)
        while self._orders:
            self._obey(self._orders.popleft())

    def _obey(self, order: Order, body: bytes | None = None) -> None:
        match order:
            case Over(outcome=outcome):
                self._outcome = outcome
            case Rejected():
                if self._is_rejected:
                    raise JobError(f"node {self._node} already has an agent in run {self._run!r}")
                # If the other agent lives it has time to connect to the next leader first, or to lead itself.
                self._is_rejected, self._next_search = True, time.monotonic() + self._job.membership.lease + 2
                self._disconnect()
            case _:
                self._is_rejected = False
                self._agent.obey(order, body)

    # The end.

    def _finish(self, runtime: LeaderRuntime) -> None:
        if not runtime.ends_early:
            event = self._directory.event("finished", step=self._request.steps - 1, digests=runtime.digests)
            self._request.observer.event(event)
        outcome = ENDED_EARLY if runtime.ends_early else ""
        with contextlib.suppress(RunError):
            self._election.end(outcome)
        self._tell_outcome(outcome)

    def _fail(self, outcome: str) -> None:
        """End the run. If etcd does not answer, another agent may lead, and learns the cause from this node."""
        election = self._election
        with contextlib.suppress(RunError, RoleLost):
            election.end(outcome, patience=None if election.is_reached else election.seconds_left)
            self._tell_outcome(outcome)
        if self._outcome is None:
            self.give_up_role()

    def _tell_outcome(self, outcome: str) -> None:
        assert self._runtime is not None
        self._runtime.send_outcome(outcome)
        self._outcome = outcome

    def _leaves(self) -> bool:
        if self._leaves_since is None:
            self._leaves_since = time.monotonic()
            self._hand_over()
        if not self._agent.leave() or (self._runtime is not None and self._runtime.ends):
            return False  # an agent that ends the run for all leaves afterwards
        self._hand_over()  # no other agent took the role at first
        return self._runtime is None

    def _hand_over(self) -> None:
        if self._runtime is not None and not self._runtime.ends:
            self.give_up_role()

    def _forget_run(self) -> None:
        """A run that ended early with a checkpoint keeps in etcd what agents need to continue from it."""
        server = self._server
        if server is None:
            return
        runtime = server.runtime
        deadline = time.monotonic() + LEAVE_SECONDS
        with contextlib.suppress(RecycleError):
            while not server.is_empty and time.monotonic() < deadline:
                self._hub.dispatch(0.1)
            is_stopped = self._outcome == ENDED_EARLY and not self._request.command
            self._election.erase(runtime.leader.register_to_resume() if is_stopped else None)
        remove_address(self._directory.path)
