"""Communicators over generations: what goes on, what forms anew, and that no message of an ended generation arrives.

The processes are threads of this one, with a simulated device each (tests/exec/accelerator).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recycle.exec.transport.base import TransportError, sum_groups
from recycle.exec.transport.communicators import Communicators
from recycle.exec.transport.formation import lanes_of
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.lanes import LanePlugin
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Receive, RecvGradient, ReduceGradients, Send, SendGradient, Transfer
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.job.sections import MembershipSection
from recycle.job.shape import Shape, Worker
from tests.exec.accelerator.device import Device
from tests.exec.accelerator.transport import SimulatedTransport

LATE = 20.0
"""Seconds after which what has not ended hangs."""
GRID = lower(one_f_one_b(Shape(2, 2, 3)))
SWAPPED = {Worker(0, 0): Worker(1, 0), Worker(1, 0): Worker(0, 0)}
"""Two peers play each other's roles."""
LANES = [f"lane{a}>{b}" for k in (0, 1) for a, b in ((f"{k}.0", f"{k}.1"), (f"{k}.1", f"{k}.0"))]
SUMS = ["stage0:0.0", "stage1:0.1"]


class Process(LanePlugin):
    """A process, with its main thread, over its generations.

    Attributes:
        made: names of the communicators that it has made, without their generation.
    """

    def __init__(self, store: Any, **limits: float) -> None:
        super().__init__(TransportSettings(store, limits=MembershipSection(**limits)))  # type: ignore[arg-type]
        self.device, self.made = Device(eager=True), list[str]()
        self._thread = ThreadPoolExecutor(1)

    @classmethod
    def refusal(cls, job: Any) -> str | None:
        return None

    def _form(self, groups: GroupsOfGeneration) -> GroupTransport:
        return _Counting(self.settings, groups, self.communicators, self.device, self.made)

    def does(self, action: Callable[[], Any]) -> Future[Any]:
        """Have the main thread do something."""
        return self._thread.submit(action)


class _Counting(SimulatedTransport):
    def __init__(self, settings: Any, groups: Any, communicators: Any, device: Device, made: list[str]) -> None:
        super().__init__(settings, groups, communicators, device)
        self._made = made

    def _make(self, name: str, rank: int, size: int) -> Any:
        self._made.append(name.split("/", 1)[1])
        return super()._make(name, rank, size)


class Cluster:
    """Processes, by the position that they started in, in one generation after the other."""

    def __init__(self, schedule: Schedule = GRID, **limits: float) -> None:
        self.store: Any = HashStore()
        self.schedule, self._limits = schedule, limits
        self.processes = {worker: Process(self.store, **limits) for worker in schedule.live}
        self.number = 0
        self.over = threading.Event()
        self._every = list(self.processes.values())

    def restart(self, worker: Worker) -> None:
        """A new process in the place of one that is dead."""
        self.processes[worker] = Process(self.store, **self._limits)
        self._every.append(self.processes[worker])

    def form(
        self, roles: Mapping[Worker, Worker] = {}, absent: Sequence[Worker] = ()
    ) -> dict[Worker, Future[GroupTransport]]:
        """The next generation begins to form.

        Args:
            roles: process -> its role where it is another.
            absent: processes that die before they form.
        """
        self.number += 1
        self.over = threading.Event()
        name, schedule = f"generation{self.number}", self.schedule
        for offering in [p.does(lambda p=p, w=w: p.offer(name, w)) for w, p in self.processes.items()]:
            offering.result(LATE)
        forming = {}
        for worker, process in self.processes.items():
            if worker in absent:
                continue
            groups = GroupsOfGeneration(
                name,
                roles.get(worker, worker),
                sorted(schedule.live),
                sum_groups(schedule),
                ((4,), torch.float32),
                lanes_of(schedule),
                {roles.get(other, other): other for other in self.processes},
                self.over,
            )
            forming[worker] = process.does(lambda process=process, groups=groups: process.open(groups))
        return forming

    def train(self, iterations: int, roles: Mapping[Worker, Worker] = {}) -> dict[Worker, Future[None]]:
        """Form the next generation and run iterations of it."""
        transports = {worker: one.result(LATE) for worker, one in self.form(roles).items()}

        def run(transport: GroupTransport, role: Worker) -> None:
            for iteration in range(iterations):
                iterate(transport, self.schedule, role, self.number, iteration)

        return {
            worker: self.processes[worker].does(partial(run, one, roles.get(worker, worker)))
            for worker, one in transports.items()
        }

    def stop(self) -> None:
        """The generation is over for everybody, whatever they do."""
        self.over.set()
        for process in self.processes.values():
            process.wake()

    def leave(self) -> None:
        """Everybody leaves the generation."""
        self.stop()
        for leaving in [process.does(process.end) for process in self.processes.values()]:
            leaving.result(LATE)

    def made(self) -> list[str]:
        """What was formed since the last call; asserts that all members took part."""
        every = sorted(name for process in self._every for name in process.made)
        for process in self._every:
            process.made.clear()
        assert every == sorted(2 * sorted(set(every)))  # each stage has two hosts here
        return sorted(set(every))

    def end(self) -> None:
        self.over.set()
        for process in self._every:
            process.wake()


