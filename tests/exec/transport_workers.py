"""Processes that drive transports without stages: every message and sum carries what the receiver can check.

Started once per module. A test tells each process what to do next: form a generation, begin an action in its main
thread, end the generation from another thread as a worker's watch thread does, leave it.
"""

import gc
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from typing import Any

import torch

from recycle import Schedule, Worker, lower
from recycle.exec.transport.base import TransportError, sum_groups
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings
from recycle.exec.transport.staged import Staged
from recycle.ir.communicators import lanes_of
from recycle.ir.instruction import (
    Receive,
    RecvGradient,
    ReduceBucket,
    ReduceGradients,
    Send,
    SendGradient,
    Transfer,
)
from recycle.job.sections import MembershipSection
from recycle.plans.shards import owners_of
from tests.exec.accelerator.transport import Simulated
from tests.waiting import until
from tests.warm import WarmPool

MESSAGE = ((4, 3), torch.float32)
ENTRIES = 5
LIMITS = {"transport_timeout": 60.0, "dead_after": 30.0, "form_timeout": 20.0}
LATE = 30.0
"""Seconds after which an action counts as hung."""
SOON = 10.0
"""Seconds in which a wait ends that nothing holds up."""
HEARTBEAT = 0.05
WAITS = "waits"
FAILED = ("TransportError: ", "Unreachable: ")


class TransportWorkers(WarmPool):
    """As many processes as asked for."""

    def __init__(self, count: int):
        super().__init__(count, Participant)
        self._generations = 0

    def tell(self, ranks: Sequence[int], *request) -> list[Any]:
        """The answers of these processes to the same request."""
        for rank in ranks:
            self.send(rank, *request)
        return [self.receive(rank) for rank in ranks]

    def form(self, *arguments, **named) -> list[str]:
        """As `begin_forming`; what each process says, "done" if it has formed its groups."""
        return self.outcomes(self.begin_forming(*arguments, **named))

    def begin_forming(
        self, kind: str, schedule: Schedule, ranks: Sequence[int], impatient=-1, absent=-1, **limits: float
    ) -> list[int]:
        """Begin to form a generation of these processes, by role; returns those that take part.

        The process `absent` does not come, and `impatient` waits for half a second only.
        """
        self._generations += 1
        name, text = f"generation{self._generations}", schedule.dumps()
        coming = [rank for rank in ranks if rank != absent]
        for rank in coming:
            self.tell([rank], "offer", kind, name, {"transport_timeout": 0.5} if rank == impatient else limits)
        for place, rank in enumerate(ranks):
            if rank != absent:
                self.tell([rank], "begin", Participant.form, name, text, place, ranks)
        return coming

    def begin(self, ranks: Sequence[int], action: Callable[..., Any], *arguments):
        """Begin an action in the main thread of each of these processes, called with the `Participant` first."""
        self.tell(ranks, "begin", action, *arguments)

    def outcomes(self, ranks: Sequence[int], seconds=LATE) -> list[str]:
        """ "done", the TransportError, or `WAITS` of each process whose action has not ended after so many seconds."""
        return self.tell(ranks, "outcome", seconds)

    def run(self, ranks: Sequence[int], action: Callable[..., Any], *arguments) -> list[str]:
        self.begin(ranks, action, *arguments)
        return self.outcomes(ranks)


