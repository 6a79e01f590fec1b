"""Instructions: the text is the identity, and reads back; what is no instruction is refused with a reason."""

import pytest

from recycle import MicroBatch, ScheduleError, Worker
from recycle.ir.instruction import (
    KIND_CLASSES,
    Backward,
    Forward,
    OptimizerStep,
    OverlappedPair,
    RecvActivation,
    parse_instruction,
)

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


def test_identity_is_the_whole_value() -> None:
    assert Forward(2, MicroBatch(1, 5)) == parse_instruction("2F1.5") != Backward(2, MicroBatch(1, 5))
    assert RecvActivation(3, MicroBatch(1, 5), Worker(1, 2)) == parse_instruction("3RECV_F1.5@1.2")
    assert parse_instruction("2STEP") == OptimizerStep(2)
    assert len({parse_instruction(text) for text in TEXTS}) == len(TEXTS)


def test_the_pipeline_may_be_left_out_where_there_is_one() -> None:
    assert parse_instruction("2F5", one_pipeline=True) == parse_instruction("2F0.5")
    assert parse_instruction("(2F5;2B3)", one_pipeline=True) == parse_instruction("(2F0.5;2B0.3)")
    with pytest.raises(ScheduleError, match="the pipeline of the micro-batch is missing"):
        parse_instruction("2F5")


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
