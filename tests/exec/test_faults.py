"""Faults: what the text means, what is refused, and where in a program they strike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from recycle import JobError, Shape, Worker
from recycle.exec.faults import Fault, Striker, check_faults, parse_fault
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import lower

SHAPE = Shape(pipelines=3, ranks=2, micro_batches=2)


def test_the_text_of_a_fault_is_read_whole() -> None:
    assert parse_fault("kill:1.1@10") == Fault("kill", Worker(1, 1), 10)
    assert parse_fault("kill=0.05:0.1@3.reduce") == Fault("kill", Worker(0, 1), 3, "reduce", 0.05)
    assert parse_fault("nan:1.1@4") == Fault("nan", Worker(1, 1), 4)
    assert parse_fault("rejoin:1.1@20") == Fault("rejoin", Worker(1, 1), 20)


@pytest.mark.parametrize(
    "text", ["kill:1.1@10", "kill=0.05:0.1@3.reduce", "kill:0.1@3.undo", "nan:0.1@3", "rejoin:2.0@7"]
)
def test_a_fault_prints_as_the_text_that_it_is_read_from(text: str) -> None:
    assert str(parse_fault(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill", "expected KIND"),
        ("kill:1.1", "expected KIND"),
        ("kill:1@3", "expected KIND"),
        ("melt:1.1@3", "unknown kind 'melt'; known are kill, nan, rejoin"),
        ("kill:1.1@3.lunch", "unknown phase 'lunch'"),
        ("rejoin:1.1@3.forward", "unknown phase"),
        ("nan:1.1@3.forward", "unknown phase"),
        ("kill:1.1@3-5", "not in a range"),
        ("kill=soon:1.1@3", "a delay in seconds"),
        ("kill=-1:1.1@3", "a delay in seconds"),
        ("kill=nan:1.1@3", "a delay in seconds"),
        ("rejoin=2:1.1@3", "other kinds take none"),
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
        (["rejoin:1.1@4"], "worker 1.1 is alive at step 4"),
        (["kill:1.1@2", "kill:1.1@4"], "worker 1.1 is already dead at step 4"),
        (["kill:1.1@2", "nan:1.1@4"], "worker 1.1 is already dead at step 4"),
        (["kill:1.1@2", "rejoin:1.1@2"], "worker 1.1 is alive at step 2"),
    ],
)
def test_a_fault_that_can_never_strike_is_refused(faults: list[str], says: str) -> None:
    with pytest.raises(JobError, match=says):
        check_faults([parse_fault(text) for text in faults], SHAPE, steps=10)


def test_a_worker_may_die_come_back_and_die_again() -> None:
    faults = [parse_fault(text) for text in ("kill:1.1@2", "rejoin:1.1@4", "nan:1.1@4", "kill:1.1@4")]
    check_faults(faults, SHAPE, steps=10)


def test_a_worker_that_the_schedule_leaves_out_cannot_be_killed() -> None:
    with pytest.raises(JobError, match="already dead"):
        check_faults([parse_fault("kill:1.1@2")], SHAPE, steps=10, absent=frozenset({Worker(1, 1)}))


def claimed_by(claimed: list[int]) -> Callable[[int], bool]:
    """Grants every claim, and keeps it."""

    def claim(number: int) -> bool:
        claimed.append(number)
        return True

    return claim


def no_poison() -> None:
    raise AssertionError("a kill spoils no gradient")


@pytest.mark.parametrize(
    ("phase", "struck"), [("", "0B1.0"), (".forward", "0F1.1"), (".backward", "0B1.1"), (".reduce", "0REDUCE_GRAD")]
)
def test_a_kill_strikes_in_the_middle_of_its_phase(phase: str, struck: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = lower(one_f_one_b(SHAPE)).program(Worker(1, 0))
    claimed: list[int] = []
    monkeypatch.setattr("recycle.exec.faults.time.sleep", lambda _: None)
    striker = Striker([(7, parse_fault(f"kill:1.0@3{phase}"))], claimed_by(claimed), no_poison)
    at = []
    for step in (2, 3, 3):
        striker.begin(program, step)
        for position, instruction in enumerate(program):
            before = len(claimed)
            striker.at(position)
            if len(claimed) > before:
                at.append((step, str(instruction)))
    assert at[0] == (3, struck)
    assert set(claimed) == {7}


@pytest.mark.parametrize("phase", ["commit", "step", "stepped", "undo"])
def test_a_kill_between_instructions_strikes_once_whatever_iteration_the_worker_is_in_by_then(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lower(one_f_one_b(SHAPE)).program(Worker(1, 0))
    claimed: list[int] = []
    monkeypatch.setattr("recycle.exec.faults.time.sleep", lambda _: None)
    striker = Striker([(7, parse_fault(f"kill:1.0@3.{phase}"))], claimed_by(claimed), no_poison)
    striker.begin(program, 4)
    for position in range(len(program)):
        striker.at(position)
    striker.at_phase(phase, 4)
    assert claimed == []
    striker.at_phase(phase, 3)
    striker.at_phase(phase, 3)
    assert claimed == [7]


def test_a_nan_spoils_the_gradients_right_before_the_reduce_and_once_per_run() -> None:
    program = lower(one_f_one_b(SHAPE)).program(Worker(1, 0))
    granted = [True, False]
    spoiled: list[str] = []
    place = 0
    striker = Striker(
        [(0, parse_fault("nan:1.0@3"))], lambda _: granted.pop(0), lambda: spoiled.append(str(program[place]))
    )
    for _ in range(2):
        striker.begin(program, 3)
        for place in range(len(program)):
            striker.at(place)
    assert spoiled == ["0REDUCE_GRAD"]
    assert granted == []