class Participant:
    """One process.

    Attributes:
        plugin: of the present kind and limits.
    """

    plugin: TransportPlugin

    def __init__(self, store, rank: int):
        self.store, self.rank, self._kind = store, rank, None
        self._main = ThreadPoolExecutor(1)
        self._running = Future()
        self._is_ending = threading.Event()

    def __call__(self, method: str, *arguments):
        return getattr(self, method)(*arguments)

    def offer(self, kind: str, name: str, limits: dict[str, float]):
        if (kind, limits) != self._kind:
            self._kind, Simulated.accelerator = (kind, limits), None  # on which the last plug-in keeps communicators
            self.plugin = PLUGINS[kind](TransportSettings(self.store, limits=MembershipSection(**(LIMITS | limits))))
        self.plugin.offer(name, Worker(self.rank, 0))

    def begin(self, action: Callable[..., Any], *arguments):
        self._running = self._main.submit(action, self, *arguments)

    def outcome(self, seconds: float) -> str:
        try:
            answer = self._running.result(seconds)
        except TransportError as error:
            return f"{type(error).__name__}: {error}"
        except TimeoutError:
            return WAITS
        return "done" if answer is None else answer

    def form(self, name: str, text: str, place: int, ranks: Sequence[int]):
        """Form a generation; role number `place` is this process's."""
        self.schedule = lower(Schedule.loads(text))
        members = sorted(self.schedule.live)
        self.name, self.number = name, int(name.removeprefix("generation"))
        self.role, self.over = members[place], threading.Event()
        self.program, self._is_ending = self.schedule.program(self.role), threading.Event()
        hosts_of = sum_groups(self.schedule)
        groups = GroupsOfGeneration(
            name,
            self.role,
            members,
            hosts_of,
            MESSAGE,
            lanes_of(self.schedule),
            {role: Worker(rank, 0) for role, rank in zip(members, ranks, strict=True)},
            self.over,
            owners={stage: owners_of(hosts, hosts, 1) for stage, hosts in hosts_of.items()},
        )
        self.transport = self.plugin.open(groups)

    def beat(self):
        """Ask for the state of the device, as heartbeats do, until the generation ends here."""
        ending = self._is_ending
        threading.Thread(target=lambda: _repeat(self.plugin.device_state, ending), daemon=True).start()

    def stop(self):
        """End the generation from outside of the main thread, until it leaves."""
        self.over.set()
        self.plugin.wake()
        ending = self._is_ending
        threading.Thread(target=lambda: _repeat(self.plugin.wake, ending), daemon=True).start()

    def end(self):
        self._is_ending.set()
        self.plugin.end()

    def iterate(self, iterations: int, end="", victim=-1):
        """Every transfer and sum of the program; before the first send or sum, `end` says which, the victim dies."""
        for iteration in range(iterations):
            self._iterate(iteration, end if self.rank == victim else "")
        self.store.set(f"{self.name}/done/{self.role}", "1")  # as after a commit: messages to others have arrived
        self.store.wait([f"{self.name}/done/{other}" for other in self.schedule.live], timedelta(seconds=LATE))

    def _iterate(self, iteration: int, end: str):
        transport, live = self.transport, self.schedule.hosts
        transport.begin(self.program, iteration)
        pending, begun = {}, {}
        for instruction in self.program:
            if isinstance(instruction, Send if end == "send" else ReduceGradients) and end:
                os.kill(os.getpid(), 9)
            if isinstance(instruction, Send):
                transport.send(instruction, self._content(instruction, instruction.stage, iteration))
            elif isinstance(instruction, Receive):
                pending[instruction] = transport.receive(instruction)
            elif isinstance(instruction, ReduceBucket):
                begun[instruction] = self._addend(self.role, instruction.stage, iteration + instruction.bucket)
                transport.reduce(instruction.stage, [begun[instruction], torch.zeros(0)], instruction.bucket)
            elif isinstance(instruction, ReduceGradients):
                received = {receive: pending.pop(receive)() for receive in list(pending)}
                transport.settle()
                for receive, tensor in received.items():
                    sender = receive.stage + (1 if isinstance(receive, RecvGradient) else -1)
                    expected = self._content(receive, sender, iteration)
                    assert torch.equal(tensor, expected), f"{receive} of {iteration}: {tensor}"
                buffers = [self._addend(self.role, instruction.stage, sign * iteration) for sign in (1, -1)]
                transport.reduce(instruction.stage, buffers)
                results = list(zip(buffers, (iteration, -iteration), strict=True))
                results += [
                    (begun.pop(item), iteration + item.bucket)
                    for item in list(begun)
                    if item.stage == instruction.stage
                ]
                for buffer, number in results:
                    parts = [self._addend(host, instruction.stage, number) for host in live(instruction.stage)]
                    assert torch.equal(buffer, torch.stack(parts).sum(0)), f"{instruction} of {iteration}: {buffer}"
        assert not pending
        assert not begun

    def _content(self, transfer: Transfer, sender_stage: int, iteration: int) -> torch.Tensor:
        gradient = isinstance(transfer, SendGradient | RecvGradient)
        key = f"{self.name} {gradient} {sender_stage} {transfer.micro_batch} {iteration}".encode()
        value = int.from_bytes(hashlib.blake2b(key, digest_size=3).digest(), "little")
        return torch.full(MESSAGE[0], float(value), dtype=MESSAGE[1])

    def _addend(self, host: Worker, stage: int, iteration: int) -> torch.Tensor:
        first = 100 * self.number + 10 * stage + host.pipeline
        return torch.arange(ENTRIES, dtype=torch.float64) * (iteration + 1) + first


