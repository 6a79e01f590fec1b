"""Whole programs as text and back: the fast way and the one instruction at a time agree, and errors have a place."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Schedule, Shape, Worker, lower
from recycle.errors import ScheduleError
from recycle.ir import native
from recycle.ir.columns import columns_of
from recycle.ir.instruction import parse_instruction
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


@pytest.mark.parametrize(
    "program",
    ["", "0STEP", "0F0.0", "0F0.0 0STEP", "(0F0.1;0B0.0)", "0STEP (0F0.1;0B0.0) 0RECV_B0.1@1.1", "007F0.00"],
)
def test_programs_at_the_edges_are_read_in_one_go(program: str) -> None:
    shape = Shape(2, 2, 2)
    columns = native._parse_canonical(shape, ["", program, "", program])
    assert columns is not None
    wanted = [parse_instruction(word) for word in program.split()]
    assert columns == columns_of(shape, {Worker(0, 1): wanted, Worker(1, 1): wanted})


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
