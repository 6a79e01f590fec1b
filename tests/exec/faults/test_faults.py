"""Faults: what the text means and what is refused."""

from __future__ import annotations

import pytest

from recycle import Job, JobError, Worker
from recycle.exec.faults.faults import Fault, check_faults, parse_fault
from recycle.exec.faults.kinds import FLIPPED, KINDS
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
