"""What is at a path or dropped on the page is read as far as it can be, or refused in one line."""

from __future__ import annotations

import base64
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from recycle import Profile, RecycleError, Schedule, Shape, simulate
from recycle.ir.check import explain
from recycle.ir.families import FAMILIES, one_f_one_b
from recycle.plans import Move, Plan
from tests.hostile import any_bytes, mutated
from tests.viz.components import canvases, of_type, plain, words
from viz.lane_cache import plan_of
from viz.pages.page import Workspace
from viz.pages.schedule_page import SchedulePage, layout_of
from viz.pages.scoreboard_page import rank, times_text
from viz.pages.validate_page import MAX_BYTES, ValidatePage, inspect, printable, read_dropped
from viz.scenario import PageModel
from viz.sources import ScheduleFile, family_sources, load_sources, schedule_source


def files(*paths: Path, **options: Any) -> list[ScheduleFile]:
    return [source for source in load_sources(paths, **options) if isinstance(source, ScheduleFile)]


def periods(sources: list[ScheduleFile]) -> list[float]:
    return [source.timeline.period for source in sources if source.timeline is not None]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "1f1b.json", tmp_path / "zb-v.json"
    FAMILIES["1f1b"](Shape(1, 4, 8)).save(first)
    FAMILIES["zb-v"](Shape(1, 4, 8, 2)).save(second)
    return first, second


def test_files_of_unlike_chunks_have_the_same_work_and_the_page_says_so(saved: tuple[Path, Path]) -> None:
    assert [periods(files(path)) for path in saved] == [[33], [48]]  # alone each chunk takes 1
    both = files(*saved)
    assert periods(both) == [33, 24]
    assert times_text(both).endswith("1/V for each of its V chunks.")
    assert times_text(files(saved[0], saved[0])) == ""


def test_stated_times_take_precedence(saved: tuple[Path, Path]) -> None:
    assert periods(files(*saved, prices=lambda path, schedule: Profile.uniform())) == [33, 48]
    Profile.uniform(2, 2, 2).save(saved[1].with_name("zb-v.profile.json"))
    assert periods(files(*saved)) == [33, 96]


def test_all_families_are_compared_with_the_same_work() -> None:
    sources = {source.name: source for source in family_sources(Shape(1, 4, 8)) if isinstance(source, ScheduleFile)}
    assert set(sources) == set(FAMILIES)
    period = {name: source.timeline.period for name, source in sources.items() if source.timeline is not None}
    assert [period[name] for name in ("1f1b", "interleaved", "zb-v", "v-min")] == [33, 28.5, 24, 29.5]
    odd = {source.name for source in family_sources(Shape(2, 3, 4))}
    assert {"1f1b", "gpipe", "zb-h1"} <= odd


def contents(content: bytes) -> str:
    return "data:application/json;base64," + base64.b64encode(content).decode()


def test_unreadable_parts_of_a_file_are_skipped_and_the_rest_is_drawn() -> None:
    text = one_f_one_b(Shape(1, 2, 2)).dumps().replace("0F0.1", "0F0.1 0Q0.1").replace('"0.1"', '"0.9": "", "0.1"')
    file = inspect(text.encode(), "mine.json")
    assert file.left_out == (
        "worker 0.0, position 2: '0Q0.1' is not an instruction: expected for example 2F1.5, 2SEND_F1.5@0.3 or 2STEP",
        "programs: worker 0.9 is outside the grid of 1 pipelines (0 to 0) by 2 ranks (0 to 1)",
    )
    assert file.findings == []
    assert file.timeline.makespan == 9.0


def test_every_instruction_of_a_cycle_of_waits_has_its_place() -> None:
    wrong = Schedule.from_text(Shape(1, 2, 2), {"0.0": "0F0.0 0B0.0 0F0.1 0B0.1", "0.1": "1F0.0 1F0.1 1B0.0 1B0.1"})
    file = inspect(wrong.dumps().encode(), "wrong.json")
    (cycle,) = [finding for finding in file.findings if finding.rule == "deadlock"]
    drawn = {
        (int(file.lanes.lane[i]), float(file.lanes.start[i])): str(file.lanes.instruction(i))
        for i in range(len(file.lanes))
    }
    named = [drawn[lane, start] for lane, start, _ in file.places(cycle)]
    assert named == [cycle.instruction, *(other.instruction for other in cycle.others)]
    assert sorted(named) == ["0B0.0", "0F0.1", "1B0.0", "1F0.1"]


