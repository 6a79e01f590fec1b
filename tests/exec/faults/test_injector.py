"""Where in a program the faults strike, and that they strike once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from recycle import Shape, Worker
from recycle.exec.faults.faults import parse_fault
from recycle.exec.faults.injector import FaultInjector, start_injector
from recycle.exec.hooks.phases import Phase
from recycle.exec.transport.formation import FormingStore
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import lower

SHAPE = Shape(pipelines=3, ranks=2, micro_batches=2)


def claimed_by(claimed: list[int]) -> Callable[[int], bool]:
    """Grants every claim, and keeps it."""

    def claim(number: int) -> bool:
        claimed.append(number)
        return True

    return claim


class Link:
    """The link of a process whose faults never strike."""

    def __init__(self, name: str) -> None:
        self.name, self.live = name, ["0.0", "1.1"]

    def claim(self, fault: int) -> bool:
        return False

    def await_strike(self, fault: int) -> bool:
        return False


def no_poison() -> None:
    raise AssertionError("a kill spoils no gradient")


def test_a_delayed_kill_is_claimed_when_its_time_has_come_and_the_worker_goes_on_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = lower(one_f_one_b(SHAPE)).program(Worker(1, 0))
    claimed: list[int] = []
    slept: list[float] = []
    go, killed = threading.Event(), threading.Event()
    clock = SimpleNamespace(sleep=lambda seconds: (slept.append(seconds), go.wait()))
    monkeypatch.setattr("recycle.exec.faults.injector.time", clock)  # threads of other tests may sleep, too
    monkeypatch.setattr("recycle.exec.faults.kinds.os.kill", lambda *_: killed.set())
    faults = [(7, parse_fault("kill=0.5:1.0@3"))]
    injector = FaultInjector(faults, claimed_by(claimed), no_poison)
    injector.begin_iteration(3, program)
    for position, instruction in enumerate(program):
        injector.before(position, instruction)
    assert claimed == []
    go.set()
    assert killed.wait(60.0)
    assert (slept, claimed) == ([0.5], [7])


@pytest.mark.parametrize("phase", ["commit", "step", "stepped", "undo"])
def test_a_kill_between_instructions_strikes_once_whatever_iteration_the_worker_is_in_by_then(
    phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lower(one_f_one_b(SHAPE)).program(Worker(1, 0))
    claimed: list[int] = []
    monkeypatch.setattr("recycle.exec.faults.kinds.os.kill", lambda *_: None)
    injector = FaultInjector([(7, parse_fault(f"kill:1.0@3.{phase}"))], claimed_by(claimed), no_poison)
    injector.begin_iteration(4, program)
    for position, instruction in enumerate(program):
        injector.before(position, instruction)
    injector.reach(phase, 4)
    assert claimed == []
    injector.reach(phase, 3)
    injector.reach(phase, 3)
    assert claimed == [7]


def test_a_nan_spoils_the_gradients_right_before_the_reduce_and_once_per_run() -> None:
    program = lower(one_f_one_b(SHAPE)).program(Worker(1, 0))
    granted = [True, False]
    spoiled: list[str] = []
    place = 0
    injector = FaultInjector(
        [(0, parse_fault("nan:1.0@3"))], lambda _: granted.pop(0), lambda: spoiled.append(str(program[place]))
    )
    for _ in range(2):
        injector.begin_iteration(3, program)
        for place, instruction in enumerate(program):
            injector.before(place, instruction)
    assert spoiled == ["0REDUCE_GRAD"]
    assert granted == []


def test_a_slow_worker_sleeps_in_proportion_through_its_range_and_in_repeated_iterations_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = lower(one_f_one_b(SHAPE)).program(Worker(1, 0))
    slept: list[float] = []
    monkeypatch.setattr("recycle.exec.faults.injector.time", SimpleNamespace(sleep=slept.append))
    first = [True, False, False]
    faults = [(0, parse_fault("slow=3:1.0@2-3")), (1, parse_fault("slow=2:1.0@5"))]
    injector = FaultInjector(faults, lambda _: bool(first) and first.pop(0), no_poison)
    for step in (1, 2, 3, 3, 4, 5, 6):
        injector.begin_iteration(step, program)
        injector.computed(0.25)
    assert slept == [0.5, 0.5, 0.5, 0.25]


def exchanged(link: Link, fault: str, store: FormingStore, tensor_parallel: int = 1) -> list[str]:
    """The ends that a process learns as the fault strikes."""
    injector = start_injector([fault], tensor_parallel, link, store, no_poison, lambda target, bit: None)
    return injector.exchange(0, parse_fault(fault), [f"{link.name}>a", f"{link.name}>b"])


def test_workers_of_a_fault_exchange_the_ends_of_their_connections() -> None:
    store, names = FormingStore(HashStore(), threading.Event()), ("0.0", "0.0t1", "1.1", "1.1t1")
    with ThreadPoolExecutor(len(names)) as threads:
        learnt = list(threads.map(lambda name: exchanged(Link(name), "cut=1.1:0.0@3", store, 2), names))
    assert learnt[0] == learnt[1] == ["1.1>a", "1.1>b", "1.1t1>a", "1.1t1>b"]
    assert learnt[2] == learnt[3] == ["0.0>a", "0.0>b", "0.0t1>a", "0.0t1>b"]


def test_ends_are_awaited_no_longer_than_the_generation_lasts_and_some_seconds() -> None:
    over = threading.Event()
    assert exchanged(Link("0.0"), "cut=1.1:0.0@3", FormingStore(HashStore(), over, 0.01)) == []
    over.set()
    assert exchanged(Link("0.0"), "cut=1.1:0.0@3", FormingStore(HashStore(), over)) == []
