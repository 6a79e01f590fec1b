"""Faults: what the text means, what is refused, which are drawn at random, and where in a program they strike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from recycle import Job, JobError, Shape, Worker
from recycle.exec.faults.faults import Fault, check_faults, parse_fault, parse_punishment, punish
from recycle.exec.faults.injector import FaultInjector, start_injector
from recycle.exec.faults.kinds import FLIPPED, KINDS
from recycle.exec.transport.formation import FormingStore
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import lower
from tests.exec.runs import job

JOB = job(3, 2, 2)


def check(*faults: str, of: Job = JOB, absent: frozenset[Worker] = frozenset()) -> None:
    check_faults([parse_fault(text) for text in faults], of, 10, absent)


def test_the_text_of_a_fault_is_read_whole() -> None:
    assert parse_fault("kill:1.1@10") == Fault("kill", Worker(1, 1), 10)
    assert parse_fault("kill=0.05:0.1@3.reduce") == Fault("kill", Worker(0, 1), 3, "reduce", 0.05)
    assert parse_fault("nan:1.1@4") == Fault("nan", Worker(1, 1), 4)
    assert parse_fault("slow=1.5:1.1@4-8") == Fault("slow", Worker(1, 1), 4, argument=1.5, last=8)
    assert parse_fault("cut=0.1:1.1@4.reduce") == Fault("cut", Worker(1, 1), 4, "reduce", other=Worker(0, 1))
    assert parse_fault("flip=gradient:1.1@4") == Fault("flip", Worker(1, 1), 4, target="gradient")
    assert parse_fault("flip=gradient,3:1.1t1@4") == Fault(
        "flip", Worker(1, 1), 4, argument=3, target="gradient", tensor_rank=1
    )
    assert parse_fault("slow-link=4:1.0,0.1@4-8") == Fault(
        "slow-link", Worker(1, 0), 4, argument=4.0, last=8, other=Worker(0, 1)
    )
    assert parse_fault("rejoin:1.1@20") == Fault("rejoin", Worker(1, 1), 20)


@pytest.mark.parametrize(
    "text",
    [
        "kill:1.1@10",
        "kill=0.05:0.1@3.reduce",
        "kill:0.1@3.undo",
        "flip=gradient,63:1.1@5",
        *(f"flip={target}:1.1@5" for target in FLIPPED),
        *(kind.example for kind in KINDS.values()),
    ],
)
def test_a_fault_prints_as_the_text_that_it_is_read_from(text: str) -> None:
    assert str(parse_fault(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill", "expected KIND"),
        ("kill:1.1", "expected KIND"),
        ("kill:1@3", "expected KIND"),
        pytest.param("kill:1.1@" + "9" * 5000, "expected KIND", id="thousands of digits"),
        ("melt:1.1@3", "unknown kind 'melt'; known are rejoin, nan, "),
        ("kill:1.1@3.lunch", "unknown phase 'lunch'"),
        ("rejoin:1.1@3.forward", "unknown phase 'forward'; rejoin takes none"),
        ("nan:1.1@3.forward", "unknown phase"),
        ("kill:1.1@3-5", "not in a range"),
        ("stop:1.1@3-5", "not in a range"),
        ("stop=2:1.1@3", "stop takes no argument"),
        ("exception:1.1@3.undo", "unknown phase 'undo'; exception takes one of forward, backward"),
        ("slow:1.1@3-5", "slow takes a factor, 1 to 1000, after a '='"),
        ("slow=0.5:1.1@3-5", "slow takes a factor"),
        ("slow=3:1.1@5-3", "the range ends before it begins"),
        ("slow=3:1.1@3.forward", "slow takes none"),
        ("kill=soon:1.1@3", "a delay in seconds"),
        ("kill=-1:1.1@3", "a delay in seconds"),
        ("kill=nan:1.1@3", "a delay in seconds"),
        ("rejoin=2:1.1@3", "rejoin takes no argument"),
        ("cut:1.1@3", "cut takes another worker after a '='"),
        ("cut=1.1:1.1@3", "cut takes another worker"),
        ("cut=0.5e1:1.1@3", "cut takes another worker"),
        ("cut=0.1:1.1@3.form", "cut takes one of forward"),
        ("flip:1.1@3", f"flip takes one of {', '.join(FLIPPED)} after a '=', for example flip=gradient:1.1@5"),
        ("flip=3:1.1@3", "flip takes one of weight"),
        ("flip=gradient,64:1.1@3", "flip takes the number of a bit, 0 to 63, after a ',' behind its target"),
        ("flip=gradient,:1.1@3", "flip takes the number of a bit"),
        ("flip=gradient:1.1@3-5", "not in a range"),
        ("slow-link=4:1.1@3-5", "slow-link takes two workers with a ',' between, for example slow-link=4:1.0,1.1@5-20"),
        ("slow-link=4:1.1,1.1@3-5", "slow-link takes two workers"),
        ("slow-link=4:1.1t1,1.0@3-5", "slow-link is of a worker as a whole; leave out t1"),
        ("slow-link:1.0,1.1@3-5", "slow-link takes a factor, 1 to 1000, after a '='"),
        ("flaky-link=2:1.0,1.1@3", "flaky-link takes a probability, 0 to 1, after a '='"),
        ("kill:1.0,1.1@3", "kill strikes one worker; leave out ,1.1"),
    ],
)
def test_a_fault_that_cannot_be_read_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        parse_fault(text)


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (["kill:3.0@1"], "worker 3.0 is outside the grid of 3 pipelines"),
        (["kill:0.2@1"], "outside the grid"),
        (["kill:1.1@10"], "the run ends after step 9"),
        (["slow=2:1.1@4-10"], "the run ends after step 9"),
        (["kill:1.1@2", "slow=2:1.1@4-6"], "worker 1.1 is already dead at step 4"),
        (["rejoin:1.1@4"], "worker 1.1 is alive at step 4"),
        (["kill:1.1@2", "kill:1.1@4"], "worker 1.1 is already dead at step 4"),
        (["kill:1.1@2", "nan:1.1@4"], "worker 1.1 is already dead at step 4"),
        (["stop:1.1@2", "kill:1.1@2"], "worker 1.1 is already dead at step 2"),
        (["kill:1.1@2", "rejoin:1.1@2"], "worker 1.1 is alive at step 2"),
        (["cut=0.2:1.1@2"], "outside the grid"),
        (["cut=0.0:1.1@2"], "whether workers 1.1 and 0.0 send each other anything depends on the plan"),
        (["slow-link=2:1.1,0.2@2-4"], "outside the grid"),
        (
            ["slow-link=2:1.1,0.1@2-4"],
            "workers 1.1 and 0.1 send each other no messages; take two of neighbouring ranks",
        ),
        (["kill:0.1@2", "flaky-link=0.5:1.0,0.1@3-4"], "worker 0.1 is already dead at step 3"),
        (["kill:0.1@2", "cut=0.1:1.1@3"], "worker 0.1 is already dead at step 3"),
        (["cut=0.1:1.1@2", "kill:1.1@3"], "worker 1.1 is already dead at step 3"),
        (["flip=gradient:1.1@2", "kill:1.1@3"], "worker 1.1 is already dead at step 3"),
        (["flip=weight:1.1@2", "rejoin:1.1@3"], "worker 1.1 is alive at step 3"),
        (["kill:0.1@1", "flip=gradient:1.1@2", "rejoin:1.1@3"], "worker 1.1 is alive at step 3"),
    ],
)
def test_a_fault_that_can_never_strike_is_refused(faults: list[str], says: str) -> None:
    with pytest.raises(JobError, match=says):
        check(*faults)


def test_whoever_is_struck_in_memory_may_be_dead_or_alive_where_states_are_compared() -> None:
    """It depends on when that is; of a flip elsewhere it is known."""
    compared = job(3, 2, 2, integrity={"digests": 1})
    for text in ("flip=weight:1.1@2", "flip=moment:1.1@2"):
        for then in ("rejoin:1.1@6", "kill:1.1@6"):
            check(text, then, of=compared)
    with pytest.raises(JobError, match=r"worker 1\.1 is alive at step 6"):
        check("flip=kernel:1.1@2", "rejoin:1.1@6", of=compared)


def test_of_two_holders_of_a_shard_none_is_fenced_for_its_gradient() -> None:
    of_two, of_three = (
        job(3, 2, 2, train={"sharded_optimizer": True, "optimizer_copies": copies}) for copies in (2, 3)
    )
    check("flip=gradient:1.1@2", "kill:1.1@6", of=of_two)
    with pytest.raises(JobError, match="already dead"):
        check("flip=gradient:1.1@2", "kill:1.1@6", of=of_three)


def test_of_a_cut_pair_the_one_goes_whose_stage_has_more_hosts_and_never_a_last_host() -> None:
    check("kill:1.0@1", "cut=0.1:0.0@2", "rejoin:0.1@3")
    check("cut=0.0:1.2@2", "kill:0.0@3", "kill:1.2@4", of=job(3, 3, 2))  # nobody goes
    with pytest.raises(JobError, match="neither may go"):
        check("kill:1.0@1", "kill:1.1@1", "cut=0.1:0.0@2", of=job(2, 2, 2))


SHAPE = JOB.shape


def test_a_seed_gives_the_same_faults_again_and_another_seed_gives_others() -> None:
    assert punish(SHAPE, 200, 5.0, 7) == punish(SHAPE, 200, 5.0, 7)
    assert punish(SHAPE, 200, 5.0, 7) != punish(SHAPE, 200, 5.0, 8)


@pytest.mark.parametrize("mean", [1.0, 4.0, 25.0])
def test_the_mean_is_that_of_the_iterations_between_two_faults(mean: float) -> None:
    faults = punish(SHAPE, 20_000, mean, 1)
    assert 19_999 / len(faults) == pytest.approx(mean, rel=0.1)
    assert {fault.kind for fault in faults} == {"kill", "rejoin"}
    assert {fault.worker for fault in faults} == set(SHAPE.workers())


@pytest.mark.parametrize("seed", range(20))
def test_every_fault_can_strike_and_no_stage_ever_loses_its_last_host(seed: int) -> None:
    absent = frozenset({Worker(1, 1)})
    faults = punish(SHAPE, 300, 1.5, seed, absent)
    check_faults(faults, JOB, 300, absent)
    dead = set(absent)
    for fault in faults:
        dead ^= {fault.worker}
        assert all(sum(worker.rank == rank for worker in dead) < 3 for rank in range(2))


@pytest.mark.parametrize("seed", range(5))
def test_kinds_are_drawn_as_often_as_they_are_given_and_each_can_strike(seed: int) -> None:
    faults = punish(SHAPE, 2000, 2.0, seed, kinds=["kill", "kill", "kill", "stop", "cut"])
    check_faults(faults, JOB, 2000)
    counts = {kind: sum(fault.kind == kind for fault in faults) for kind in ("kill", "stop", "cut")}
    assert counts["kill"] > 2 * counts["stop"] > 0
    assert counts["cut"] > 0


def test_one_pipeline_cannot_be_punished() -> None:
    with pytest.raises(JobError, match="none may die"):
        punish(Shape(1, 4, 8), 10, 2.0, 0)


@pytest.mark.parametrize("text", ["", "often", "0", "0.5", "nan", "inf", "20,", "20,x", "20,1.5", "20,1,2", "1e300"])
def test_a_punishment_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="expected MEAN_STEPS"):
        parse_punishment(text)


STRUCK_SHAPE = Shape(pipelines=3, ranks=2, micro_batches=2)


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
    program = lower(one_f_one_b(STRUCK_SHAPE)).program(Worker(1, 0))
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


def test_a_nan_spoils_the_gradients_right_before_the_reduce_and_once_per_run() -> None:
    program = lower(one_f_one_b(STRUCK_SHAPE)).program(Worker(1, 0))
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
    program = lower(one_f_one_b(STRUCK_SHAPE)).program(Worker(1, 0))
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
