"""What strikes a simulated run from outside."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from recycle.errors import JobError, RunError
from recycle.exec.launch.run_address import drain
from recycle.exec.processes.forkserver import REFUSED
from recycle.exec.protocol import Kill
from tests.exec.explore.kernel import BREAK_SECONDS, Process
from tests.exec.explore.store import HOST as STORE

if TYPE_CHECKING:
    from tests.exec.explore.cluster import Cluster

CODE, MANY = bytes(16), 99
"""The authentication code of a forged frame; more than a worker has processes."""


class Fault(NamedTuple):
    """What strikes: a process of a worker (by number), a node, or the store.

    It strikes at `time`; with `moment` when the leaders have taken or decided this kind of message for the `number`th
    time, before a decision is carried out (`Cluster.reach`).
    """

    time: float
    kind: str
    target: int = 0
    seconds: float = 0.0
    moment: str = ""
    number: int = 1

    def __str__(self) -> str:
        when = f"{self.moment} {self.number}" if self.moment else f"{self.time:.2f} s"
        return f"{self.kind} {self.target} at {when} for {self.seconds:.2f} s"


def kill(process: Process) -> None:
    process.end("killed by SIGKILL", -9)


def _kill_worker(cluster: Cluster, fault: Fault) -> None:
    if (process := cluster.process_of(fault)) is not None:
        cluster.rules.struck(process)
        kill(process)


def _refuse_job(cluster: Cluster, fault: Fault) -> None:
    if (process := cluster.process_of(fault)) is not None:
        cluster.rules.struck(process)
        process.end("", REFUSED)


def _stop_worker(cluster: Cluster, fault: Fault) -> None:
    if (process := cluster.process_of(fault)) is not None:
        cluster.rules.struck(process)
        process.stop(fault.seconds)


def _leave_worker(cluster: Cluster, fault: Fault) -> None:
    process = cluster.process_of(fault)
    if process is not None and process in cluster.leave_calls:
        cluster.rules.struck(process)
        cluster.run_in(process, cluster.leave_calls[process])


def _drain_worker(cluster: Cluster, fault: Fault) -> None:
    """`recycle drain`, on the node of the worker."""
    worker = cluster.workers[fault.target % len(cluster.workers)]

    def ask() -> None:
        try:
            drain(cluster.path, str(worker), fault.seconds or None, cluster.kernel.log)
        except (JobError, RunError) as error:
            cluster.kernel.log(f"recycle drain {worker}: {error}")

    Process(cluster.kernel, f"drain of {worker}", cluster.node_with(worker)).run(ask)


def _drain_node(cluster: Cluster, fault: Fault) -> None:
    cluster.drain(cluster.node_of(fault), fault.seconds or None)


def _strike_node(cluster: Cluster, node: int) -> None:
    cluster.rules.struck_nodes.add(node)
    for process in cluster.on_node(node):
        cluster.rules.struck(process)


def _kill_agent(cluster: Cluster, fault: Fault) -> None:
    node = cluster.node_of(fault)
    _strike_node(cluster, node)
    if node in cluster.agents:
        kill(cluster.agents[node])


def _lose_fork_server(cluster: Cluster, fault: Fault) -> None:
    node = cluster.node_of(fault)
    _strike_node(cluster, node)
    if node in cluster.agents and node in cluster.processes:
        cluster.processes[node].lose_server()


def _stop_agent(cluster: Cluster, fault: Fault) -> None:
    node = cluster.node_of(fault)
    _strike_node(cluster, node)
    if node in cluster.agents:
        cluster.agents[node].stop(fault.seconds)


def _lose_node(cluster: Cluster, fault: Fault) -> None:
    node = cluster.node_of(fault)
    _strike_node(cluster, node)
    cluster.rules.disturb(BREAK_SECONDS[1] + cluster.job.membership.lease / 2)
    for process in cluster.on_node(node):
        process.end("lost with its node", -9, is_seen=False)


def _leave_node(cluster: Cluster, fault: Fault) -> None:
    node = cluster.node_of(fault)
    _strike_node(cluster, node)
    cluster.terminate(node)


def _end_run(cluster: Cluster, fault: Fault) -> None:
    """The user ends the run: SIGTERM to all agents."""
    for node in list(cluster.agents):
        cluster.kernel.after(cluster.kernel.draw(0.0, 0.5), partial(cluster.terminate, node))


def _interrupt_agent(cluster: Cluster, fault: Fault) -> None:
    """Ctrl-C, or a second SIGTERM some seconds after the first."""
    node = cluster.node_of(fault)
    _strike_node(cluster, node)
    if (agent := cluster.agents.get(node)) is None:
        return
    if fault.seconds:
        cluster.terminate(node)
    cluster.kernel.after(fault.seconds, agent.interrupt)


def _interrupt_run(cluster: Cluster, fault: Fault) -> None:
    for node in cluster.nodes:
        cluster.kernel.after(
            cluster.kernel.draw(0.0, 0.5), partial(_interrupt_agent, cluster, fault._replace(target=node))
        )


def _second_agent(cluster: Cluster, fault: Fault) -> None:
    """A second agent with the number of a node starts; with `seconds`, one with more steps."""
    cluster.start_another(cluster.node_of(fault), int(bool(fault.seconds)))


def _wipe_store(cluster: Cluster, fault: Fault) -> None:
    cluster.store.wipe()


def _cut(cluster: Cluster, pairs: list[tuple[int, int]], seconds: float) -> None:
    for first, second in pairs:
        if first != second:
            cluster.kernel.cut(first, second, seconds)
            cluster.fabric.cut(frozenset((first, second)))


def _cut_pair(cluster: Cluster, fault: Fault) -> None:
    node, other = cluster.node_of(fault), (cluster.node_of(fault) + 1) % len(cluster.nodes)
    _strike_node(cluster, node)
    _strike_node(cluster, other)
    _cut(cluster, [(node, other)], fault.seconds)


def _isolate(cluster: Cluster, fault: Fault) -> None:
    node = cluster.node_of(fault)
    _strike_node(cluster, node)
    _cut(cluster, [(node, other) for other in (*cluster.nodes, STORE)], fault.seconds)


def _cut_store(cluster: Cluster, fault: Fault) -> None:
    node = cluster.node_of(fault)
    _strike_node(cluster, node)
    cluster.kernel.cut(node, STORE, fault.seconds)


def _break_links(cluster: Cluster, fault: Fault) -> None:
    """Messages to the agent of a node are lost, then its connections break. No process ends."""
    node = cluster.node_of(fault)
    for process in [process for process in cluster.on_node(node) if process is cluster.agents.get(node)]:
        for end in [end for end in process.sockets if end.peer is not None and end.peer.process.host != node]:
            end.is_deaf = True
            cluster.kernel.after(fault.seconds, end.reset)


def _forge(cluster: Cluster, fault: Fault) -> None:
    """An attacker in the network sends forged orders to the agent of a node."""
    node = cluster.node_of(fault)
    workers = [worker for worker, home in cluster.homes.items() if home == node]
    orders = [msgspec.msgpack.encode(Kill(str(worker), MANY)) for worker in workers]
    for end in cluster.agents[node].sockets if node in cluster.agents else ():
        if end.peer is not None and end.peer.process.host != node:
            for order in orders:
                end._arrive(struct.pack("!I", len(CODE) + len(order)) + CODE + order)


def _suspend(cluster: Cluster, fault: Fault) -> None:
    """All processes stop, and go on nearly together."""
    for process in cluster.kernel.processes:
        process.stop(fault.seconds + cluster.kernel.draw(0.0, 0.3))


def _fail_to_form(cluster: Cluster, fault: Fault) -> None:
    if (process := cluster.process_of(fault)) is not None:
        cluster.rules.struck(process)
        cluster.fabric.broken[process] = cluster.kernel.now + fault.seconds


def _fill_disk(cluster: Cluster, fault: Fault) -> None:
    cluster.full_until = cluster.kernel.now + fault.seconds


def _stall_store(cluster: Cluster, fault: Fault) -> None:
    cluster.store.stalls_until = cluster.kernel.now + fault.seconds


def _stall_reads(cluster: Cluster, fault: Fault) -> None:
    cluster.store.reads_end_at = cluster.kernel.now + fault.seconds


def _slow_store(cluster: Cluster, fault: Fault) -> None:
    cluster.store.slow_until = cluster.kernel.now + fault.seconds


def _lose_answers(cluster: Cluster, fault: Fault) -> None:
    cluster.store.loses_until = cluster.kernel.now + fault.seconds


def _lose_leases(cluster: Cluster, fault: Fault) -> None:
    cluster.store.revoke_all()


FAULTS: dict[str, Callable[[Cluster, Fault], None]] = {
    "kill worker": _kill_worker,
    "refuse job": _refuse_job,
    "stop worker": _stop_worker,
    "leave worker": _leave_worker,
    "drain worker": _drain_worker,
    "drain node": _drain_node,
    "kill agent": _kill_agent,
    "lose fork server": _lose_fork_server,
    "stop agent": _stop_agent,
    "lose node": _lose_node,
    "leave node": _leave_node,
    "end run": _end_run,
    "interrupt agent": _interrupt_agent,
    "interrupt run": _interrupt_run,
    "second agent": _second_agent,
    "wipe store": _wipe_store,
    "cut": _cut_pair,
    "isolate": _isolate,
    "cut from store": _cut_store,
    "break": _break_links,
    "forge": _forge,
    "suspend": _suspend,
    "fail to form": _fail_to_form,
    "fill disk": _fill_disk,
    "stall store": _stall_store,
    "stall store reads": _stall_reads,
    "slow store": _slow_store,
    "lose answers": _lose_answers,
    "lose leases": _lose_leases,
}
HARMLESS = ("break", "lose leases", "forge", "suspend")
"""Faults that end no process."""
