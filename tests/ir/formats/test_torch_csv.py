"""The torch CSV: it reads back, and what is not an action or cannot be held is refused by place and name."""

import logging
from dataclasses import replace

import pytest

from recycle import Schedule, ScheduleError, Shape, Worker, check, lower, simulate
from recycle.ir import formats
from recycle.ir.families import gpipe, one_f_one_b
from recycle.ir.formats import megatron_table, torch_csv
from recycle.ir.instruction import StageWide, Transfer
from recycle.ir.lower import add_transfers
from tests import CASES

SPLIT = "0F0,0F1,0I0,0W0,0I1,0W1\r\n1F0,1I0,1F1,1I1,1W0,1W1\r\n"
V_SHAPED = "0F0,0F1,3F0,3I0,3F1,3I1,3W0,0I0,3W1,0W0,0B1\r\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\r\n"
OVERLAPPED = "0F0,0F1,3F0,3B0,(3F1;0B0)OVERLAP_F_B,3B1,0B1\r\n1F0,2F0,1F1,(2F1;2B0)OVERLAP_F_B,1B0,2I1,1B1,2W1\r\n"
ARBITRARY = "2F0,2B0,3F0,3B0\r\n0F0,1F0,1B0,0B0\r\n"


def read(*rows: str) -> Schedule:
    return torch_csv.loads("\r\n".join(rows) + "\r\n", "plan.csv")


@pytest.mark.parametrize("text", [SPLIT, V_SHAPED, OVERLAPPED, "0F0,0B0\r\n"])
def test_a_file_is_written_as_it_was_read_and_lowered_comes_back_too(text):
    schedule = torch_csv.loads(text)
    assert check(schedule) == []
    assert torch_csv.dumps(schedule) == text
    for fuller in (lower(schedule), add_transfers(schedule)[0]):
        assert torch_csv.loads(torch_csv.dumps(fuller)) == fuller


