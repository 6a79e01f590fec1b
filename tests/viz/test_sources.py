"""What is at a path or dropped on the page is read as far as it can be, or refused in one line."""

from __future__ import annotations

import base64
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, RecycleError, Schedule, ScheduleError, Shape, simulate
from recycle.ir.check import explain
from recycle.ir.families import FAMILIES, one_f_one_b
from recycle.plans import Move, Plan
from tests.hostile import any_bytes, mutated
from tests.viz.components import canvases, of_type, plain, words
from viz.pages.schedule_page import SchedulePage
from viz.pages.validate_page import FINDINGS_SHOWN, MOST_BYTES, ValidatePage, inspect, printable, read_dropped
from viz.sources import ScheduleFile, equal_work, family_sources, load_source, load_sources, schedule_source


def files(*paths: Path) -> list[ScheduleFile]:
    return [source for source in load_sources(paths) if isinstance(source, ScheduleFile)]


def periods(sources: list[ScheduleFile]) -> list[float]:
    return [source.timeline.period for source in sources if source.timeline is not None]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    one, two = tmp_path / "1f1b.json", tmp_path / "zb-v.json"
    FAMILIES["1f1b"](Shape(1, 4, 8)).save(one)
    FAMILIES["zb-v"](Shape(1, 4, 8, 2)).save(two)
    return one, two


def test_files_of_unlike_chunks_have_the_same_work_and_the_page_says_so(saved: tuple[Path, Path]) -> None:
    assert [periods(files(path)) for path in saved] == [[33], [48]]  # alone each chunk takes 1
    both = files(*saved)
    assert periods(both) == [33, 24]
    assert SchedulePage(both).times().endswith("so for a chunk 1 in 1f1b.json; 0.5 in zb-v.json.")
    assert SchedulePage(files(saved[0], saved[0])).times() == ""


def test_what_somebody_says_counts(saved: tuple[Path, Path]) -> None:
    unit = load_sources(saved, lambda path, schedule: Profile.uniform())
    assert [source.timeline.period for source in unit if isinstance(source, ScheduleFile) and source.timeline] == [
        33,
        48,
    ]
    Profile.uniform(2, 2, 2).save(saved[1].with_name("zb-v.profile.json"))
    assert periods(files(*saved)) == [33, 96]


def test_all_families_stand_side_by_side_with_the_same_work() -> None:
    found = {source.name: source for source in family_sources(Shape(1, 4, 8)) if isinstance(source, ScheduleFile)}
    assert set(found) == set(FAMILIES)
    shown = {name: source.timeline.period for name, source in found.items() if source.timeline is not None}
    assert (shown["1f1b"], shown["interleaved"], shown["zb-v"], shown["v-min"]) == (33, 28.5, 24, 29.5)
    odd = {source.name for source in family_sources(Shape(2, 3, 4))}
    assert {"1f1b", "gpipe", "zb-h1"} <= odd


def test_a_shape_that_no_family_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(shape: Shape) -> Schedule:
        raise ScheduleError("none: needs another shape")

    monkeypatch.setattr("viz.sources.FAMILIES", {"none": refuses})
    with pytest.raises(ScheduleError, match="no family takes D=1 P=2 m=2; the last one says: none: needs another"):
        family_sources(Shape(1, 2, 2))


def test_a_cut_counts_as_one_chunk() -> None:
    cut = Schedule.from_text(Shape(1, 1, 1, cut=(1, 1)), {"0.0": "0F0 1F0 1B0 0B0"}, placement={"0.0": [0, 1]})
    assert equal_work([cut, FAMILIES["1f1b"](Shape(1, 2, 2))]) == [None, None]


def contents(content: bytes) -> str:
    return "data:application/json;base64," + base64.b64encode(content).decode()


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


def answered(schedule: Schedule) -> Any:
    """What the page answers to a file, as the browser gets it."""
    contents = "data:;base64," + base64.b64encode(schedule.dumps().encode()).decode()
    return plain([*ValidatePage().answer(contents, "mine.json")])


def test_a_valid_file_is_called_valid_and_drawn(broken: Schedule) -> None:
    component = answered(broken)
    assert {"mine.json: Valid", "makespan 11"} <= set(words(component))
    assert len(canvases(component)) == 1
    assert of_type(component, "Button") == []


def test_findings_carry_rule_place_message_and_hint(broken: Schedule) -> None:
    programs = {**broken.text(), "0.0": "0F0.0 0F0.1 0F0.1 0B0.0 0B0.1"}
    component = answered(Schedule.from_text(broken.shape, programs, failed=["1.1"]))
    assert {"mine.json: Not valid (1 error, 0 warnings)", "duplicate", "0.0 #2", "0F0.1"} <= set(words(component))
    (abbreviation,) = of_type(component, "Abbr")
    rule = explain("duplicate")
    assert rule is not None
    assert abbreviation["title"] == rule.documentation
    (button,) = of_type(component, "Button")
    assert json.loads(button["data-places"]) == [[0, 2.0, 3.0], [0, 1.0, 2.0]]  # its place, and what it repeats


