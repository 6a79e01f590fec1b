"""The native file: reads back what it writes, is the golden file byte for byte, and refuses what it cannot hold."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Schedule, ScheduleError, Shape, lower
from recycle.ir import formats
from recycle.ir.families import one_f_one_b
from tests.ir.random_schedules import random_schedule

CASES = Path(__file__).parents[2] / "cases"


@settings(derandomize=True, max_examples=40, deadline=None, database=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_a_written_schedule_reads_back_equal(rng: random.Random, lowered: bool) -> None:
    schedule = random_schedule(rng).with_metadata(parent="abc", gap=0.5)
    schedule = lower(schedule) if lowered else schedule
    again = Schedule.loads(schedule.dumps())
    assert again == schedule
    assert dict(again.metadata) == dict(schedule.metadata)


@pytest.mark.parametrize("name", ["1f1b_lowered.json", "adaptive_without_1.2.json"])
def test_the_golden_file_is_read_and_written_byte_for_byte(name: str) -> None:
    text = (CASES / name).read_text()
    assert Schedule.loads(text, name).dumps() == text


def test_the_golden_1f1b_is_what_the_family_builds_today() -> None:
    assert Schedule.load(CASES / "1f1b_lowered.json") == lower(one_f_one_b(Shape(2, 2, 2)))


def document(**changes: object) -> str:
    built = json.loads(one_f_one_b(Shape(1, 2, 2)).dumps())
    built.update(changes)
    return json.dumps({key: value for key, value in built.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not valid JSON, perhaps truncated"),
        (document()[:100], "not valid JSON, perhaps truncated"),
        ("[" * 100_000, "not valid JSON|Expected `object`"),
        ('{"a": ' + "[" * 100_000, "not valid JSON"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", 'is not a schedule: "format" must be "recycle-schedule"'),
        (document(format="chrome"), "is not a schedule"),
        (document(version=2), "version 2 is not known; this recycle reads version 1"),
        (document(version="1"), "version '1' is not known"),
        (document(version=...), "version None is not known"),
        (document(colour="red"), "unknown field `colour`"),
        (document(programs=...), "missing required field `programs`"),
        (document(programs={"0.0": 3}), r"Expected `str`, got `int` - at `\$.programs\[...\]`"),
        (document(programs={"0.0": "0F0 0Q0"}), r"worker 0\.0, position 1: '0Q0' is not an instruction"),
        (document(programs={"5.0": ""}), r"programs: worker 5\.0 is outside the grid"),
        (document(shape={"pipelines": 1, "ranks": 2}), "shape: micro_batches is missing"),
        (document(shape={"pipelines": 1, "ranks": 2, "micro_batches": 2, "depth": 1}), "shape: unknown key 'depth'"),
        (document(shape={"pipelines": 1, "ranks": 0, "micro_batches": 2}), "ranks must be a whole number"),
        (document(shape={"pipelines": 10**9, "ranks": 2, "micro_batches": 2}), "too large"),
        (document(optimizer="none"), "Invalid enum value 'none'"),
        (document(failed=["0.9"]), r"failed workers: worker 0\.9 is outside"),
        (document(placement={"0.0": [7]}), "7 is not a stage"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_by_name_and_place(text: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint) as error:
        Schedule.loads(text, "plan.json")
    assert str(error.value).startswith("plan.json: ")


def test_binary_content_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"plan\.json: "):
        Schedule.loads(b"\x00\xff\xfe", "plan.json")
    with pytest.raises(ScheduleError, match=r"plan\.json: "):
        Schedule.loads(document().encode().replace(b"1f1b", b"\xff\xfe"), "plan.json")


def test_metadata_that_json_cannot_hold_is_refused_and_leaves_the_old_file(tmp_path: Path) -> None:
    schedule, file = one_f_one_b(Shape(1, 2, 2)), tmp_path / "plan.json"
    schedule.save(file)
    before = file.read_bytes()
    for value in (float("inf"), float("nan"), {1, 2}):
        with pytest.raises(ScheduleError, match="metadata: only finite JSON values"):
            schedule.with_metadata(gap=value).save(file)
    assert file.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_format_is_known_by_suffix_then_by_content(tmp_path: Path) -> None:
    schedule = one_f_one_b(Shape(1, 2, 2))
    (tmp_path / "plan").write_text(schedule.dumps())
    (tmp_path / "notes.txt").write_text("nothing")
    assert formats.read(tmp_path / "plan") == schedule
    assert formats.read(tmp_path / "plan", "native") == schedule
    with pytest.raises(ScheduleError, match=r"notes\.txt: is not a schedule file: .* native \(\.json\)"):
        formats.read(tmp_path / "notes.txt")
    with pytest.raises(ScheduleError, match=r"'xml' is not a format: known are native"):
        formats.read(tmp_path / "plan", "xml")
    with pytest.raises(ScheduleError, match=r"no format has the suffix '\.xml'"):
        formats.write(schedule, tmp_path / "plan.xml")
    formats.write(schedule, tmp_path / "plan.xml", "native")
    assert formats.read(tmp_path / "plan.xml") == schedule