def _repeat(call: Callable[[], object], ending: threading.Event):
    while not ending.wait(HEARTBEAT):
        call()


PLUGINS = {"gloo": Gloo, "accelerator": Simulated, "staged": Staged}


# What a process can wait for, on a peer that does not come.


def receive(process: Participant):
    transport = process.transport
    transport.begin(process.program, 0)
    transport.receive(next(op for op in process.program if isinstance(op, Receive)))()
    transport.settle()


def send(process: Participant):
    transport = process.transport
    transport.begin(process.program, 0)
    for instruction in process.program:
        if isinstance(instruction, Send):
            transport.send(instruction, torch.ones(4, 3))
    transport.begin(process.program, 2)
    transport.settle()


def add_up(process: Participant):
    process.transport.reduce(process.role.rank, [torch.ones(3)], 0)
    process.transport.reduce(process.role.rank, [torch.ones(3)])


def neighbor(process: Participant) -> Worker:
    return process.role._replace(rank=1 - process.role.rank)


def send_state(process: Participant):
    process.transport.send_state(neighbor(process), [torch.ones(5)])
    process.transport.settle()


def receive_state(process: Participant):
    process.transport.receive_state(neighbor(process), [torch.ones(5)])
    process.transport.settle()


def gather_values(process: Participant):
    transport = process.transport.host_side()
    group, parts = transport.group_of(None), [torch.ones(1) for _ in transport.members_of(None)]
    transport.await_collective([group.allgather([parts], [torch.ones(1)])], group)


def scatter(process: Participant):
    if process.plugin.has_shards:
        process.transport.reduce_scatter(process.role.rank, [[torch.ones(3), torch.ones(3)]])
    else:
        add_up(process)


def gather(process: Participant):
    if process.plugin.has_shards:
        process.transport.gather(process.role.rank, list(torch.ones(2, 3)))
    else:
        add_up(process)


ACTIONS = (receive, add_up, send, send_state, receive_state, gather, scatter, gather_values)
"""If each process of a grid begins another one of the first four, or of the last four, none of these waits ends."""


# Checks in a process.


DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64)


def identify(process: Participant):
    return os.getpid()


def try_everything(process: Participant):
    for action in ACTIONS:
        began = time.monotonic()
        try:
            action(process)
        except TransportError:
            assert time.monotonic() - began < 1.6, action  # a wait takes 2 s
        else:
            raise AssertionError(f"{action} returns")


def end_twice(process: Participant):
    for end in (process.plugin.wake, process.plugin.end) * 2:
        end()


def copy_and_add(process: Participant):
    transport, (pipeline, rank) = process.transport, process.role
    for dtype, size in product((*DTYPES, torch.complex64), (1, 3, 70_001)):
        generator, most = torch.Generator().manual_seed(size), 2 if dtype is torch.bool else 256
        content = torch.randint(most, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        if rank == 0:
            transport.send_state(neighbor(process), [content.view(dtype)])
        else:
            copy = torch.zeros(size, dtype=dtype)
            transport.receive_state(neighbor(process), [copy])
            transport.settle()
            assert torch.equal(copy.view(torch.uint8), content), dtype
    transport.settle()
    for dtype in DTYPES[4:]:
        total = torch.full((1001,), pipeline + 1, dtype=dtype)
        transport.reduce(rank, [total])
        assert bool((total == 3).all()), dtype


def open_socket(process: Participant):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process.ends = socket.create_connection(listener.getsockname()), listener.accept()[0]


def counts() -> list[int]:
    """Threads, without those of simulated devices, and open files."""
    gc.collect()
    of_devices = sum(thread.name.startswith(("compute", "pool")) for thread in threading.enumerate())
    return [len(os.listdir("/proc/self/task")) - of_devices, len(os.listdir("/proc/self/fd"))]


def count(process: Participant):
    time.sleep(0.3)  # threads of groups end soon after them
    process.counted = counts()


def check_counts(process: Participant):
    until(lambda: all(now <= before for now, before in zip(counts(), process.counted, strict=True)), SOON)
    process.ends[0].sendall(b"whole")
    assert process.ends[1].recv(8) == b"whole"
