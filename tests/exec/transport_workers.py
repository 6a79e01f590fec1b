"""Processes that drive transports without stages: every message and sum carries what the receiver can check.

Started once per module; each case names the transport, the schedule and what to do.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from recycle import Schedule, Worker, lower
from recycle.exec.transport.base import TransportError, sum_groups
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings
from recycle.exec.transport.staged import Staged
from recycle.ir.communicators import lanes_of
from recycle.ir.instruction import (
    Instruction,
    RecvActivation,
    RecvGradient,
    ReduceBucket,
    ReduceGradients,
    SendActivation,
    SendGradient,
    Transfer,
)
from recycle.job.sections import MembershipSection
from tests.exec.accelerator.transport import Simulated
from tests.warm import ANSWER_SECONDS, WarmPool

MESSAGE = ((4, 3), torch.float32)
ENTRIES = 5
LIMITS = MembershipSection(transport_timeout=60.0, dead_after=30.0, form_timeout=20.0)


class TransportWorkers(WarmPool):
    """As many processes as asked for."""

    def __init__(self, count: int):
        super().__init__(count, _make_worker)
        self._cases = 0

    def run(self, kind: str, schedule: Schedule, action: str, iterations=3, victim=-1) -> list[str]:
        """What each worker of the schedule says in the end: "done", or the error; "" of the victim, which is killed."""
        self._cases += 1
        name = f"case{self._cases}"
        for place in range(len(schedule.live)):
            self.send(place, kind, name, schedule.dumps(), place, action, iterations, victim)
        if victim >= 0:
            self.await_end(victim)
            self.store.set(f"{name}/over", "1")
        return ["" if place == victim else str(self.receive(place)) for place in range(len(schedule.live))]


def _make_worker(store, _rank: int) -> Callable[..., str]:
    watch = store.clone()
    settings = TransportSettings(store, limits=LIMITS)
    plugin = None

    def run(kind, *case):
        nonlocal plugin
        if type(plugin) is not PLUGINS[kind]:  # gloo's would shut the sockets that another keeps
            Simulated.accelerator = None  # on which the last plug-in keeps communicators
            plugin = PLUGINS[kind](settings)
        try:
            _case(store, watch, plugin, *case)
        except TransportError as error:
            return f"TransportError: {error}"
        return "done"

    return run


def _case(store, watch, plugin: TransportPlugin, name: str, text: str, place: int, action: str, n: int, victim: int):
    schedule = lower(Schedule.loads(text))
    members = sorted(schedule.live)
    role, over = members[place], threading.Event()
    program = schedule.program(role)
    plugin.offer(name, role)
    store.set(f"{name}/offered/{place}", "1")  # as before an acknowledgement
    store.wait([f"{name}/offered/{other}" for other in range(len(members))], timedelta(seconds=ANSWER_SECONDS))
    groups = GroupsOfGeneration(name, role, members, sum_groups(schedule), MESSAGE, lanes_of(schedule), over=over)
    transport = plugin.open(groups)
    if victim >= 0 and place != victim:
        threading.Thread(target=_end_when_told, args=(watch, name, over, plugin), daemon=True).start()
    try:
        for iteration in range(n):
            _iterate(transport, program, schedule, role, iteration, action if place == victim else "")
        store.set(f"{name}/done/{place}", "1")  # as after a commit: no process leaves before all messages have arrived
        store.wait([f"{name}/done/{other}" for other in range(len(members))], timedelta(seconds=ANSWER_SECONDS))
    finally:
        plugin.end()


def _end_when_told(watch, name: str, over: threading.Event, plugin: TransportPlugin):
    watch.wait([f"{name}/over"], timedelta(seconds=ANSWER_SECONDS))
    over.set()
    plugin.wake()


def _iterate(
    transport: GroupTransport,
    program: Sequence[Instruction],
    schedule: Schedule,
    role: Worker,
    iteration: int,
    end: str,
):
    """Every transfer and sum of one iteration; dies before the first sum if `end` says so, or before the first send."""
    transport.begin(program, iteration)
    pending, begun = {}, {}
    for instruction in program:
        if end == "before a send" and isinstance(instruction, SendActivation | SendGradient):
            os.kill(os.getpid(), 9)
        if end == "before a sum" and isinstance(instruction, ReduceGradients):
            os.kill(os.getpid(), 9)
        if isinstance(instruction, SendActivation | SendGradient):
            transport.send(instruction, _content(instruction, instruction.stage, iteration))
        elif isinstance(instruction, RecvActivation | RecvGradient):
            pending[instruction] = transport.receive(instruction)
        elif isinstance(instruction, ReduceBucket):
            begun[instruction] = _addend(role, instruction.stage, iteration + instruction.bucket)
            transport.reduce(instruction.stage, [begun[instruction], torch.zeros(0)], instruction.bucket)
        elif isinstance(instruction, ReduceGradients):
            found_of = {receive: pending.pop(receive)() for receive in list(pending)}
            transport.settle()
            for receive, result in found_of.items():
                sender = receive.stage + (1 if isinstance(receive, RecvGradient) else -1)
                assert torch.equal(result, _content(receive, sender, iteration)), f"{receive} of {iteration}: {result}"
            buffers = [_addend(role, instruction.stage, iteration), _addend(role, instruction.stage, -iteration)]
            transport.reduce(instruction.stage, buffers)
            for buffer, sign in zip(buffers, (1, -1), strict=True):
                hosts = schedule.hosts(instruction.stage)
                total = torch.stack([_addend(host, instruction.stage, sign * iteration) for host in hosts]).sum(0)
                assert torch.equal(buffer, total), f"sum of stage {instruction.stage} in {iteration}: {buffer}"
            for item in [item for item in begun if item.stage == instruction.stage]:
                total = torch.stack([_addend(host, item.stage, iteration + item.bucket) for host in hosts]).sum(0)
                assert torch.equal(begun.pop(item), total), f"{item} in {iteration}"
    assert not pending
    assert not begun


def _content(transfer: Transfer, sender_stage: int, iteration: int) -> torch.Tensor:
    gradient = isinstance(transfer, SendGradient | RecvGradient)
    key = f"{gradient} {sender_stage} {transfer.micro_batch} {iteration}".encode()
    value = int.from_bytes(hashlib.blake2b(key, digest_size=3).digest(), "little")
    return torch.full(MESSAGE[0], float(value), dtype=MESSAGE[1])


def _addend(host: Worker, stage: int, iteration: int) -> torch.Tensor:
    return torch.arange(ENTRIES, dtype=torch.float64) * (iteration + 1) + 10 * stage + host.pipeline


PLUGINS = {"gloo": Gloo, "accelerator": Simulated, "staged": Staged}
