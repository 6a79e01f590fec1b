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
from recycle.ir import formats, native
from recycle.ir.columns import MOST_INSTRUCTIONS
from recycle.ir.families import gpipe, interleaved, looped_bfs, one_f_one_b, zb_h1
from recycle.ir.formats import torch_csv
from recycle.ir.formats.bounds import Unpacked
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


def words(pipelines: int) -> st.SearchStrategy[str]:
    """An instruction that parses, inside a small shape or a little beyond."""
    stage = st.integers(0, 4)
    micro_batch = st.tuples(st.integers(0, pipelines), st.integers(0, 2)).map(lambda pair: f"{pair[0]}.{pair[1]}")
    peer = st.tuples(st.integers(0, pipelines - 1), st.integers(0, 1)).map(lambda pair: f"{pair[0]}.{pair[1]}")
    transfer = st.sampled_from(["SEND_F", "RECV_F", "SEND_B", "RECV_B"])
    return st.one_of(
        st.builds("{}{}{}".format, stage, st.sampled_from("FBIW"), micro_batch),
        st.builds("{}{}{}@{}".format, stage, transfer, micro_batch, peer),
        st.builds("{}{}".format, stage, st.sampled_from(["REDUCE_GRAD", "STEP"])),
        st.builds("({}F{};{}B{})".format, stage, micro_batch, stage, micro_batch),
    )  # fmt: skip


@pytest.mark.slow
@settings(quick, max_examples=60)
@given(st.data())
def test_any_programs_are_checked_lowered_and_timed(data: st.DataObject) -> None:
    pipelines = data.draw(st.integers(1, 2))
    workers = [f"{k}.{r}" for k in range(pipelines) for r in range(2)]
    document = {
        "format": native.FORMAT,
        "version": native.VERSION,
        "shape": {"pipelines": pipelines, "ranks": 2, "micro_batches": 2, "chunks": data.draw(st.integers(1, 2))},
        "programs": {w: " ".join(data.draw(st.lists(words(pipelines), max_size=8))) for w in workers},
        "failed": data.draw(st.lists(st.sampled_from(workers), max_size=1)),
        "placement": data.draw(st.none() | st.fixed_dictionaries({"0.0": st.lists(st.integers(0, 1), unique=True)})),
        "ties": data.draw(st.lists(st.lists(st.integers(-1, 4), max_size=3), max_size=2)),
        "optimizer": data.draw(st.sampled_from(["staggered", "barrier"])),
    }
    survives("native", json.dumps(document).encode())
