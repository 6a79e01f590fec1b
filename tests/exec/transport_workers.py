"""Processes that drive transports without stages: every message and sum carries what the receiver can check.

Started once per module; each case names the transport, the schedule and what to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from recycle.exec.transport.base import TransportError, sum_groups
from recycle.exec.transport.connections import Connection, open_sockets, own_connections
from recycle.exec.transport.formation import lanes_of
from recycle.exec.transport.gloo import Gloo, form_group
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.lanes import LanePlugin, LaneTransport
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings
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
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.job.sections import MembershipSection
from recycle.job.shape import Worker
from tests.exec.accelerator.transport import Simulated
from tests.warm import end_processes, warm_context

MESSAGE = ((4, 3), torch.float32)
ANSWER_SECONDS = 240.0
ENTRIES = 5
LIMITS = MembershipSection(transport_timeout=60.0, dead_after=30.0, form_timeout=20.0)


class TransportWorkers:
    """As many processes as asked for; use as a context manager."""

    def __init__(self, count: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._warm = warm_context()
        self._members = [self._start() for _ in range(count)]
        self._cases = 0

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self._warm.Pipe()
        process = self._warm.Process(target=_serve, args=(self._store.port, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def run(self, kind: str, schedule: Schedule, action: str, iterations: int = 3, victim: int = -1) -> list[str]:
        """What each worker of the schedule says in the end: "done", or the error; "" of the victim, which is killed."""
        self._cases += 1
        pipes = [pipe for _, pipe in self._members[: len(schedule.live)]]
        assert len(pipes) == len(schedule.live)
        for place, pipe in enumerate(pipes):
            pipe.send((kind, f"case{self._cases}", schedule.dumps(), place, action, iterations, victim))
        if victim >= 0:
            self._members[victim][0].join(ANSWER_SECONDS)
            self._store.set(f"case{self._cases}/over", "1")
            self._members[victim] = self._start()
        answers = []
        for place, pipe in enumerate(pipes):
            if place == victim:
                answers.append("")
                continue
            assert pipe.poll(ANSWER_SECONDS), f"worker {place} hangs"
            answers.append(pipe.recv())
        return answers

    def __enter__(self) -> TransportWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        end_processes(self._members)


def _serve(port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    watch = store.clone()
    settings = TransportSettings(store, limits=LIMITS)
    plugin: TransportPlugin | None = None
    while (case := pipe.recv()) is not None:
        kind, *of_case = case
        if type(plugin) is not PLUGINS[kind]:  # gloo's would shut the sockets that another keeps
            plugin = PLUGINS[kind](settings)
        try:
            _case(store, watch, plugin, *of_case)
            answer = "done"
        except TransportError as error:
            answer = f"TransportError: {error}"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)
    os._exit(0)


def _case(
    store: Any,
    watch: Any,
    plugin: TransportPlugin,
    name: str,
    text: str,
    place: int,
    action: str,
    n: int,
    victim: int,
) -> None:
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
        store.set(f"{name}/done/{place}", "1")  # as after a commit: nobody leaves before all have what was sent
        store.wait([f"{name}/done/{other}" for other in range(len(members))], timedelta(seconds=ANSWER_SECONDS))
    finally:
        plugin.end()


def _end_when_told(watch: Any, name: str, over: threading.Event, plugin: TransportPlugin) -> None:
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
) -> None:
    """Every transfer and sum of one iteration; dies before the first sum if `end` says so, or before the first send."""
    transport.begin(program, iteration)
    pending, begun = {}, dict[ReduceBucket, torch.Tensor]()
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
            for receive, found in found_of.items():
                sender = receive.stage + (1 if isinstance(receive, RecvGradient) else -1)
                assert torch.equal(found, _content(receive, sender, iteration)), f"{receive} of {iteration}: {found}"
            buffers = [_addend(role, instruction.stage, iteration), _addend(role, instruction.stage, -iteration)]
            transport.reduce(instruction.stage, buffers)
            for buffer, sign in zip(buffers, (1, -1), strict=True):
                hosts = schedule.hosts(instruction.stage)
                total = torch.stack([_addend(host, instruction.stage, sign * iteration) for host in hosts]).sum(0)
                assert torch.equal(buffer, total), f"sum of stage {instruction.stage} in {iteration}: {buffer}"
            for one in [one for one in begun if one.stage == instruction.stage]:
                total = torch.stack([_addend(host, one.stage, iteration + one.bucket) for host in hosts]).sum(0)
                assert torch.equal(begun.pop(one), total), f"{one} in {iteration}"
    assert not pending
    assert not begun


def _content(transfer: Transfer, sender_stage: int, iteration: int) -> torch.Tensor:
    gradient = isinstance(transfer, SendGradient | RecvGradient)
    key = f"{gradient} {sender_stage} {transfer.micro_batch} {iteration}".encode()
    value = int.from_bytes(hashlib.blake2b(key, digest_size=3).digest(), "little")
    return torch.full(MESSAGE[0], float(value), dtype=MESSAGE[1])


def _addend(host: Worker, stage: int, iteration: int) -> torch.Tensor:
    return torch.arange(ENTRIES, dtype=torch.float64) * (iteration + 1) + 10 * stage + host.pipeline


class Lanes(LanePlugin):
    """The transport that NCCL uses, over gloo's communicators: the same plan of communicators, the same order."""

    @classmethod
    def refusal(cls, job: Job) -> str | None:
        return None

    def _form(self, groups: GroupsOfGeneration) -> GroupTransport:
        return GlooLanes(self.settings, groups, self.communicators)


class GlooLanes(LaneTransport):
    def _make(self, name: str, rank: int, size: int) -> Any:
        before = open_sockets()
        group = form_group(self._settings, name, rank, size, self._over)
        own = {fd for identity, fd in open_sockets().items() if identity not in before}
        return GlooCommunicator(group, own_connections(own))

    def _mark(self) -> Callable[[], bool]:
        return lambda: True

    def _abort(self, groups: Sequence[Any]) -> None:
        for group in groups:
            for connection in group.connections:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as end:
                    end.shutdown(socket.SHUT_RDWR)


class GlooCommunicator:
    """A group of gloo's whose operations complete without a wait, as those of a device do.

    Attributes:
        connections: of the group.
    """

    def __init__(self, group: Any, connections: list[Connection]) -> None:
        self.connections = connections
        self.send, self.recv, self.allreduce = (
            partial(Waited, operation) for operation in (group.send, group.recv, group.allreduce)
        )


class Waited:
    """The work of an operation, for which a thread waits: gloo completes it only then."""

    def __init__(self, operation: Callable[..., Any], *arguments: Any) -> None:
        self._work, self._error = operation(*arguments), ""
        self._ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = str(error)
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return self._ended.is_set() and not self._error


PLUGINS: dict[str, type[TransportPlugin]] = {"gloo": Gloo, "lanes": Lanes, "accelerator": Simulated}
