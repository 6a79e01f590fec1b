"""What can be compared, on which clock, and what the page finds: figures, the split, where two part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recycle import RecycleError, Schedule, Shape
from recycle.ir.families import one_f_one_b, zb_h1
from tests.viz.components import canvases, drawn, of_type, plain, words
from viz.analysis.differences import align
from viz.lane_cache import Operand
from viz.pages.compare_page import ComparePage
from viz.pages.compared import ComparedTimelines, choices, first_choice, on_one_axis
from viz.run import Run
from viz.run_files import load_run
from viz.sources import ScheduleFile, schedule_source

Source = Run | ScheduleFile


def operand(sources: Sequence[Source], key: str) -> Operand:
    title, make = choices(sources)[key]
    return make(title)


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
        with pytest.raises(RecycleError, match="is not there to be compared"):
            ComparedTimelines.of(sources, ["file/0", key])


def test_a_plan_is_stretched_to_the_clock_of_what_ran_and_that_is_said(run_dir: Path) -> None:
    run = load_run(run_dir)
    both, said = on_one_axis([operand([run], "plan/0/bbbb1111"), operand([run], "step/0/4")])
    assert both[0].timeline.makespan == pytest.approx(both[1].timeline.makespan, rel=1e-6)
    assert "1 unit = 0.0173 s; both from their first start" in said[0]
    assert "transfers none was used before it was sent; clocks may disagree by up to 1.73 ms" in said[1]
    assert align(both[0].timeline, both[1].timeline, 0.02)[0] == 0.02


def test_a_step_of_clocks_that_disagree_is_refused(run_dir: Path) -> None:
    run = load_run(run_dir)
    ahead = np.isin(run.trace.process, [2, 3])
    run.trace = replace(run.trace, start=run.trace.start + 5.0 * ahead, end=run.trace.end + 5.0 * ahead)
    with pytest.raises(RecycleError, match="clocks of this trace's workers are not aligned"):
        ComparedTimelines.of([run], ["plan/0/bbbb1111", "step/0/4"])


def test_memory_limits_come_from_the_plan_else_from_the_job(run_dir: Path, tmp_path: Path, healthy: Schedule) -> None:
    (run_dir / "job.toml").write_text((run_dir / "job.toml").read_text() + "[memory]\nlimit = [2, 1]\n")
    files = [("limited", [3, 2.5]), ("other", [1]), ("odd", [True, "x"]), ("none", None)]
    sources = [schedule_source(Path(name), healthy.with_metadata(limits=limits)) for name, limits in files]
    every = [*sources, load_run(run_dir)]
    assert [operand(every, f"file/{place}").explainer.limits for place in range(4)] == [(3.0, 2.5), None, None, None]
    assert operand(every, "step/4/4").explainer.limits == (2.0, 1.0)
    assert operand(every, "plan/4/aaaa0000").explainer.limits == (2.0, 1.0)


KEYS = ["file/0", "file/1"]


@pytest.fixture
def page(healthy: Schedule, broken: Schedule) -> ComparePage:
    return ComparePage(lambda: [schedule_source(Path("healthy"), healthy), schedule_source(Path("broken"), broken)])


def shown(component: Any) -> list[tuple[str, Any]]:
    """Where the buttons of a component lead: the place of the timeline, and places in it."""
    buttons = of_type(plain(component), "Button")
    return [(button["data-graph"], json.loads(button["data-places"])) for button in buttons]


def test_each_operation_has_how_much_later_it_starts(page: ComparePage) -> None:
    shown = page.lanes(KEYS)
    first, second = canvases(plain(shown))
    assert "data-shades" not in first
    (shade,) = json.loads(second["data-shades"])
    content = page.shades.get(Path(shade["address"]).stem)
    table, found = drawn(page.cache, shown)[1].table, np.frombuffer(content, "<f4")
    named = {str(table.instruction(i)): float(found[i]) for i in range(len(table))}
    assert named["1F1.0"] == 1.0
    assert named["0F0.0"] == 0.0
    assert named["0W1.0"] == 3.0  # in the fault-free plan the later half of its whole backward
    assert shade["title"] == "healthy"
    assert shade["edges"] == [0.01 * 9.0, max(abs(v) for v in named.values() if v == v) / 2]


def test_lane_under_lane_is_one_canvas_with_room_for_all(page: ComparePage) -> None:
    component = plain(page.lanes(KEYS, "later", "interleaved"))
    (view,) = canvases(component)
    assert len(json.loads(view["data-with"])) == 1
    assert [shade and shade["title"] for shade in json.loads(view["data-shades"])] == [None, "healthy"]
    assert next(part for part in of_type(component, "Div") if part.get("className") == "lanes")["style"] == {
        "--lanes": 12
    }
    first, *_ = shown(page.compare(KEYS, "interleaved"))
    assert first == ("0", [[2 * 3, 1.0, 2.0]])  # of the fourth worker the first one's lane


def test_lanes_of_other_workers_are_not_laid_under_each_other(healthy: Schedule) -> None:
    other = schedule_source(Path("other"), one_f_one_b(Shape(2, 2, 2)))
    page = ComparePage(lambda: [schedule_source(Path("healthy"), healthy), other])
    component = plain(page.lanes(KEYS, "later", "interleaved"))
    assert any("have other workers" in text for text in words(component))
    assert len(canvases(component)) == 2


def test_the_parts_of_the_difference_and_the_first_divergence_are_shown(page: ComparePage) -> None:
    component = plain(page.compare(KEYS))
    texts = words(component)
    row = texts.index("extra work (re-routed)")
    assert texts[row + 1 : row + 4] == ["0", "1.2", "+1.2"]
    row = len(texts) - 1 - texts[::-1].index("makespan")
    assert texts[row + 1 : row + 4] == ["9", "11", "+2"]
    assert any(
        "worker 1.1: the first runs 1F1.0, the second runs nothing, as the worker has failed" in text for text in texts
    )
    assert "+22.2 %" in texts
    assert len(shown(page.compare(KEYS))) == 2


def test_the_half_of_a_whole_backward_that_starts_late_is_named() -> None:
    """Worker 0.0 of ZB-H1 runs the weight gradient of its last micro-batch after the next input gradient."""
    shape = Shape(1, 4, 8)
    files = [schedule_source(Path("whole"), one_f_one_b(shape)), schedule_source(Path("split"), zb_h1(shape))]
    page = ComparePage(lambda: files)
    texts = words(plain(page.compare(KEYS)))
    assert "the weight half of 3B0.0 on 0.3 starts" in " ".join(texts)
    assert any(text.endswith("(weight half)") for text in texts)


def test_the_first_one_is_outlined_in_the_others_when_asked(page: ComparePage) -> None:
    plainly, outlined = (canvases(plain(page.lanes(KEYS, ghost=ghost))) for ghost in (False, True))
    assert [view.get("data-ghost") for view in plainly] == [None, None]
    assert [view.get("data-ghost") for view in outlined] == [None, outlined[0]["data-address"]]


def test_plan_and_executed_step_are_compared_in_the_unit_of_their_axis(run_dir: Path) -> None:
    page = ComparePage(lambda: [load_run(run_dir)])
    keys = first_choice(page.now())
    texts = words(plain(page.compare(keys)))
    assert "per live worker (ms)" in texts
    assert "the same" in texts
    assert any("1 unit = 0.0173 s" in text for text in texts)
    assert {view["data-word"] for view in canvases(plain(page.lanes(keys)))} == {"ms"}
    assert "They do the same at the same times." in texts


def test_what_cannot_be_compared_says_why(page: ComparePage) -> None:
    assert "Choose two or more to compare." in words(plain(page.lanes(["file/0"])))
    assert any("is not there to be compared" in text for text in words(plain(page.lanes(["file/0", "file/9"]))))
    assert page.compare(["file/0"]) == page.compare(["file/0", "file/9"]) == []
    alone = ComparePage(lambda: [])
    assert "There is nothing to compare yet." in words(plain(alone.layout()))


def test_the_answer_does_not_grow_with_the_schedules() -> None:
    def answer(shape: Shape) -> int:
        files = [schedule_source(Path("a"), one_f_one_b(shape)), schedule_source(Path("b"), zb_h1(shape))]
        page = ComparePage(lambda: files)
        component = [plain(page.lanes(KEYS, ghost=True)), plain(page.compare(KEYS))]
        assert len(page.compared(KEYS).tables[1]) > 3 * shape.stages * shape.global_micro_batches
        return len(json.dumps(component))

    assert answer(Shape(16, 16, 40)) < 1.2 * answer(Shape(4, 4, 60))
