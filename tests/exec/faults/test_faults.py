"""Faults: their text, refusals, random faults, and the points at which they strike."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from recycle import JobError, Shape, Worker, lower
from recycle.exec.faults.faults import Fault, check_faults, parse_fault, parse_punishment, punish
from recycle.exec.faults.injector import FaultInjector, start_injector
from recycle.exec.faults.kinds import FLIPPED, KINDS
from recycle.exec.transport.formation import FormingStore
from recycle.ir.families import one_f_one_b
from tests.exec.runs import job

JOB = job(3, 2, 2)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill=0.05:0.1@3.reduce", Fault("kill", Worker(0, 1), 3, "reduce", 0.05)),
        ("slow=1.5:1.1@4-8", Fault("slow", Worker(1, 1), 4, argument=1.5, last=8)),
        ("cut=0.1:1.1@4", Fault("cut", Worker(1, 1), 4, other=Worker(0, 1))),
        ("slow-link=4:1.0,0.1@4-8", Fault("slow-link", Worker(1, 0), 4, argument=4.0, last=8, other=Worker(0, 1))),
        ("flip=gradient,3:1.1t1@4", Fault("flip", Worker(1, 1), 4, argument=3, target="gradient", tensor_rank=1)),
    ],
)
def test_text_of_a_fault_is_read_whole(text, fault):
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "text", ["kill=0.05:0.1@3.undo", "flip=gradient,63:1.1@5", *(kind.example for kind in KINDS.values())]
)
def test_fault_prints_as_its_text(text):
    assert str(parse_fault(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill:1@3", "expected KIND"),
        pytest.param("kill:1.1@" + "9" * 5000, "expected KIND", id="thousands of digits"),
        ("melt:1.1@3", "unknown kind 'melt'; known are rejoin, nan, "),
        ("rejoin:1.1@3.forward", "unknown phase 'forward'; rejoin takes none"),
        ("exception:1.1@3.undo", "unknown phase 'undo'; exception takes one of forward, backward"),
        ("kill:1.1@3-5", "not in a range"),
        ("stop=2:1.1@3", "stop takes no argument"),
        ("slow:1.1@3-5", "slow takes a factor, 1 to 1000, after a '='"),
        ("slow=0.5:1.1@3-5", "slow takes a factor"),
        ("slow=3:1.1@5-3", "the range ends before it begins"),
        ("kill=soon:1.1@3", "a delay in seconds"),
        ("kill=nan:1.1@3", "a delay in seconds"),
        ("cut:1.1@3", "cut takes another worker after a '='"),
        ("cut=1.1:1.1@3", "cut takes another worker"),
        ("flip:1.1@3", f"flip takes one of {', '.join(FLIPPED)} after a '=', for example flip=gradient:1.1@5"),
        ("flip=gradient,64:1.1@3", "flip takes the number of a bit, 0 to 63, after a ',' that follows its target"),
        ("slow-link=4:1.1@3-5", "slow-link takes two workers separated by a ',', for example"),
        ("slow-link=4:1.1,1.1@3-5", "slow-link takes two workers"),
        ("slow-link=4:1.1t1,1.0@3-5", "slow-link strikes whole workers; leave out t1"),
        ("kill:1.0,1.1@3", "kill strikes one worker; leave out ,1.1"),
    ],
)
def test_unreadable_fault_is_refused_with_the_reason(text, says):
    with pytest.raises(JobError, match=says):
        parse_fault(text)


TWO_COPIES, THREE_COPIES = (
    job(3, 2, 2, train={"sharded_optimizer": True, "optimizer_copies": copies}) for copies in (2, 3)
)
COMPARED = job(3, 2, 2, integrity={"digests": 1})


@pytest.mark.parametrize(
    ("faults", "says", "of_job"),
    [
        (["kill:3.0@1"], "worker 3.0 is outside the grid of 3 pipelines", JOB),
        (["cut=0.2:1.1@2"], "outside the grid", JOB),
        (["slow=2:1.1@4-10"], "the run ends after step 9", JOB),
        (["kill:1.1@2", "slow=2:1.1@4-6"], "worker 1.1 is already dead at step 4", JOB),
        (["rejoin:1.1@4"], "worker 1.1 is alive at step 4", JOB),
        (["stop:1.1@2", "kill:1.1@2"], "worker 1.1 is already dead at step 2", JOB),
        (["kill:1.1@2", "rejoin:1.1@2"], "worker 1.1 is alive at step 2", JOB),
        (["kill:1.1t1@2"], "tensor rank 1, but .* tensor_parallel = 1", JOB),
        (["kill:1.1@1.gather"], r"nothing is gathered without \[train\] sharded_optimizer", JOB),
        (["cut=0.0:1.1@2"], "whether workers 1.1 and 0.0 exchange messages depends on the plan", JOB),
        (["slow-link=2:1.1,0.1@2-4"], "workers 1.1 and 0.1 exchange no messages; choose two of neighbouring", JOB),
        (["kill:0.1@2", "flaky-link=0.5:1.0,0.1@3-4"], "worker 0.1 is already dead at step 3", JOB),
        (["cut=0.1:1.1@2", "kill:1.1@3"], "worker 1.1 is already dead at step 3", JOB),
        (["kill:1.0@1", "kill:1.1@1", "cut=0.1:0.0@2"], "cannot be fenced", job(2, 2, 2)),
        (["kill:1.0@1", "cut=0.1:0.0@2", "rejoin:0.1@3"], None, JOB),
        (["cut=0.0:1.2@2", "kill:0.0@3", "kill:1.2@4"], None, job(3, 3, 2)),  # neither is fenced
        (["flip=weight:1.1@2", "rejoin:1.1@3"], "worker 1.1 is alive at step 3", JOB),
        (["kill:0.1@1", "flip=gradient:1.1@2", "rejoin:1.1@3"], "worker 1.1 is alive at step 3", JOB),
        # Compared states show the fault of a weight some time later; then the worker is fenced.
        (["flip=weight:1.1@2", "rejoin:1.1@6"], None, COMPARED),
        (["flip=moment:1.1@2", "kill:1.1@6"], None, COMPARED),
        (["flip=kernel:1.1@2", "rejoin:1.1@6"], "worker 1.1 is alive at step 6", COMPARED),
        # A majority of three holders of a shard can attribute the fault.
        (["flip=gradient:1.1@2", "kill:1.1@6"], None, TWO_COPIES),
        (["flip=gradient:1.1@2", "kill:1.1@6"], "already dead", THREE_COPIES),
    ],
)
def test_fault_that_can_never_strike_is_refused(faults, says, of_job):
    with pytest.raises(JobError, match=says) if says else nullcontext():
        check_faults([parse_fault(text) for text in faults], of_job, 10)


SHAPE = JOB.shape


@pytest.mark.parametrize(("mean", "seed"), [(1.0, 1), (4.0, 2), (25.0, 7)])
def test_random_faults_have_their_mean_distance_and_repeat_with_their_seed(mean, seed):
    steps = int(800 * mean)
    faults = punish(SHAPE, steps, mean, seed)
    assert faults == punish(SHAPE, steps, mean, seed) != punish(SHAPE, steps, mean, seed + 1)
    assert (steps - 1) / len(faults) == pytest.approx(mean, rel=0.1)
    assert {fault.kind for fault in faults} == {"kill", "rejoin"}
    assert {fault.worker for fault in faults} == set(SHAPE.workers())


@pytest.mark.parametrize("seed", range(10))
def test_random_faults_can_strike_and_no_stage_loses_its_last_host(seed):
    absent = frozenset({Worker(1, 1)})
    faults = punish(SHAPE, 2000, 1.5, seed, absent, ["kill", "kill", "kill", "stop", "cut"])
    check_faults(faults, JOB, 2000, absent)
    counts = Counter(fault.kind for fault in faults)
    assert counts["kill"] > 2 * counts["stop"] > 0
    assert counts["cut"] > 0
    dead = set(absent)
    for fault in faults:
        dead ^= {fault.worker}
        assert all(sum(worker.rank == rank for worker in dead) < 3 for rank in range(2))


def test_one_pipeline_cannot_be_punished():
    with pytest.raises(JobError, match="its death would end the run"):
        punish(Shape(1, 4, 8), 10, 2.0, 0)


@pytest.mark.parametrize("text", ["", "often", "0.5", "nan", "20,", "20,1.5", "20,1,2", "1e300"])
def test_unreadable_punishment_is_refused(text):
    with pytest.raises(JobError, match="expected MEAN_STEPS"):
        parse_punishment(text)


PROGRAM = lower(one_f_one_b(SHAPE)).program(Worker(1, 0))


def test_delayed_kill_is_claimed_after_its_delay_while_the_worker_continues(monkeypatch):
    claimed, slept, go, killed = [], [], threading.Event(), threading.Event()
    clock = SimpleNamespace(sleep=lambda seconds: (slept.append(seconds), go.wait()))
    monkeypatch.setattr("recycle.exec.faults.injector.time", clock)  # threads of other tests may sleep, too
    monkeypatch.setattr("recycle.exec.faults.kinds.os.kill", lambda *_: killed.set())
    injector = FaultInjector([(7, parse_fault("kill=0.5:1.0@3"))], lambda number: not claimed.append(number))
    injector.begin_iteration(3, PROGRAM)
    for position, instruction in enumerate(PROGRAM):
        injector.before_instruction(position, instruction)
    assert claimed == []
    go.set()
    assert killed.wait(60.0)
    assert (slept, claimed) == ([0.5], [7])


def test_nan_spoils_gradients_just_before_the_reduce_and_once_per_run():
    granted, spoiled, place = [True, False], [], 0
    injector = FaultInjector(
        [(0, parse_fault("nan:1.0@3"))], lambda _: granted.pop(0), lambda: spoiled.append(str(PROGRAM[place]))
    )
    for _ in range(2):
        injector.begin_iteration(3, PROGRAM)
        for place, instruction in enumerate(PROGRAM):
            injector.before_instruction(place, instruction)
    assert spoiled == ["0REDUCE_GRAD"]
    assert granted == []


def test_slow_worker_sleeps_in_proportion_in_its_range_and_in_repeated_iterations(monkeypatch):
    slept = []
    monkeypatch.setattr("recycle.exec.faults.injector.time", SimpleNamespace(sleep=slept.append))
    first = [True, False, False]
    faults = [(0, parse_fault("slow=3:1.0@2-3")), (1, parse_fault("slow=2:1.0@5"))]
    injector = FaultInjector(faults, lambda _: bool(first) and first.pop(0))
    for step in (1, 2, 3, 3, 4, 5, 6):
        injector.begin_iteration(step, PROGRAM)
        injector.computed(0.25)
    assert slept == [0.5, 0.5, 0.5, 0.25]


def exchanged(name: str, fault: str, store: FormingStore, tensor_parallel=1) -> list[str]:
    """The connection ends that a process receives when the fault strikes."""
    member = SimpleNamespace(name=name, live=["0.0", "1.1"], claim=lambda _: False, await_strike=lambda _: False)
    injector = start_injector([fault], tensor_parallel, member, lambda: store, lambda: None, lambda target, bit: None)
    return injector.exchange(0, parse_fault(fault), [f"{name}>a", f"{name}>b"])


def test_processes_of_a_fault_exchange_the_ends_of_their_connections():
    store, names = FormingStore(HashStore(), threading.Event()), ("0.0", "0.0t1", "1.1", "1.1t1")
    with ThreadPoolExecutor(len(names)) as threads:
        ends = list(threads.map(lambda name: exchanged(name, "cut=1.1:0.0@3", store, 2), names))
    assert ends[0] == ends[1] == ["1.1>a", "1.1>b", "1.1t1>a", "1.1t1>b"]
    assert ends[2] == ends[3] == ["0.0>a", "0.0>b", "0.0t1>a", "0.0t1>b"]


def test_exchange_of_ends_stops_at_its_deadline_or_with_the_generation():
    over = threading.Event()
    assert exchanged("0.0", "cut=1.1:0.0@3", FormingStore(HashStore(), over, 0.01)) == []
    over.set()
    assert exchanged("0.0", "cut=1.1:0.0@3", FormingStore(HashStore(), over)) == []
