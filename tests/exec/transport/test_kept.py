"""Communicators over generations: which are reused, and which form again. test_contract.py has what they carry.

The processes are threads of this one, with a simulated device each (tests/exec/accelerator).
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from recycle import Schedule, Shape, Worker, lower
from recycle.exec.transport.base import TransportError
from recycle.exec.transport.communicators import Communicators
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.lanes import LaneTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Receive
from recycle.job.footprint import COMMUNICATORS
from recycle.job.sections import MembershipSection
from tests.exec.accelerator.device import Device, Limits
from tests.exec.accelerator.transport import OwnDevice
from tests.exec.transport.test_lanes import LATE, groups_of, run_program

GRID = lower(one_f_one_b(Shape(2, 2, 3)))
SWAPPED = {Worker(0, 0): Worker(1, 0), Worker(1, 0): Worker(0, 0)}
"""Two peers exchange roles."""
LANES = [f"lane{a}>{b}" for k in (0, 1) for a, b in ((f"{k}.0", f"{k}.1"), (f"{k}.1", f"{k}.0"))]
SUMS = ["sum0.0>1.0", "sum0.1>1.1"]


class Process(OwnDevice):
    """A process and its main thread; `formed` lists the communicators that it has formed, without generation."""

    def __init__(self, store, device: Limits = Limits(), **limits: float):  # noqa: B008
        settings = TransportSettings(store, limits=MembershipSection(**limits))
        super().__init__(settings, Device(eager=True, limits=device))
        self.formed = []
        self._thread = ThreadPoolExecutor(1)

    def _form(self, groups: GroupsOfGeneration) -> LaneTransport:
        transport = super()._form(groups)
        make = transport._make

        def record(name, rank, size, ctas):
            self.formed.append(name.split("/")[1])
            return make(name, rank, size, ctas)

        transport._make = record
        return transport

    def does(self, action: Callable[[], Any]) -> Future[Any]:
        """Run an action in the main thread."""
        return self._thread.submit(action)


class Cluster:
    """Processes by start position, in successive generations."""

    def __init__(self, schedule: Schedule = GRID, **options: Any):
        self.schedule, self.number, self.over = schedule, 0, threading.Event()
        self._make = partial(Process, HashStore(), **options)
        self.processes, self._every = {}, []
        for worker in schedule.live:
            self.restart(worker)

    def restart(self, worker: Worker):
        """Replace a dead process."""
        self.processes[worker] = self._make()
        self._every.append(self.processes[worker])

    def _each(self, action: Callable[[Process, Worker], Any]) -> dict[Worker, Any]:
        """The results of an action in the main thread of each process."""
        doing = {worker: process.does(partial(action, process, worker)) for worker, process in self.processes.items()}
        return {worker: result.result(LATE) for worker, result in doing.items()}

    def form(self, roles: Mapping[Worker, Worker] = {}) -> dict[Worker, GroupTransport]:
        """Form the next generation; `roles` maps processes to roles, if different."""
        self.number += 1
        self.over = threading.Event()
        name = f"generation{self.number}"
        more = {"processes": {roles.get(worker, worker): worker for worker in self.processes}, "over": self.over}
        self._each(lambda process, worker: process.offer(name, worker))
        return self._each(
            lambda process, worker: process.open(groups_of(self.schedule, roles.get(worker, worker), name, **more))
        )

    def train(self, iterations: int, roles: Mapping[Worker, Worker] = {}):
        """Form the next generation and run iterations of it."""
        transports = self.form(roles)

        def run(process, worker):
            program = self.schedule.program(roles.get(worker, worker))
            for iteration in range(iterations):
                run_program(transports[worker], process.take(), program, iteration)

        self._each(run)

    def leave(self):
        """End the generation; all processes leave it."""
        self.end()
        self._each(lambda process, _: process.end())

    def formed(self) -> list[str]:
        """Communicators formed since the last call, each by both members."""
        names = sorted(name for process in self._every for name in process.formed)
        for process in self._every:
            process.formed.clear()
        assert names[::2] == names[1::2]
        return names[::2]

    def end(self):
        """End the generation at once."""
        self.over.set()
        for process in self.processes.values():
            process.wake()


@pytest.fixture
def cluster():
    started = Cluster()
    yield started
    started.end()


def test_next_generation_reuses_all_idle_communicators(cluster):
    cluster.train(3)
    assert cluster.formed() == LANES + SUMS
    for roles, formed in (
        ({}, []),
        (SWAPPED, ["lane0.0>1.1", "lane0.1>1.0", "lane1.0>0.1", "lane1.1>0.0"]),
        ({}, []),  # the other lanes were kept as spares
    ):
        cluster.leave()
        cluster.train(2, roles)
        assert cluster.formed() == formed
    cluster.leave()
    cluster.restart(Worker(1, 1))
    cluster.train(2)
    assert cluster.formed() == ["lane1.0>1.1", "lane1.1>1.0", "sum0.1>1.1"]


def test_new_communicators_do_not_take_streams_in_use(monkeypatch):
    monkeypatch.setattr("recycle.exec.transport.lanes.AT_ONCE", 1)  # of those that form at once the second may
    cluster = Cluster(lower(one_f_one_b(Shape(1, 3, 6))), device=Limits(streams=5))
    for _ in range(5):
        cluster.train(3)
        middle = cluster.processes[Worker(0, 1)]
        assert all(middle.streams.is_exclusive(id(each)) for each in middle.communicators.held().values())
        cluster.leave()
        cluster.restart(Worker(0, 2))
    cluster.end()


def test_communicators_and_spares_are_as_many_as_allowed():
    communicators = Communicators()
    communicators.begin_generation()
    keys = [("lane", (f"0.{number}", "0.0")) for number in range(COMMUNICATORS + 4)]
    for key in keys:
        communicators.add(key, key[1][0], None)
    communicators.retire([*keys[-3:], ("sum", ("0.0", "1.0"))])
    assert list(communicators.held()) == keys[5:]
    assert len(communicators.take_unfit()) == 5


def test_lane_with_a_waiting_receive_forms_again(cluster):
    worker, program = Worker(0, 1), GRID.program(Worker(0, 1))
    transport = cluster.form()[worker]
    cluster.formed()
    receive = next(instruction for instruction in program if isinstance(instruction, Receive))
    cluster.processes[worker].does(
        lambda: (transport.begin(program, 0), transport.receive(receive)()),
    ).result(LATE)
    cluster.leave()
    cluster.train(2)
    assert cluster.formed() == ["lane0.0>0.1"]


def test_process_with_a_broken_transport_reuses_nothing():
    cluster, worker = Cluster(transport_timeout=1.0), Worker(0, 0)
    transport = cluster.form()[worker]
    cluster.formed()
    with pytest.raises(TransportError, match="no answer within the deadline"):
        cluster.processes[worker].does(lambda: transport.reduce(0, [torch.ones(1)])).result(LATE)
    cluster.leave()
    cluster.train(1)
    assert cluster.formed() == ["lane0.0>0.1", "lane0.1>0.0", "sum0.0>1.0"]
    cluster.end()


def test_communicator_with_different_counts_at_its_ends_is_not_reused():
    """A small send may complete before its receiver arrives."""
    completed = SimpleNamespace(is_completed=lambda: True)
    communicators, key = Communicators(), ("lane0", ("0.0", "0.1"))
    communicators.begin_generation()
    lane = communicators.add(key, "lane", SimpleNamespace(send=lambda *_: completed))
    for _ in range(2):
        lane.send([torch.ones(1)], 1)
    communicators.end_generation()
    assert communicators.offer() == {"lane": 2}
    assert communicators.reuse(key, [{"lane": 1}]) is None
    assert len(communicators.take_unfit()) == 1