def test_a_flood_of_findings_is_counted_in_the_verdict_and_below_the_table() -> None:
    texts = words(answered(Schedule.from_text(Shape(1, 1, 1), {"0.0": "0F0 " * 3000 + "0B0"})))
    assert "mine.json: Not valid (2,999 errors, 0 warnings)" in texts
    assert f"The first {FINDINGS_SHOWN}; {2999 - FINDINGS_SHOWN:,} more from `recycle check`." in texts


def test_lanes_carry_their_number_of_findings() -> None:
    shape = Shape(60, 4, 5)
    text = one_f_one_b(shape).text()
    text["47.3"] = text["47.3"] + " 3B47.1"
    file = inspect(Schedule.from_text(shape, text).dumps().encode(), "mine.json")
    page = ValidatePage()
    component = plain(page.lanes(file))
    (canvas,) = canvases(component)
    shown = page.cache.get(canvas["data-address"].removeprefix("lanes/").removesuffix(".bin"))
    assert shown.table.labels[47 * 4 + 3] == "47.3 ▲1"
    assert file.places(file.findings[0])[0][0] == 47 * 4 + 3


PROGRAMS = {"0.0": "0F0.0 1F0.0 1B0.0 0B0.0", "1.0": "0F1.0 0B1.0", "1.1": "1F1.0 1B1.0"}


def moved_plan() -> Schedule:
    """Worker 0.0 had layers 0 and 1 of five, and takes on the others from 1.1 since 0.1 is dead."""
    placement = {"0.0": (0, 1), "1.0": (0,), "1.1": (1,)}
    shape = Shape(2, 2, 1, cut=(2, 3))
    schedule = Schedule.from_text(shape, PROGRAMS, placement=placement, failed=["0.1"])
    timeline = simulate(schedule)
    plan = Plan(schedule, timeline.makespan, timeline.period, 1.0, 0.0, "")
    return Schedule.loads(replace(plan, moves=(Move("0.0", "0.0", "1.1", 3e9, (2, 5), 0.5),)).text())


def test_the_layout_says_who_hosts_which_layers_and_what_is_copied_from_whom() -> None:
    page = SchedulePage([schedule_source(Path("moved.json"), moved_plan())])
    said = words(plain(page.layout_of(page.files[0])))
    assert said[0] == "Layout of moved.json: 1 worker takes on layers"
    assert said[1:6] == ["worker", "hosts layers", "of these it had", "copies layers", "bytes"]
    assert said[6:10] == ["0.0", "0–4", "0–1", "2–4 from 1.1"]
    assert said[11:14] == ["1.0", "0–1", "0–1"]
    assert "moved.json" in " ".join(words(plain(page.layout())))


def test_a_worker_may_host_several_runs_of_layers() -> None:
    placement = {"0.0": (0, 2), "0.1": (1, 3)}
    schedule = Schedule.from_text(Shape(1, 2, 1, 2, cut=(2, 3, 1, 2)), {}, placement=placement)
    page = SchedulePage([schedule_source(Path("runs.json"), schedule)])
    said = words(plain(page.layout_of(page.files[0])))
    assert said[6:9] == ["0.0", "0–1, 5", "0–1, 5"]
    assert said[11:14] == ["0.1", "2–4, 6–7", "2–4, 6–7"]


def test_the_bound_of_a_cut_is_shown_where_the_period_is_the_plans() -> None:
    """The plan's hash is that of the given stages' prices, the timeline's that of the cut's."""
    page = SchedulePage([schedule_source(Path("moved.json"), moved_plan())])
    _, rows = page.figures()
    assert {row[0]: row[1] for row in rows}["bound"].startswith("1 (")


def test_an_order_that_deadlocks_is_drawn_beside_one_that_runs(tmp_path: Path, schedule_file: Path) -> None:
    stuck = Schedule.from_text(Shape(1, 2, 1), {"0.0": "0B0.0 0F0.0", "0.1": "1F0.0 1B0.0"})
    stuck.save(tmp_path / "stuck.json")
    page = SchedulePage([load_source(schedule_file), load_source(tmp_path / "stuck.json")])  # type: ignore[list-item]
    texts = words(plain(page.layout()))
    assert any("stuck.json" in text and "deadlocks" in text for text in texts)
    assert {view["data-span"] for view in canvases(plain(page.timelines()))} == {"11.0"}
    named = {row[0]: row[1:] for row in page.figures()[1]}
    assert (named["makespan"], named["bound"]) == (["11", None], ["10 (gap 10 %)", None])
    assert named["largest bubble"] == [5.0, None]
