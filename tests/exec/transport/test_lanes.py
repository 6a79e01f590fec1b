"""A communicator per lane on an accelerator that runs asynchronously: the transport avoids each trap.

The workers are threads of this process, with a simulated device each (tests/exec/accelerator).
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from recycle import RunError, Schedule, Shape, Worker, lower
from recycle.exec.transport.base import TransportError, Unreachable, sum_groups
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.lanes import ATTEMPTS, LANE_CTAS, LaneTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.exec.worker.member import FormingKeys
from recycle.ir.communicators import LANES, lanes_of
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Compute, Instruction, Receive, ReduceGradients, Send
from recycle.job.sections import MembershipSection
from tests.exec.accelerator.device import Device, Limits
from tests.exec.accelerator.transport import OwnDevice
from tests.exec.keys import KeyServer
from tests.exec.transport.test_transports import adaptive
from tests.waiting import until

MESSAGE = ((4,), torch.float32)
SOON, LATE = 0.1, 20.0
"""Seconds within which an action that does not wait ends, and after which it counts as hung."""
PIPELINE = lower(one_f_one_b(Shape(1, 3, 4)))
FIRST, MIDDLE, LAST = PIPELINE.live


def groups_of(schedule: Schedule, role: Worker, name="g", **more: Any) -> GroupsOfGeneration:
    members, hosts = sorted(schedule.live), sum_groups(schedule)
    return GroupsOfGeneration(name, role, members, hosts, MESSAGE, lanes_of(schedule), **more)


class Process:
    """One worker of a schedule: its device, its transport, and its main thread."""

    def __init__(
        self,
        store,
        schedule: Schedule,
        role: Worker,
        joins,
        connections: int | None = None,
        limits: Limits = Limits(),  # noqa: B008  (immutable)
        form_timeout: float = LATE,
    ) -> None:
        self.device, self.over = Device(eager=False, connections=connections, limits=limits), threading.Event()
        self.program = schedule.program(role)
        groups = groups_of(schedule, role, over=self.over, copies=joins)
        settings = TransportSettings(store, limits=MembershipSection(form_timeout=form_timeout))
        self.plugin = OwnDevice(settings, self.device)
        self.transport = self.plugin._form(groups)
        self.plugin._transport = self.transport
        self._thread = ThreadPoolExecutor(1)

    def does(self, action: Callable[[], Any]) -> Future[Any]:
        return self._thread.submit(action)

    def run(self, iteration: int):
        run_program(self.transport, self.device, self.program, iteration)


def run_program(transport: LaneTransport, device: Device, program: Sequence[Instruction], iteration: int):
    """An iteration with empty computations."""
    transport.begin(program, iteration)
    for instruction in program:
        if isinstance(instruction, Receive):
            transport.receive(instruction)()
        elif isinstance(instruction, Compute):
            device.launch(lambda: None, instruction.token)
        elif isinstance(instruction, Send):
            transport.send(instruction, torch.ones(4))
        elif isinstance(instruction, ReduceGradients):
            transport.reduce(instruction.stage, [torch.ones(2)])
    transport.settle()


@pytest.fixture
def start():
    """The workers of a schedule, formed: start(schedule)."""
    every = []

    def begin(schedule=PIPELINE, joins=(), **options):
        store = HashStore()
        processes = {role: Process(store, schedule, role, joins, **options) for role in schedule.live}
        every.extend(processes.values())
        for forming in [process.does(process.transport.form) for process in processes.values()]:
            forming.result(LATE)
        return processes

    yield begin
    for process in every:
        process.over.set()
        process.transport.release()


def run_three(processes: dict[Worker, Process]):
    for iteration in range(3):
        for running in [process.does(partial(process.run, iteration)) for process in processes.values()]:
            running.result(LATE)


@pytest.mark.parametrize("connections", [None, 1])
def test_receives_do_not_block_kernels_that_load_late_or_share_a_work_queue(connections, start):
    run_three(start(lower(one_f_one_b(Shape(1, 3, 6))), connections=connections))


def test_receives_leave_multiprocessors_to_computations(start):
    run_three(start(lower(one_f_one_b(Shape(1, 3, 6))), limits=Limits(multiprocessors=2 * LANE_CTAS)))


def test_receives_are_posted_ahead_where_they_stop_nothing(start):
    middle = start()[MIDDLE]
    middle.transport.begin(middle.program, 0)
    assert middle.device.occupied == 0
    middle.transport.begin(middle.program, 1)
    until(lambda: middle.device.occupied == 2 * LANE_CTAS)


def test_communicators_whose_creation_hangs_form_again(start):
    processes = start(lower(one_f_one_b(Shape(2, 3, 2))), limits=Limits(hangs=1.0, many=3), form_timeout=ATTEMPTS * 1.5)
    run_three(processes)
    assert {place.rank: process.device.hung > 0 for place, process in processes.items()} == {
        0: False,
        1: True,
        2: False,
    }


def test_workers_share_communicators_where_they_have_many_lanes(start):
    processes = start(lower(adaptive(6, 4, 6, (0, 1, 0, 0))))  # neighbors of 1.1 have lanes to all of its peers
    assert max(process.device.communicators for process in processes.values()) == LANES + 1
    run_three(processes)


def test_sum_is_complete_while_receives_of_lanes_wait(start):
    schedule = lower(one_f_one_b(Shape(2, 2, 2)))
    processes = start(schedule)
    hosts = [processes[Worker(k, 0)] for k in range(2)]
    totals = [torch.full((2,), 3.0 + k) for k in range(2)]
    for process in hosts:
        process.transport.begin(process.program, 0)
        process.transport.begin(process.program, 1)  # a gradient is awaited from the other stage
        until(lambda process=process: process.device.occupied == LANE_CTAS)
    for summing in [
        process.does(partial(process.transport.reduce, 0, [total]))
        for process, total in zip(hosts, totals, strict=True)
    ]:
        summing.result(LATE)
    assert [total.tolist() for total in totals] == [[7.0, 7.0]] * 2


def poll(process: Process):
    """Ask for the state of the device as heartbeats do, while the main thread waits for it."""
    settling = process.does(process.transport.settle)
    until(lambda: process.plugin.device_state() is not None and settling.done())
    settling.result()


def test_broken_link_is_blamed_on_its_pair_and_several_on_the_own_process(start):
    processes = start()
    for process in processes.values():
        process.transport.begin(process.program, 0)
        process.transport.begin(process.program, 1)
    for communicator in processes[MIDDLE].plugin.communicators.held().values():
        communicator.backend.break_link()
    with pytest.raises(Unreachable, match=r"communicators have failed: lane0\.\d>0\.\d") as blamed:
        poll(processes[FIRST])
    assert blamed.value.peer == MIDDLE
    with pytest.raises(RunError, match="to several workers, so this end is at fault"):
        poll(processes[MIDDLE])


def test_device_that_waits_for_a_peer_is_recognized(start):
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


def test_process_that_waits_for_several_dead_peers_leaves_the_generation(start):
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


def test_settle_waits_until_a_state_has_arrived(start):
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


def test_forming_process_reads_keys_and_leaves_at_the_end_of_the_generation():
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


def test_failed_device_ends_its_process_with_the_generation(start):
    first = start()[FIRST]
    first.device.launch(lambda: [].pop())
    with pytest.raises(TransportError, match="accelerator error: IndexError"):
        first.does(first.transport.settle).result(LATE)
    with pytest.raises(RunError, match="cpu cannot be used any more by this process: accelerator error: IndexError"):
        first.does(first.transport.close).result(LATE)