def iterate(transport: GroupTransport, schedule: Schedule, role: Worker, generation: int, iteration: int) -> None:
    """Every transfer and sum of an iteration; what arrives says which generation, iteration and transfer it is of."""
    program = schedule.program(role)
    transport.begin(program, iteration)
    found: list[tuple[torch.Tensor, float]] = []
    for instruction in program:
        if isinstance(instruction, Receive):
            found.append((transport.receive(instruction)(), content(instruction, generation, iteration)))
        elif isinstance(instruction, Send):
            transport.send(instruction, torch.full((4,), content(instruction, generation, iteration)))
        elif isinstance(instruction, ReduceGradients):
            total = torch.full((2,), float(generation))
            transport.reduce(instruction.stage, [total])
            assert total.tolist() == [2.0 * generation] * 2
    transport.settle()
    for tensor, expected in found:
        assert tensor.tolist() == [expected] * 4


def content(transfer: Transfer, generation: int, iteration: int) -> float:
    is_gradient = isinstance(transfer, SendGradient | RecvGradient)
    return float(generation * 1000 + iteration * 100 + transfer.micro_batch.index * 2 + is_gradient)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    started = Cluster()
    yield started
    started.end()


def finish(running: Mapping[Worker, Future[None]]) -> None:
    for one in running.values():
        one.result(LATE)


def test_a_generation_that_ended_between_two_iterations_leaves_all_communicators_to_the_next(cluster: Cluster) -> None:
    finish(cluster.train(3))
    assert cluster.made() == LANES + SUMS
    for _ in range(2):
        cluster.leave()
        finish(cluster.train(3))
        assert cluster.made() == []


def test_pairs_that_did_not_meet_before_form_and_the_others_are_kept_as_spares(cluster: Cluster) -> None:
    finish(cluster.train(1))
    cluster.leave()
    cluster.made()
    finish(cluster.train(2, SWAPPED))
    assert cluster.made() == ["lane0.0>1.1", "lane0.1>1.0", "lane1.0>0.1", "lane1.1>0.0"]
    cluster.leave()
    finish(cluster.train(2))
    assert cluster.made() == []


def test_a_lane_on_which_a_receive_waits_forms_anew_and_the_others_go_on(cluster: Cluster) -> None:
    formed = {worker: one.result(LATE) for worker, one in cluster.form().items()}
    cluster.made()
    waits = formed[Worker(0, 1)]
    program = GRID.program(Worker(0, 1))
    cluster.processes[Worker(0, 1)].does(
        lambda: (
            waits.begin(program, 0),
            waits.receive(next(one for one in program if isinstance(one, Receive)))(),
        )
    ).result(LATE)
    cluster.leave()
    finish(cluster.train(2))
    assert cluster.made() == ["lane0.0>0.1"]


def test_a_process_that_came_anew_has_all_of_its_own_formed_and_no_others(cluster: Cluster) -> None:
    finish(cluster.train(2))
    cluster.leave()
    cluster.made()
    cluster.restart(Worker(1, 1))
    finish(cluster.train(2))
    assert cluster.made() == ["lane1.0>1.1", "lane1.1>1.0", "stage1:0.1"]


def test_a_process_whose_transport_broke_keeps_nothing() -> None:
    cluster = Cluster(transport_timeout=0.2)
    formed = {worker: one.result(LATE) for worker, one in cluster.form().items()}
    cluster.made()
    alone = formed[Worker(0, 0)]
    with pytest.raises(TransportError, match="no answer within the deadline"):
        cluster.processes[Worker(0, 0)].does(lambda: alone.reduce(0, [torch.ones(1)])).result(LATE)
    cluster.leave()
    finish(cluster.train(1))
    assert cluster.made() == ["lane0.0>0.1", "lane0.1>0.0", "stage0:0.0"]
    cluster.end()


def test_what_one_end_has_begun_more_often_than_the_other_is_not_kept() -> None:
    class Backend:
        def send(self, *_: Any) -> Any:
            return Completed()

    class Completed:
        def is_completed(self) -> bool:
            return True

    of_process = Communicators()
    of_process.begin()
    key = ("lane0", ("0.0", "0.1"))
    lane = of_process.add(key, "generation1/lane0.0>0.1", Backend())
    assert lane is not None
    for _ in range(2):
        lane.send([torch.ones(1)], 1)  # complete here, as a small message is before its receiver has come
    of_process.end()
    assert of_process.offer() == {"generation1/lane0.0>0.1": 2}
    assert of_process.agree(key, [{"generation1/lane0.0>0.1": 1}]) is None
    assert len(of_process.take_unfit()) == 1


@pytest.mark.parametrize("seed", range(3))
def test_generations_that_end_at_any_instant_leave_no_message_to_the_next(seed: int) -> None:
    cluster, random = Cluster(), Random(seed)
    for _ in range(20):
        running = cluster.train(4, random.choice([{}, SWAPPED]))
        time.sleep(random.uniform(0.0, 0.05))
        cluster.stop()
        for one in running.values():
            if (error := one.exception(LATE)) is not None:
                assert isinstance(error, TransportError), error
        cluster.leave()
        if random.random() < 0.3:
            cluster.restart(random.choice(sorted(cluster.processes)))
    finish(cluster.train(4))
    cluster.end()
