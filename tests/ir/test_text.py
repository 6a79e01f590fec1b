"""Whole programs as text and back: the fast way and the one instruction at a time agree, and errors have a place.

Instructions: the text is the identity, and reads back; what is no instruction is refused with a reason.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Schedule, ScheduleError, Shape, Worker, lower
from recycle.ir import native
from recycle.ir.columns import columns_of
from recycle.ir.instruction import (
    KIND_CLASSES,
    OverlappedPair,
    parse_instruction,
)
from recycle.ir.native import parse, render
from tests.ir.random_schedules import random_schedule

bounded = settings(derandomize=True, max_examples=60, deadline=None, database=None)
randoms = st.randoms(use_true_random=False)


@bounded
@given(randoms)
def test_render_writes_what_each_instruction_prints(rng: random.Random) -> None:
    schedule = lower(random_schedule(rng))
    programs = render(schedule.shape, schedule.columns)
    assert list(programs) == [" ".join(map(str, schedule.program(worker))) for worker in schedule.shape.workers()]


@bounded
@given(randoms)
def test_the_fast_parser_reads_what_the_instruction_parser_reads(rng: random.Random) -> None:
    schedule = lower(random_schedule(rng))
    shape, texts = schedule.shape, list(render(schedule.shape, schedule.columns))
    one_by_one = columns_of(
        shape, {w: map(parse_instruction, t.split()) for w, t in zip(shape.workers(), texts, strict=True)}
    )
    fast = native._parse_canonical(shape, texts)
    assert fast is not None
    assert fast == one_by_one
    assert fast == schedule.columns


@pytest.mark.parametrize("program", ["0F0.0  0B0.0", " 0F0.0 0B0.0", "0F0.0 0B0.0 ", "0F0.0\t0B0.0", "0F0\n0B0"])
def test_other_white_space_and_a_missing_pipeline_are_read_too(program: str) -> None:
    assert Schedule.from_text(Shape(1, 1, 1), {"0.0": program}).text() == {"0.0": "0F0.0 0B0.0"}


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("0F0.0 0X0.0", r"worker 0\.1, position 1: '0X0\.0' is not an instruction"),
        ("0F0.0 0SEND_F0.0", r"worker 0\.1, position 1: .* the other worker is missing"),
        ("0F0.0 0F0.0000000001", r"worker 0\.1, position 1: .* more than 9 digits"),
        ("0SEND_F0.0@0.2", r"worker 0\.1: 0SEND_F0\.0@0\.2: worker 0\.2 is outside the grid"),
        ("0SEND_F0.0@1.0", r"worker 0\.1: 0SEND_F0\.0@1\.0: worker 1\.0 is outside the grid"),
        ("(0F0.0;0F0.1)", r"worker 0\.1, position 0: .* an overlapped pair is one F and one B"),
        ("0STEP0.0", r"worker 0\.1, position 0: .* takes no micro-batch"),
        ("0F-1.0", r"worker 0\.1, position 0"),
        ("0F٣.0", r"worker 0\.1, position 0"),
    ],
)
def test_an_error_names_worker_and_position(program: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse(Shape(1, 2, 1), {Worker(0, 0): "0F0.0", Worker(0, 1): program})


TEXTS = (
    "2F1.5", "2B1.5", "2I1.5", "2W1.5", "(2F1.5;2B1.3)", "2SEND_F1.5@0.3", "3RECV_F1.5@1.2", "3SEND_B1.5@1.2",
    "2RECV_B1.5@0.3", "2REDUCE_GRAD", "2STEP", "2R1.5", "2REPLAY1.5", "2W_PART1.5/0",
    "2REDUCE_BUCKET/63", "2GATHER_PARAMS", "2WAIT_SEND_F1.5", "2WAIT_SEND_B1.5",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_repr_read_back(text: str) -> None:
    instruction = parse_instruction(text)
    assert str(instruction) == repr(instruction) == text
    assert parse_instruction(str(instruction)) == instruction


def test_the_texts_above_cover_every_kind_and_the_table_is_indexed_by_kind() -> None:
    assert {parse_instruction(text).kind for text in TEXTS} == set(range(len(KIND_CLASSES)))
    assert [cls.kind for cls in KIND_CLASSES] == list(range(len(KIND_CLASSES)))


def test_a_pair_is_one_F_and_one_B_in_either_order() -> None:
    pair = parse_instruction("(2B1.3;2F1.5)")
    assert isinstance(pair, OverlappedPair)
    assert str(pair) == "(2F1.5;2B1.3)"
    for text in ("(2F1.5;2F1.3)", "(2F1.5;2I1.3)", "(2F1.5;2STEP)", "(2F1.5;(2F1.5;2B1.3))", "(2F1.5)"):
        with pytest.raises(ScheduleError):
            parse_instruction(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1F0.0junk", "is not an instruction"), ("0f0.0", "is not an instruction"), ("-1F0.0", "is not an instruction"),
        ("0BW0.0", "is not an instruction"), ("", "is not an instruction"), ("٣F0.0", "is not an instruction"),
        ("0F", "the micro-batch is missing"), ("0SEND_F0.0", "the other worker is missing"),
        ("0REDUCE_GRAD0.1", "takes no micro-batch"), ("0STEP@0.1", "takes no micro-batch"),
        ("0F0.0@0.1", "is local and takes no @worker"), ("0F0.99999999999", "more than 9 digits"),
        ("9" * 5000 + "F0.0", "more than 9 digits"),
    ],
)  # fmt: skip
def test_what_is_no_instruction_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        parse_instruction(text)
