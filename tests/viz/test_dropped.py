"""A dropped file is read as far as it can be, and refused in one line when it is none, too large or lies."""

from __future__ import annotations

import base64
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import RecycleError, Schedule, Shape
from recycle.ir.families import one_f_one_b
from tests.hostile import any_bytes, mutated
from viz.dropped import MOST_BYTES, inspect, printable, read_dropped
from viz.lanes import Flag


def contents(content: bytes) -> str:
    return "data:application/json;base64," + base64.b64encode(content).decode()


def test_a_native_file_is_read_checked_and_timed(broken: Schedule) -> None:
    found = read_dropped(contents(broken.dumps().encode()), "plan.json")
    assert (found.name, found.problem, found.findings) == ("plan.json", "", [])
    assert found.schedule == broken
    assert found.timeline.makespan == 11.0


def test_a_finding_lies_where_its_instruction_is_drawn(broken: Schedule) -> None:
    text = broken.text()
    text["0.0"] = "0F0.0 0F0.1 0B0.1 0B0.0 0B0.0"
    wrong = Schedule.from_text(broken.shape, text, failed=["1.1"])
    found = inspect(wrong.dumps().encode(), "wrong.json")
    (duplicate,) = [finding for finding in found.findings if finding.rule == "duplicate"]
    (lane, start, end), (other_lane, other_start, _) = found.places(duplicate)
    assert (lane, other_lane) == (0, 0)
    assert other_start < start
    marked = [
        (float(found.lanes.start[i]), float(found.lanes.end[i]))
        for i in range(len(found.lanes))
        if found.lanes.flags[i] & Flag.VIOLATION
    ]
    assert (start, end) in marked


def test_what_cannot_be_read_of_a_file_is_left_out_and_the_rest_is_drawn() -> None:
    text = one_f_one_b(Shape(1, 2, 2)).dumps().replace("0F0.1", "0F0.1 0Q0.1").replace('"0.1"', '"0.9": "", "0.1"')
    found = inspect(text.encode(), "mine.json")
    assert found.left_out == (
        "worker 0.0, position 2: '0Q0.1' is not an instruction: expected for example 2F1.5, 2SEND_F1.5@0.3 or 2STEP",
        "programs: worker 0.9 is outside the grid of 1 pipelines (0 to 0) by 2 ranks (0 to 1)",
    )
    assert found.findings == []
    assert found.timeline.makespan == 9.0


def test_all_of_a_circle_of_waits_has_its_places() -> None:
    wrong = Schedule.from_text(Shape(1, 2, 2), {"0.0": "0F0.0 0B0.0 0F0.1 0B0.1", "0.1": "1F0.0 1F0.1 1B0.0 1B0.1"})
    found = inspect(wrong.dumps().encode(), "wrong.json")
    (circle,) = [finding for finding in found.findings if finding.rule == "deadlock"]
    drawn = {
        (int(found.lanes.lane[i]), float(found.lanes.start[i])): str(found.lanes.instruction(i))
        for i in range(len(found.lanes))
    }
    named = [drawn[lane, start] for lane, start, _ in found.places(circle)]
    assert named == [circle.instruction, *(other.instruction for other in circle.others)]
    assert sorted(named) == ["0B0.0", "0F0.1", "1B0.0", "1F0.1"]


@pytest.mark.parametrize(
    ("given_contents", "message"),
    [
        (contents(b'{"format": "recycle-sch'), "not valid JSON, perhaps truncated"),
        (contents(b"\x00\x01\x02"), "plan.json"),
        ("data:text/plain;base64,@@@", "sent only a part of the file"),
        ("javascript:alert(1)", "the browser sent no file"),
        ("data:text/plain;base64," + "A" * (MOST_BYTES * 4 // 3 + 8), "too large for the page"),
    ],
)
def test_what_is_no_schedule_is_refused_in_a_line(given_contents: str, message: str) -> None:
    with pytest.raises(RecycleError) as refused:
        read_dropped(given_contents, "plan.json")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_billion_lanes_are_refused() -> None:
    head = {"format": "recycle-schedule", "version": 1, "programs": {}}
    for shape, message in (
        ({"pipelines": 10**9, "ranks": 1, "micro_batches": 1}, "too large"),
        ({"pipelines": 2**20, "ranks": 1, "micro_batches": 16}, "is too large for the page"),
        ({"pipelines": 1, "ranks": 1, "micro_batches": 2**24}, "is too large for the page"),
    ):
        tracemalloc.start()
        with pytest.raises(RecycleError, match=message):
            read_dropped(contents(json.dumps({**head, "shape": shape}).encode()), "plan.json")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2e6, peak


@pytest.mark.parametrize("piece", [b",", b" ", b"\n", b"0F0\n", b"0F0\r"])
def test_a_file_of_separators_is_refused_before_it_is_read(piece: bytes) -> None:
    given_contents = contents(piece * ((MOST_BYTES - 10) // len(piece)))
    tracemalloc.start()
    with pytest.raises(RecycleError, match="more cells, words or lines"):
        read_dropped(given_contents, "plan.csv")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MOST_BYTES


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\plans\\mine.json", "mine.json"),
        ("<script>alert(1)<%2fscript>.json", "<script>alert(1)<%2fscript>.json"),
        ("a\nb\x1b[2J.json", "a b\\x1b[2J.json"),
        ("", "file"),
        ("a" * 5000 + ".json", "a" * 108 + "…aaaaaa.json"),
    ],
)
def test_a_name_is_a_line_of_text(name: str, shown: str) -> None:
    assert printable(name) == shown


SEEDS = [one_f_one_b(Shape(1, 2, 2)).dumps().encode(), b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"]


@settings(derandomize=True, max_examples=120, deadline=None, database=None)
@given(st.one_of(mutated(SEEDS), any_bytes()), st.sampled_from(["a.json", "a.csv", "a", "a.trace.json"]))
def test_whatever_is_dropped_gives_an_answer(content: bytes, name: str) -> None:
    try:
        found = read_dropped(contents(content), name)
    except RecycleError:
        return
    for finding in found.findings:
        assert all(start <= end for _, start, end in found.places(finding))
