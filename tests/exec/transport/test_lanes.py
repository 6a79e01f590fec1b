"""A communicator per lane on an accelerator that runs asynchronously: the transport avoids each trap.

The workers are threads of this process, with a simulated device each (tests/exec/accelerator).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recycle.errors import RunError
from recycle.exec.transport.base import TransportError, sum_groups
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.plugin import TransportSettings
from recycle.exec.worker.member import FormingKeys
from recycle.ir.communicators import lanes_of
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Compute, Receive, Send
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape, Worker
from tests.exec.accelerator.device import Device
from tests.exec.accelerator.transport import OwnDevice
from tests.exec.keys import KeyServer

MESSAGE = ((4,), torch.float32)
SOON, LATE = 0.1, 20.0
"""Seconds within which an action that does not wait ends, and after which it counts as hung."""
PIPELINE = lower(one_f_one_b(Shape(1, 3, 4)))
FIRST, MIDDLE, LAST = PIPELINE.live


class Process:
    """One worker of a schedule: its device, its transport, and its main thread."""

    def __init__(
        self,
        store: Any,
        schedule: Schedule,
        role: Worker,
        joins: Any,
        connections: int | None = None,
    ) -> None:
        self.device, self.over = Device(eager=False, connections=connections), threading.Event()
        self.program = schedule.program(role)
        members = sorted(schedule.live)
        groups = GroupsOfGeneration(
            "g", role, members, sum_groups(schedule), MESSAGE, lanes_of(schedule), over=self.over, copies=joins
        )
        self.transport = OwnDevice(TransportSettings(store), self.device)._form(groups)
        self._thread = ThreadPoolExecutor(1)

    def does(self, action: Callable[[], Any]) -> Future[Any]:
        return self._thread.submit(action)

    def run(self, iteration: int) -> None:
        """Run an iteration of its program with empty computations."""
        self.transport.begin(self.program, iteration)
        for instruction in self.program:
            if isinstance(instruction, Receive):
                self.transport.receive(instruction)()
            elif isinstance(instruction, Compute):
                self.device.launch(lambda: None, instruction.token)
            elif isinstance(instruction, Send):
                self.transport.send(instruction, torch.ones(4))
        self.transport.settle()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LATE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


Start = Callable[..., dict[Worker, Process]]


@pytest.fixture
def start() -> Iterator[Start]:
    """The workers of a schedule, formed: start(schedule)."""
    every: list[Process] = []

    def begin(schedule: Schedule = PIPELINE, joins: Any = (), connections: int | None = None) -> dict[Worker, Process]:
        store: Any = HashStore()
        processes = {role: Process(store, schedule, role, joins, connections) for role in schedule.live}
        every.extend(processes.values())
        for forming in [process.does(process.transport.form) for process in processes.values()]:
            forming.result(LATE)
        return processes

    yield begin
    for process in every:
        process.over.set()
        process.transport.release()


@pytest.mark.parametrize("connections", [None, 1])
def test_receives_do_not_block_kernels_that_load_late_or_share_a_work_queue(
    connections: int | None, start: Start
) -> None:
    processes = start(lower(one_f_one_b(Shape(1, 3, 6))), connections=connections)
    for iteration in range(3):
        for running in [process.does(partial(process.run, iteration)) for process in processes.values()]:
            running.result(LATE)


def test_device_that_waits_for_a_peer_is_recognized(start: Start) -> None:
    processes = start()
    middle, gate = processes[MIDDLE], threading.Event()
    assert not middle.transport.waits_for_peer()
    middle.transport.begin(middle.program, 0)
    received = next(op for op in middle.program if isinstance(op, Receive))
    middle.device.launch(gate.wait)
    middle.transport.receive(received)()
    assert not middle.transport.waits_for_peer()  # it computes
    gate.set()
    until(middle.transport.waits_for_peer)
    first = processes[FIRST]
    first.transport.begin(first.program, 0)
    first.transport.send(next(op for op in first.program if isinstance(op, Send)), torch.ones(4))
    until(lambda: not middle.transport.waits_for_peer())


def test_process_that_waits_for_several_dead_peers_leaves_the_generation(start: Start) -> None:
    middle = start()[MIDDLE]
    middle.transport.begin(middle.program, 0)
    middle.transport.begin(middle.program, 1)  # receives from both neighbours are posted ahead and spin
    waiting = middle.does(middle.transport.settle)
    middle.over.set()
    middle.transport.release()
    with pytest.raises(TransportError, match="the generation is over"):
        waiting.result(LATE)
    middle.does(middle.transport.close).result(LATE)
    middle.device.synchronize()


def test_settle_waits_until_a_state_has_arrived(start: Start) -> None:
    pair = lower(one_f_one_b(Shape(2, 1, 1)))
    source, joiner = pair.live
    processes = start(pair, joins=[(source, joiner)])
    state, copy, gate = torch.arange(5.0), torch.zeros(5), threading.Event()
    processes[source].device.launch(gate.wait)
    processes[source].does(lambda: processes[source].transport.send_state(joiner, [state])).result(LATE)
    processes[joiner].does(lambda: processes[joiner].transport.receive_state(source, [copy])).result(LATE)
    settling = processes[joiner].does(processes[joiner].transport.settle)
    with pytest.raises(TimeoutError):
        settling.result(SOON)
    assert not torch.equal(copy, state)
    gate.set()
    settling.result(LATE)
    assert torch.equal(copy, state)


def test_forming_process_reads_keys_and_leaves_at_the_end_of_the_generation() -> None:
    server = KeyServer()
    keys = FormingKeys(server.address)
    middle = Process(keys, PIPELINE, MIDDLE, ())
    forming = middle.does(middle.transport.form)
    with pytest.raises(TimeoutError):
        forming.result(SOON)
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(lambda: keys.check(["another"])).result(LATE)
    middle.over.set()
    with pytest.raises(TransportError, match=r"the generation is over|was not written"):
        forming.result(LATE)
    server.close()


def test_failed_device_ends_its_process_with_the_generation(start: Start) -> None:
    first = start()[FIRST]
    first.device.launch(lambda: [].pop())
    with pytest.raises(TransportError, match="accelerator error: IndexError"):
        first.does(first.transport.settle).result(LATE)
    with pytest.raises(RunError, match="cpu cannot be used any more by this process: accelerator error: IndexError"):
        first.does(first.transport.close).result(LATE)
