"""Schedules and their text: programs read back, and invalid programs, options and words are refused by place."""

import pytest
from hypothesis import given, settings, strategies as st

from recycle import MicroBatch, Schedule, ScheduleError, Shape, Worker, lower
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import (
    KIND_CLASSES,
    Forward,
    SendActivation,
    parse_instruction,
)
from recycle.ir.schedule import loop_placement
from tests.ir.random_schedules import random_schedule


def test_chunks_go_around_the_ranks_unless_placed():
    assert loop_placement(Shape(2, 2, 1, chunks=2)) == ((0, 2), (1, 3), (0, 2), (1, 3))
    schedule = Schedule.from_text(Shape(2, 2, 1, chunks=2), {}, placement={"0.1": [1, 2, 3]}, failed=["1.0"])
    assert schedule.hosts(2) == [Worker(0, 0), Worker(0, 1)]
    assert schedule.live == [Worker(0, 0), Worker(0, 1), Worker(1, 1)]
    assert schedule.failure_vector() == (1, 0)


def test_equality_is_the_order_not_the_metadata():
    schedule = one_f_one_b(Shape(1, 2, 2))
    assert schedule.with_metadata(note="x") == schedule
    assert schedule != one_f_one_b(Shape(1, 2, 2), "barrier")
    assert schedule != lower(schedule)
    assert schedule != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(schedule)


WORKER, F = Worker(0, 0), Forward(0, MicroBatch(0, 0))