@pytest.mark.parametrize(
    ("given_contents", "message"),
    [
        (contents(b'{"format": "recycle-sch'), "not valid JSON"),
        (contents(b"\x00\x01\x02"), "plan.json"),
        ("data:text/plain;base64,@@@", "sent only a part of the file"),
        ("javascript:alert(1)", "the browser sent no file"),
        ("data:text/plain;base64," + "A" * (MAX_BYTES * 4 // 3 + 8), "too large for the page"),
    ],
)
def test_other_files_are_refused_in_one_line(given_contents: str, message: str) -> None:
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
    given_contents = contents(piece * ((MAX_BYTES - 10) // len(piece)))
    tracemalloc.start()
    with pytest.raises(RecycleError, match="more cells, words or lines"):
        read_dropped(given_contents, "plan.csv")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_BYTES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\plans\\mine.json", "mine.json"),
        ("<script>alert(1)<%2fscript>.json", "<script>alert(1)<%2fscript>.json"),
        ("a\nb\x1b[2J.json", "a b\\x1b[2J.json"),
        ("", "file"),
        ("a" * 5000 + ".json", "a" * 108 + "…aaaaaa.json"),
    ],
)
def test_a_name_is_a_line_of_text(name: str, expected: str) -> None:
    assert printable(name) == expected


SEEDS = [one_f_one_b(Shape(1, 2, 2)).dumps().encode(), b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"]


@settings(max_examples=120)
@given(st.one_of(mutated(SEEDS), any_bytes()), st.sampled_from(["a.json", "a.csv", "a", "a.trace.json"]))
def test_any_dropped_content_is_read_or_refused(content: bytes, name: str) -> None:
    try:
        file = read_dropped(contents(content), name)
    except RecycleError:
        return
    for finding in file.findings:
        assert all(start <= end for _, start, end in file.places(finding))


def answered(schedule: Schedule) -> Any:
    """What the page answers to a file, as the browser gets it."""
    contents = "data:;base64," + base64.b64encode(schedule.dumps().encode()).decode()
    return plain([*ValidatePage(Workspace()).answer(contents, "mine.json")])


def test_findings_have_rule_place_message_and_hint(broken: Schedule) -> None:
    programs = {**broken.text(), "0.0": "0F0.0 0F0.1 0F0.1 0B0.0 0B0.1"}
    component = answered(Schedule.from_text(broken.shape, programs, failed=["1.1"]))
    assert {"mine.json: 1 error", "duplicate", "0.0 #2", "0F0.1"} <= set(words(component))
    assert of_type(component, "Abbr")[0]["title"] == explain("duplicate").documentation  # type: ignore[union-attr]
    (button,) = of_type(component, "Button")
    assert json.loads(button["data-places"]) == [[0, 2.0, 3.0], [0, 1.0, 2.0]]  # its place, and what it repeats


@pytest.fixture
def moved_plan(moved: Schedule) -> Schedule:
    """Worker 0.0 had layers 0 and 1, and copies the others from 1.1."""
    timeline = simulate(moved)
    plan = Plan(moved, timeline.makespan, timeline.period, 1.0, 0.0, "")
    return Schedule.loads(replace(plan, moves=(Move("0.0", "0.0", "1.1", 3e9, (2, 5), 0.5),)).text())


def test_the_layout_lists_hosted_and_copied_layers(moved_plan: Schedule) -> None:
    texts = words(plain(layout_of("Layout", moved_plan, plan_of(moved_plan))))
    assert texts[5:8] == ["0.0", "0–4", "2–4 from 1.1"]
    assert texts[9:11] == ["1.0", "0–1"]
    placement = {"0.0": (0, 2), "0.1": (1, 3)}
    several = Schedule.from_text(Shape(1, 2, 1, 2, cut=(2, 3, 1, 2)), {}, placement=placement)
    assert "0–1, 5" in words(plain(layout_of("Layout", several, None)))


def test_the_bound_of_a_cut_is_shown_where_the_period_is_the_plans(moved_plan: Schedule) -> None:
    """The plan's hash is that of the given stages' prices, the timeline's that of the cut's."""
    (row,) = rank([schedule_source(Path("moved.json"), moved_plan)], PageModel())
    assert row.figures["bound"].value.startswith("1 (")


def test_a_deadlock_is_drawn_next_to_a_schedule_that_runs(broken: Schedule) -> None:
    stuck = Schedule.from_text(Shape(1, 2, 1), {"0.0": "0B0.0 0F0.0", "0.1": "1F0.0 1B0.0"})
    page = SchedulePage(Workspace([schedule_source(Path("runs"), broken), schedule_source(Path("stuck"), stuck)]))
    assert any(text.startswith("stuck: ") and "deadlocks" in text for text in words(plain(page.layout())))
    assert {view["data-span"] for view in canvases(plain(page.layout().lanes))} == {"11.0"}
    runs, deadlocks = rank(page.files, page.cache)
    assert (runs.figures["makespan"].value, runs.figures["bound"].value) == ("11", "10 (gap 10 %)")
    assert deadlocks.figures == {}


def test_a_send_or_receive_of_a_deadlock_is_framed_where_it_is() -> None:
    programs = {
        "0.0": "0F0.0 0RECV_B0.0@0.1 0SEND_F0.0@0.1 0B0.0 0REDUCE_GRAD 0STEP",
        "0.1": "1RECV_F0.0@0.0 1F0.0 1B0.0 1SEND_B0.0@0.0 1REDUCE_GRAD 1STEP",
    }
    file = schedule_source(Path("dead.json"), Schedule.from_text(Shape(1, 2, 1), programs))
    (finding,) = [finding for finding in file.findings if finding.others]
    table = file.lanes
    involved = [(finding.worker, finding.position), *((other.worker, other.position) for other in finding.others)]
    for (worker, position), (lane, start, end) in zip(involved, file.places(finding), strict=True):
        drawn = [i for i in range(*table.offsets[lane : lane + 2]) if (table.start[i], table.end[i]) == (start, end)]
        assert programs[str(worker)].split()[position] in [str(table.instruction(i)) for i in drawn]
    assert SchedulePage(Workspace([file])).first_panel == "findings"