def test_the_golden_v_shaped_file_is_read_and_written_byte_for_byte(tmp_path):
    golden = CASES / "v_shaped_lowered.csv"
    schedule = formats.read(golden)
    assert schedule == lower(torch_csv.loads(V_SHAPED))
    assert check(schedule, about_to_run=True) == []
    formats.write(schedule, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == golden.read_bytes()
    assert simulate(schedule).makespan == simulate(torch_csv.loads(V_SHAPED)).makespan == 15


# What the rows imply


def test_shape_placement_and_peers_follow_from_the_rows():
    schedule = torch_csv.loads(V_SHAPED)
    assert (schedule.shape, schedule.placement) == (Shape(1, 2, 2, 2), ((0, 3), (1, 2)))
    arbitrary = torch_csv.loads(ARBITRARY)
    assert (arbitrary.shape, arbitrary.placement) == (Shape(1, 2, 1, 2), ((2, 3), (0, 1)))
    assert [str(action) for action in lower(arbitrary).program(Worker(0, 1)) if isinstance(action, Transfer)] == [
        "1SEND_F0.0@0.0", "1RECV_B0.0@0.0"]  # fmt: skip
    middle = "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0"
    three = read("0F0,0SEND_F0,0RECV_B0,0B0", middle, "2RECV_F0,2F0,2B0,2SEND_B0")
    assert [str(action.peer) for action in three.program(Worker(0, 1)) if isinstance(action, Transfer)] == [
        "0.0", "0.2", "0.2", "0.0"]  # fmt: skip
    assert check(three) == []


def test_reduces_imply_the_steps_that_torch_leaves_to_its_caller():
    schedule = read("0F0,0B0,0REDUCE_GRAD,1F0,1B0,1REDUCE_GRAD")
    assert [str(action) for action in schedule.program(Worker(0, 0)) if isinstance(action, StageWide)] == [
        "0REDUCE_GRAD", "1REDUCE_GRAD", "1STEP", "0STEP"]  # fmt: skip
    assert not any(isinstance(action, StageWide) for action in read("0F0,0B0").program(Worker(0, 0)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the file is empty"),
        ("0B0\r\n", "no forward in any row"),
        ("0F0,1F0\r\n2F0\r\n", r"3 stage\(s\) on 2 rows: every rank needs the same number of stages"),
        ('0F0,"0B0\r\n', "line 1: unexpected end of data"),
        (b"0F0,\xff", "not UTF-8 text .* at byte 4"),
        ("0F0,,0SEND_F0\r\n", r"row 1 \(rank 0\), cell 2: is empty, .* this file has 0SEND_F0 in row 1"),
    ],
)
def test_a_file_that_implies_no_schedule_is_refused(text, complaint):
    with pytest.raises(ScheduleError, match=rf"plan\.csv: {complaint}"):
        torch_csv.loads(text, "plan.csv")


# Cells that torch's loader takes, or dies of


@pytest.mark.parametrize(
    ("cell", "complaint"),
    [
        ("1F0junk", "is not an action"),
        ("0BW", "the micro-batch is missing, write for example 0BW0"),
        ("(0F1;0I0)OVERLAP_F_B", "expected one F and one B"),
        ("0F\N{ARABIC-INDIC DIGIT ONE}", "is not an action"),
    ],
)
def test_a_cell_that_is_not_an_action_is_refused_at_its_place(cell, complaint):
    with pytest.raises(ScheduleError, match=complaint) as error:
        read("0F0,0B0", f"1F0, {cell},1B0")
    assert str(error.value).startswith("plan.csv: row 2 (rank 1), cell 2: '")
    assert cell[:40] in str(error.value)
    assert "\n" not in str(error.value)


def test_leading_zeros_and_blank_last_lines_are_read_with_a_warning(caplog):
    caplog.set_level(logging.WARNING)
    schedule = read("0F0,00F01,0B0,0B1", "01F0,1F1,1B0,1B1", "", "")
    assert torch_csv.dumps(schedule) == "0F0,0F1,0B0,0B1\r\n1F0,1F1,1B0,1B1\r\n"
    ignored, zeros = caplog.messages
    assert "2 blank line(s)" in ignored
    assert "row 1 (rank 0), cell 2: '00F01'" in zeros
    caplog.clear()
    assert str(read("10F0,10B0").program(Worker(0, 0))[0]) == "10F0.0"
    assert not caplog.messages


# What a file cannot hold


def native(programs: dict[str, str], shape: Shape, **arguments) -> Schedule:
    return Schedule.from_text(shape, programs, **arguments)


ONE_RANK = Shape(1, 1, 1)
TWO_RANKS = {"0.0": "0F0 0B0", "0.1": "1F0 1B0"}


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        (Schedule.load(CASES / "adaptive_without_1.2.json"),
         r"cannot hold [0-9]\S* on worker \S+ .*: it runs a re-routed micro-batch of another pipeline"),
        (one_f_one_b(Shape(2, 2, 2)), "cannot hold 2 pipelines"),
        (native({"0.0": "0F0 0B0"}, Shape(1, 2, 1), failed=["0.1"]), r"cannot hold failed workers \(0\.1\)"),
        (native(TWO_RANKS, Shape(1, 2, 1), ties=[[0, 1]]), r"cannot hold ties \(stages \(0, 1\)"),
        (native(TWO_RANKS, Shape(1, 2, 1), placement={"0.0": [0, 1]}), "rows would be read as .* with the stages 0; 1"),
        (native({"0.0": "0F0 0B0 0STEP"}, ONE_RANK), r"cannot hold 0STEP on worker 0\.0 \(position 2\)"),
        (native({"0.0": "0F0 0B0 0REDUCE_GRAD"}, ONE_RANK), r"the end on worker 0\.0 \(position 3\): .* 0STEP"),
        (native({"0.0": "0F0 0B0 0REDUCE_GRAD", "0.1": "1F0 1B0 1REDUCE_GRAD"}, Shape(1, 2, 1)),
         "0REDUCE_GRAD without any transfer"),
        (native({"0.0": "0F0 0SEND_F0@0.0 0B0", "0.1": "1F0 1B0"}, Shape(1, 2, 1)),
         r"0SEND_F0\.0@0\.0 on worker 0\.0 \(position 1\): .* 0SEND_F0\.0@0\.1"),
        (native(TWO_RANKS, Shape(1, 2, 2)), r"D=1 P=2 m=2 .* its rows would be read as D=1 P=2 m=1"),
        (lower(replace(one_f_one_b(Shape(1, 2, 2)), buckets=2)), "W_PART"),
    ],
)  # fmt: skip
def test_a_schedule_that_a_file_cannot_hold_is_refused_and_nothing_is_written(schedule, complaint, tmp_path):
    with pytest.raises(ScheduleError, match=complaint):
        formats.write(schedule, tmp_path / "plan.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"buckets": 3}, "buckets = 3"),
        ({"forward_only": True}, "forward_only, without which the backwards count as missing"),
        ({"metadata": {"note": 1}}, "metadata (note)"),
    ],
)
@pytest.mark.parametrize("file", [torch_csv, megatron_table])
def test_options_that_are_not_part_of_the_order_are_left_out_with_a_warning(file, options, warning, caplog):
    schedule = replace(one_f_one_b(Shape(1, 2, 4)), **{"metadata": {}, **options})
    written = file.dumps(schedule)
    assert [message.endswith(f"leaves out: {warning}") for message in caplog.messages] == [True]
    assert file.loads(written.encode()).columns == schedule.columns


VALID = {
    "1f1b": one_f_one_b(Shape(1, 4, 8)),
    "gpipe": gpipe(Shape(1, 3, 4)),
    "split": torch_csv.loads(SPLIT),
    "v": torch_csv.loads(V_SHAPED),
    "arbitrary": torch_csv.loads(ARBITRARY.replace("2F0,2B0,3F0,3B0", "2F0,3F0,3B0,2B0")),
    "overlapped": torch_csv.loads(OVERLAPPED),
}


# The notation of before October 2024


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0F0,0F1,0BW0,0BW1", "0F0.0 0F0.1 0B0.0 0B0.1"),
        ("0F0,0F1,0B0,0W0,0BW1", "0F0.0 0F0.1 0I0.0 0W0.0 0B0.1"),
        ("0F0,0F1,0B0,0BW1", "0F0.0 0F0.1 0B0.0 0B0.1"),
    ],
)
def test_bw_is_the_whole_backward_and_b_its_half_where_there_is_a_w(row, expected):
    assert torch_csv.loads(row).text() == {"0.0": expected}
