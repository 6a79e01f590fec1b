"""The page of a run's time: each iteration at its moment, each change marked and counted, and an empty page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recycle.runs.report import TimePart
from tests.viz.components import plain, words
from viz.figures.charts import FILLS, MARKS, over_time_figure, parts_figure
from viz.numbers import short
from viz.pages.report_page import ReportPage, changes_table, facts, part_rows
from viz.run_files import LiveRun, load_run


@pytest.fixture
def page(run_dir: Path) -> ReportPage:
    return ReportPage(LiveRun(load_run(run_dir)))


def test_iterations_throughput_and_workers_stand_at_their_times_with_the_changes_marked(page: ReportPage) -> None:
    report = page.run.report
    figure = over_time_figure(report, page.run.metrics, 6)
    seconds, tokens, workers = figure.data
    assert list(seconds.x) == [line["time"] for line in page.run.metrics]
    assert list(workers.y) == [6, 6, 6, 5, 5, 5, 6, 6, 6]
    assert list(tokens.y) == [1000.0] * 9
    assert sum(seconds.y) == pytest.approx(report.measured)
    failure, back = report.changes
    assert (failure.kind, failure.step, back.kind, back.step) == ("failure", 3, "re-join", 6)
    assert [shape.x0 for shape in figure.layout.shapes] == [failure.time, back.time]
    lines = [(shape.line.color, shape.line.dash) for shape in figure.layout.shapes]
    assert lines == [MARKS["failure"], MARKS["re-join"]]
    assert [note.text for note in figure.layout.annotations] == [failure.what, "1.1 re-joined"]


def test_the_bar_and_the_table_have_every_part_and_add_up(page: ReportPage) -> None:
    report = page.run.report
    bars = {bar.name: bar.x[0] for bar in parts_figure(report).data}
    assert sum(bars.values()) == pytest.approx(100)
    rows = part_rows(report)
    assert [row[0] for row in rows] == [part.value for part, seconds in report.parts.items() if seconds]
    assert sum(float(str(row[1])) for row in rows) == pytest.approx(report.wall, abs=0.01)
    assert set(bars) <= {row[0] for row in rows}
    assert len(set(FILLS.values())) == len(TimePart)


def test_a_change_has_a_row_with_what_it_cost(page: ReportPage) -> None:
    report = page.run.report
    head, rows = changes_table(report.changes)
    failure = dict(zip(head, rows[0], strict=True))
    assert failure["change"] == "failure"
    assert failure["redone"] == short(report.changes[0].costs[TimePart.REDONE])
    assert failure["all"] == f"{report.changes[0].seconds:.3f}"
    assert "1 failure" in facts(report)
    shown = " ".join(words(plain(page.layout())))
    assert "Where the time went" in shown
    assert "What changes cost, in seconds" in shown
    assert page.exported()


def test_a_run_that_has_committed_nothing_yet_says_so(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    path = make_run(tmp_path / "run", live=True)
    for name in ("metrics", "events"):
        (path / f"{name}.jsonl").write_text("")
    page = ReportPage(LiveRun(load_run(path)))
    assert "Nothing has run yet." in " ".join(words(plain(page.layout())))
    (path / "metrics.jsonl").unlink()
    assert "Nothing has run yet." in " ".join(words(plain(ReportPage(LiveRun(load_run(path))).layout())))