@pytest.mark.parametrize(
    ("programs", "options", "message"),
    [
        ({"x": []}, {}, "'x' is not a worker"),
        ({"0.5": []}, {}, r"programs: worker 0\.5 is outside the grid"),
        ({"0.0": [], "00.0": []}, {}, r"programs: worker 0\.0 is listed twice"),
        ({"0.0": ["0F0.0"]}, {}, r"worker 0\.0, position 0: '0F0\.0' is not an instruction; .*from_text takes"),
        ({"0.0": [F, Forward(0, 0)]}, {}, r"position 1: Forward\(stage=0, micro_batch=0\) is not an instruction"),
        ({WORKER: [Forward(2**40, MicroBatch(0, 0))]}, {}, "beyond 32 bits"),
        ({WORKER: [SendActivation(0, MicroBatch(0, 0), Worker(0, 9))]}, {}, r"worker 0\.9 is outside the grid"),
        ({"0.0": 5}, {}, r"programs: worker 0\.0: 5 is not a list of instructions"),
        (None, {}, r"programs: None is not a mapping from workers: write \{'0\.0': \.\.\.\}"),
        ({}, {"placement": {"0.0": [5]}}, r"placement: worker 0\.0: 5 is not a stage \(0 to 1\)"),
        ({}, {"placement": {"0.0": [0.5]}}, r"placement: worker 0\.0: 0\.5 is not a stage"),
        ({}, {"placement": {"0.0": 0}}, r"placement: worker 0\.0: 0 is not a list of stages: write \[0\]"),
        ({}, {"placement": {"0.0": [1, 1]}}, r"placement: worker 0\.0 hosts a stage twice"),
        ({}, {"placement": ((0,),)}, "placement: lists 1 workers, the shape has 2"),
        ({}, {"placement": 3}, "placement: 3 is not a mapping from workers"),
        ({}, {"ties": 3}, r"ties: 3 is not a list of groups of stages: write for example \[\[0, 3\]\]"),
        ({}, {"failed": ["7.0"]}, r"failed workers: worker 7\.0 is outside"),
        ({}, {"failed": "0.0"}, r"failed workers: '0\.0' is not a list of workers: write for example \['0\.1'\]"),
        ({}, {"optimizer": "never"}, "must be 'staggered' or 'barrier'"),
        ({}, {"buckets": 0}, "buckets must be a whole number"),
        ({}, {"gathers": 1}, "gathers must be true or false"),
        ({}, {"metadata": [1]}, r"metadata: \[1\] is not a mapping"),
    ],
)
def test_invalid_programs_and_options_are_refused_by_name(programs, options, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.build(Shape(1, 2, 1), programs, **options)


bounded = settings(max_examples=60)
randoms = st.randoms(use_true_random=False)


@bounded
@given(randoms)
def test_programs_are_written_as_instructions_print_and_both_parsers_read_them(rng):
    schedule = lower(random_schedule(rng))
    texts = schedule.text()
    for worker in schedule.live:
        assert texts[str(worker)] == " ".join(map(str, schedule.program(worker)))
    # Single blanks are parsed in one pass, other white space one instruction at a time.
    spaced = {worker: text.replace(" ", "  ") for worker, text in texts.items()}
    assert Schedule.from_text(schedule.shape, texts).columns == schedule.columns
    assert Schedule.from_text(schedule.shape, spaced).columns == schedule.columns


@pytest.mark.parametrize("program", [" 0F0.0 0B0.0", "0F0.0 0B0.0 ", "0F0.0\t0B0.0", "0F0\n0B0"])
def test_any_white_space_and_a_missing_pipeline_are_read(program):
    assert Schedule.from_text(Shape(1, 1, 1), {"0.0": program}).text() == {"0.0": "0F0.0 0B0.0"}


TEXTS = (
    "2F1.5", "2B1.5", "2I1.5", "2W1.5", "(2F1.5;2B1.3)", "2SEND_F1.5@0.3", "3RECV_F1.5@1.2", "3SEND_B1.5@1.2",
    "2RECV_B1.5@0.3", "2REDUCE_GRAD", "2STEP", "2R1.5", "2REPLAY1.5", "2W_PART1.5/0",
    "2REDUCE_BUCKET/63", "2GATHER_PARAMS", "2WAIT_SEND_F1.5", "2WAIT_SEND_B1.5",
    "2OFFLOAD1.5", "2RELOAD1.5",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_repr_read_back(text):
    instruction = parse_instruction(text)
    assert str(instruction) == repr(instruction) == text
    assert parse_instruction(str(instruction)) == instruction


def test_the_texts_above_cover_every_kind_and_the_table_is_indexed_by_kind():
    assert {parse_instruction(text).kind for text in TEXTS} == set(range(len(KIND_CLASSES)))
    assert [cls.kind for cls in KIND_CLASSES] == list(range(len(KIND_CLASSES)))


def test_a_pair_may_name_its_backward_first():
    assert str(parse_instruction("(2B1.3;2F1.5)")) == "(2F1.5;2B1.3)"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        *((text, "is not an instruction") for text in ("1F0.0junk", "0f0.0", "-1F0.0", "0BW0.0", "٣F0.0", "0F٣.0")),
        *((text, "is not an instruction") for text in ("(2F1.5)", "(2F1.5;(2F1.5;2B1.3))")),
        *((text, "is one F and one B") for text in ("(2F1.5;2F1.3)", "(2F1.5;2I1.3)", "(2F1.5;2STEP)")),
        ("0F", "the micro-batch is missing"), ("0F0", "the pipeline of the micro-batch is missing"),
        ("0SEND_F0.0", "the other worker is missing"), ("0W_PART0.0", "the bucket is missing"),
        ("0REDUCE_GRAD0.1", "takes no micro-batch"), ("0STEP@0.1", "takes no micro-batch"),
        ("0F0.0@0.1", "is local and takes no @worker"), ("0F0.0/1", "takes no bucket"),
        ("0F0.99999999999", "more than 9 digits"), ("9" * 5000 + "F0.0", "more than 9 digits"),
    ],
)  # fmt: skip
def test_a_word_that_is_not_an_instruction_is_refused_by_place_and_reason(text, complaint):
    with pytest.raises(ScheduleError, match=rf"worker 0\.1, position 1: .*{complaint}"):
        Schedule.from_text(Shape(2, 2, 1), {"0.1": f"0F0.0 {text}"})
    with pytest.raises(ScheduleError, match=complaint):
        parse_instruction(text)


@pytest.mark.parametrize("peer", ["0.2", "2.0"])
def test_a_peer_outside_the_shape_is_refused(peer):
    with pytest.raises(ScheduleError, match=f"worker 0.1: 0SEND_F0.0@{peer}: worker {peer} is outside the grid"):
        Schedule.from_text(Shape(2, 2, 1), {"0.1": f"0SEND_F0.0@{peer}"})
