"""What can be compared, on which clock, and what the page finds: figures, the split, where two part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recycle import Profile, RecycleError, Schedule, Shape, simulate
from recycle.ir.families import one_f_one_b, zb_h1, zb_v
from recycle.ir.instruction import Forward
from tests.viz.components import canvases, drawn, of_type, plain, words
from tests.viz.conftest import PROFILE, planned
from viz.analysis.differences import align
from viz.details import one_f_one_b_period
from viz.lane_cache import TimedLanes
from viz.pages.compare_page import ComparePage
from viz.pages.comparison import Comparison, align_clocks, choices, first_choice
from viz.pages.lanes_view import lanes_view
from viz.pages.page import Workspace
from viz.run import Run
from viz.run_files import load_run
from viz.scenario import PageModel, Scenario
from viz.sources import ScheduleFile, schedule_source

Source = Run | ScheduleFile


def compared_timeline(sources: Sequence[Source], key: str) -> TimedLanes:
    title, make = choices(sources)[key]
    return replace(make(), title=title)


def test_files_plans_and_executed_steps_are_offered(run_dir: Path, healthy: Schedule, broken: Schedule) -> None:
    files = [schedule_source(Path("healthy"), healthy), schedule_source(Path("broken"), broken)]
    sources = [*files, load_run(run_dir)]
    titles = [title for title, _ in choices(sources).values()]
    assert titles[:3] == ["healthy", "broken", "run: plan of steps 0 to 2, all workers"]
    assert titles[-1] == "run: executed step 8"
    assert len(titles) == len(set(titles))
    assert first_choice(sources) == ["file/0", "file/1"]
    assert first_choice([load_run(run_dir)]) == ["plan/0/bbbb1111", "step/0/4"]
    for key in ("file/7", "step/2/99", "../../etc/passwd", ""):
        with pytest.raises(RecycleError, match="is not one of the timelines that can be compared"):
            Comparison.of_keys(sources, ["file/0", key], PageModel())


def test_a_plan_is_scaled_to_the_clock_of_the_executed_step(run_dir: Path) -> None:
    run = load_run(run_dir)
    both, notes = align_clocks([compared_timeline([run], key) for key in ("plan/0/bbbb1111", "step/0/4")])
    assert both[0].timeline.makespan == pytest.approx(both[1].timeline.makespan, rel=1e-6)
    assert "1 unit = 0.0173 s; both from their first start" in notes[0]
    assert "transfers fit one clock; differences of up to 1.73 ms" in notes[1]
    assert align(both[0].timeline, both[1].timeline, 0.02)[0] == 0.02


def test_clocks_that_differ_are_aligned_and_the_page_says_by_how_much(run_dir: Path) -> None:
    run = load_run(run_dir)
    before = compared_timeline([run], "step/0/4").table
    ahead = np.isin(run.trace.process, [2, 3])
    run.trace = replace(run.trace, start=run.trace.start + 5.0 * ahead, end=run.trace.end + 5.0 * ahead)
    comparison = Comparison.of_keys([run], ["plan/0/bbbb1111", "step/0/4"], PageModel())
    executed = comparison.timelines[1]
    assert "differed by up to 5000 ms and are aligned" in comparison.notes[1]
    assert executed.table.start == pytest.approx(before.start, abs=executed.timeline.clocks.uncertainty)
    assert "aligned to ±" in words(plain(lanes_view("step 4", executed, "x", PageModel())))[0]


def test_a_step_whose_times_no_clocks_explain_is_refused(run_dir: Path) -> None:
    run = load_run(run_dir)
    late = run.trace.columns.kind == Forward.kind
    run.trace = replace(run.trace, start=run.trace.start - 5.0 * late)
    with pytest.raises(RecycleError, match="clocks contradict each other"):
        Comparison.of_keys([run], ["plan/0/bbbb1111", "step/0/4"], PageModel())


def test_memory_limits_come_from_the_plan_else_from_the_job(run_dir: Path, tmp_path: Path, healthy: Schedule) -> None:
    (run_dir / "job.toml").write_text((run_dir / "job.toml").read_text() + "[memory]\nlimit = [2, 1]\n")
    limited = schedule_source(Path("limited"), planned(healthy, 9.0, 9.0, (3.0, 2.5)))
    sources = [limited, schedule_source(Path("bare"), healthy), load_run(run_dir)]
    keys = ("file/0", "file/1", "step/2/4", "plan/2/aaaa0000")
    limits = [compared_timeline(sources, key).context.limits for key in keys]
    assert limits == [(3.0, 2.5), None, (2.0, 1.0), (2.0, 1.0)]


KEYS = ["file/0", "file/1"]


@pytest.fixture
def page(healthy: Schedule, broken: Schedule) -> ComparePage:
    return ComparePage(Workspace([schedule_source(Path("healthy"), healthy), schedule_source(Path("broken"), broken)]))


def test_each_operation_has_the_difference_of_its_start(page: ComparePage) -> None:
    blocks = page.lanes(KEYS)
    first, second = canvases(plain(blocks))
    assert "data-shades" not in first
    (shade,) = json.loads(second["data-shades"])
    table = drawn(page.cache, blocks)[1].table
    deltas = np.frombuffer(page.shades.get(Path(shade["address"]).stem), "<f4")
    named = {str(table.instruction(i)): float(delta) for i, delta in enumerate(deltas)}
    # In the fault-free plan 0W1.0 is the later half of a whole backward.
    assert (named["1F1.0"], named["0F0.0"], named["0W1.0"]) == (1.0, 0.0, 3.0)
    assert shade["edges"] == [0.01 * 9.0, np.nanmax(np.abs(deltas)) / 2]


def test_interleaved_lanes_are_one_canvas_with_room_for_all(page: ComparePage) -> None:
    component = plain(page.lanes(KEYS, "later", "interleaved"))
    (view,) = canvases(component)
    assert len(json.loads(view["data-with"])) == 1
    assert [shade and shade["title"] for shade in json.loads(view["data-shades"])] == [None, "healthy"]
    assert {"--lanes": 12} in [part.get("style") for part in of_type(component, "Div")]
    button = of_type(plain(page.compare(KEYS, "interleaved")), "Button")[0]
    places = json.loads(button["data-places"])
    assert (button["data-graph"], places) == (0, [[2 * 3, 1.0, 2.0]])  # the first one's lane of the fourth worker


def test_lanes_of_other_workers_are_not_interleaved(healthy: Schedule) -> None:
    other = schedule_source(Path("other"), one_f_one_b(Shape(2, 2, 2)))
    page = ComparePage(Workspace([schedule_source(Path("healthy"), healthy), other]))
    component = plain(page.lanes(KEYS, "later", "interleaved"))
    assert any("have different workers" in text for text in words(component))
    assert len(canvases(component)) == 2


def test_the_parts_of_the_difference_and_the_first_divergence_are_shown(page: ComparePage) -> None:
    texts = words(plain(page.compare(KEYS)))
    row = texts.index("extra work (re-routed)")
    assert texts[row + 1 : row + 4] == ["0", "1.2", "+1.2"]
    row = len(texts) - 1 - texts[::-1].index("makespan")
    assert texts[row + 1 : row + 4] == ["9", "11", "+2"]
    assert "worker 1.1: the first runs 1F1.0, the second runs nothing, as the worker has failed" in " ".join(texts)
    assert "+22.2 %" in texts


def test_the_weight_half_of_a_whole_backward_is_named() -> None:
    """Worker 0.0 of ZB-H1 runs the weight gradient of its last micro-batch after the next input gradient."""
    shape = Shape(1, 4, 8)
    files = [schedule_source(Path("whole"), one_f_one_b(shape)), schedule_source(Path("split"), zb_h1(shape))]
    page = ComparePage(Workspace(files))
    texts = words(plain(page.compare(KEYS)))
    assert "the weight half of 3B0.0 on 0.3 starts" in " ".join(texts)


def test_schedules_with_other_stages_are_compared_by_figures_alone() -> None:
    shape = Shape(1, 4, 8)
    named = (("whole", one_f_one_b(shape), 1.0), ("chunks", zb_v(Shape(1, 4, 8, chunks=2)), 0.5))
    files = [schedule_source(Path(name), each, Profile.uniform(time, time, time)) for name, each, time in named]
    page = ComparePage(Workspace(files))
    texts = words(plain(page.compare(KEYS)))
    assert any("cuts the model into other stages" in text for text in texts)
    row = texts.index("period against the first")
    assert texts[row + 2] == "-27.3 %"
    assert not json.loads(canvases(plain(page.lanes(KEYS)))[1]["data-shades"])[0]["is_shaded"]


def test_plan_and_executed_step_are_compared_in_the_unit_of_their_axis(run_dir: Path) -> None:
    page = ComparePage(Workspace.from_sources([load_run(run_dir)]))
    keys = first_choice(page.workspace.sources())
    texts = words(plain(page.compare(keys)))
    assert {"per live worker (ms)", "the same", "Both run the same instructions at the same times."} <= set(texts)
    assert {view["data-word"] for view in canvases(plain(page.lanes(keys)))} == {"ms"}
    plan = simulate(page.workspace.sources()[0].plan("bbbb1111"), PROFILE)  # type: ignore[union-attr]
    scaled = page.comparison(keys, Scenario()).timelines[0].timeline
    assert scaled.period / one_f_one_b_period(scaled) == pytest.approx(plan.period / one_f_one_b_period(plan))


def test_what_cannot_be_compared_says_why(page: ComparePage) -> None:
    assert "Choose two or more to compare." in words(plain(page.lanes(["file/0"])))
    assert any(
        "is not one of the timelines that can be compared" in text
        for text in words(plain(page.lanes(["file/0", "file/9"])))
    )
    assert page.compare(["file/0"]) == page.compare(["file/0", "file/9"]) == []
    empty = ComparePage(Workspace([]))
    assert "There is nothing to compare yet." in words(plain(empty.layout()))
