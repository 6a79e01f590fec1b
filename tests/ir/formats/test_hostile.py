"""Files that mean harm: every reader gives a schedule or one line, and what it gives can be checked, lowered, timed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recycle import Schedule, ScheduleError, Shape, check, lower, simulate
from recycle.ir import formats
from recycle.ir.columns import MOST_INSTRUCTIONS
from recycle.ir.families import gpipe, interleaved, looped_bfs, one_f_one_b, zb_h1
from recycle.ir.formats import torch_csv
from recycle.ir.formats.schedule_input import Unpacked
from tests.hostile import any_bytes, mutated, read_or_refused, restructured, retold

CASES = Path(__file__).parents[2] / "cases"
quick = settings(derandomize=True, max_examples=60, deadline=None, database=None, suppress_health_check=[*HealthCheck])

SCHEDULES = (
    gpipe(Shape(1, 2, 2)),
    lower(one_f_one_b(Shape(1, 2, 3))),
    lower(zb_h1(Shape(1, 2, 2))),
    interleaved(Shape(1, 2, 2, 2)),
    lower(looped_bfs(Shape(1, 1, 2, 2))),
    torch_csv.loads("0F0,0F1,3F0,3B0,(3F1;0B0)OVERLAP_F_B,3B1,0B1\n1F0,2F0,1F1,(2F1;2B0)OVERLAP_F_B,1B0,2I1,1B1,2W1"),
    Schedule.from_text(Shape(2, 1, 1, 2), {"0.0": "0F0.0 1F0.0 1B0.0 0B0.0 0F1.0 1F1.0 1B1.0 0B1.0"}, failed=["1.0"],
                       ties=[[0, 1]], optimizer="barrier", metadata={"gap": 0.5, "parents": [{"name": "a"}]}),
    lower(one_f_one_b(Shape(2, 2, 2))),
)  # fmt: skip


def seeds(name: str) -> list[bytes]:
    """What the format writes of the schedules that it can hold."""
    dumps, texts = formats.FORMATS[name].dumps, []
    for schedule in SCHEDULES:
        with contextlib.suppress(ScheduleError):
            texts.append("".join(dumps(schedule)).encode())
    return texts


def read(name: str, content: bytes, where: str) -> Schedule:
    return formats.load_unpacked(Unpacked(content, MOST_INSTRUCTIONS), where, name).order()


SEEDS = {name: seeds(name) for name in formats.FORMATS}


def documents(name: str) -> list[Any]:
    """The seeds that are JSON, parsed."""
    found = []
    for seed in SEEDS[name]:
        with contextlib.suppress(ValueError):
            found.append(json.loads(seed))
    return found


DOCUMENTS = {name: found for name in formats.FORMATS if (found := documents(name))}


def survives(name: str, content: bytes) -> None:
    schedule = read_or_refused(lambda: read(name, content, "plan.x"), ScheduleError, "plan.x")
    if schedule is None:
        return
    check(schedule)
    lower(schedule)
    with contextlib.suppress(ScheduleError):
        assert simulate(schedule).makespan >= 0
    assert Schedule.loads(schedule.dumps()) == schedule


@pytest.mark.parametrize("name", formats.FORMATS)
def test_the_seeds_are_valid(name: str) -> None:
    assert len(SEEDS[name]) >= 1
    for seed in SEEDS[name]:
        assert check(read(name, seed, "seed")) == []


@pytest.mark.parametrize("name", formats.FORMATS)
@quick
@given(st.data())
def test_any_bytes_are_read_or_refused(name: str, data: st.DataObject) -> None:
    survives(name, data.draw(any_bytes()))


@pytest.mark.parametrize("name", formats.FORMATS)
@quick
@given(st.data())
def test_a_file_with_bytes_changed_is_read_or_refused(name: str, data: st.DataObject) -> None:
    survives(name, data.draw(mutated(SEEDS[name])))


@pytest.mark.parametrize("name", formats.FORMATS)
@quick
@given(st.data())
def test_a_file_with_words_changed_is_read_or_refused(name: str, data: st.DataObject) -> None:
    survives(name, data.draw(retold(SEEDS[name])))


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
@quick
@given(st.data())
def test_a_file_with_values_of_other_kinds_is_read_or_refused(name: str, data: st.DataObject) -> None:
    survives(name, json.dumps(data.draw(restructured(DOCUMENTS[name]))).encode())
