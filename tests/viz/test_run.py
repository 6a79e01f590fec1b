"""A run directory is read as far as it can be read, its segments follow the membership, and its pages show them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recycle import RecycleError, Worker, simulate
from recycle.runs.logs import append_iteration, log_path
from recycle.runs.report import TimePart
from tests.viz.components import canvases, drawn, graphs, of_type, plain, words
from tests.viz.conftest import PROFILE
from viz.app import build_app
from viz.figures.charts import FILLS, INTERRUPTIONS, over_time_figure
from viz.kinds import label
from viz.lanes import Flag
from viz.numbers import short
from viz.pages import open_pages
from viz.pages.page import Workspace
from viz.pages.report_page import ReportPage, clipped, part_rows
from viz.pages.run_page import RunPage
from viz.pages.runs_page import RunsPage, summary
from viz.run import Run
from viz.run_files import LiveRun, load_run
from viz.sources import load_sources

DEAD = (Worker(1, 1),)


def test_segments_lie_between_changes_of_plan_or_generation(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert run.problems == []
    assert [(p.steps, p.plan, p.failed) for p in run.segments] == [
        ("0 to 2", "aaaa0000", ()),
        ("3 to 5", "bbbb1111", DEAD),
        ("6 to 8", "aaaa0000", ()),
    ]
    assert list(run.notable_steps.items()) == [
        ("before the failure", 2),
        ("during the failure", 4),
        ("after the return", 7),
    ]


def test_an_aborted_step_keeps_both_attempts(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert run.generations_of(3) == [0, 1]
    assert (run.plan_of(3, 0), run.plan_of(3)) == ("aaaa0000", "bbbb1111")
    assert run.failed_in(3, 0) == run.failed_in(3) == DEAD
    early, late, planned = run.executed_lanes(3, 0), run.executed_lanes(3), run.planned_lanes(3, 0)
    first, second = early.table, late.table
    assert len(first) < len(second)
    assert first.failed.tolist() == second.failed.tolist() == [False, False, False, True, False, False]
    assert not first.has(Flag.REROUTED).any()
    assert second.has(Flag.REROUTED).any()
    assert not planned.table.failed.any()


SPOILT_LOG = '{"step": 0, "generation": 0, "role": "0.0", "instructions": [["nonsense", 0, 1]]}'


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("plans/bbbb1111.json", None, "bbbb1111.json: cannot be read"),
        ("plans/bbbb1111.json", lambda text: text[:200], "bbbb1111.json: not valid JSON"),
        ("job.toml", lambda text: "[shape]\npipelines = 0\n", "job.toml: "),
        ("trace.json", lambda text: text[:5000], "trace.json: not valid JSON"),
        ("metrics.jsonl", lambda text: text + '{"loss": 1.0}\n{"step": 9, "lo', "metrics.jsonl: a line without a step"),
        ("logs/0.0.trace.jsonl", lambda text: SPOILT_LOG, "0.0.trace.jsonl: line 1"),
    ],
)
def test_damage_is_a_problem_and_the_rest_is_shown(
    run_dir: Path, name: str, damage: Callable[[str], str] | None, message: str
) -> None:
    file, is_log = run_dir / name, name.startswith("logs")
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage(file.read_text()))
    if is_log:
        (run_dir / "trace.json").unlink()
    run = load_run(run_dir)
    segments = run.segments
    assert [run.plan_context(segment.plan) is not None for segment in segments].count(True) >= 2
    assert any(message in problem for problem in run.problems)
    assert len(run.metrics) == 9
    assert [segment.steps for segment in segments] == ["0 to 2", "3 to 5", "6 to 8"]
    assert [segment.failed for segment in segments] == [(), DEAD, ()]
    assert (run.executed_lanes(4) is None) == is_log


@pytest.mark.parametrize("name", ["../../outside", "/outside", "bbbb1111/../../../outside", 7])
def test_a_plan_outside_of_the_run_is_not_loaded(run_dir: Path, name: object) -> None:
    shutil.copy(run_dir / "plans" / "bbbb1111.json", run_dir.parent / "outside.json")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    named = str(run_dir.parent / "outside") if name == "/outside" else name
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({**line, "plan": named}) + "\n" for line in lines))
    run = load_run(run_dir)
    assert run.plan(run.plan_of(8)) is None
    assert [problem for problem in run.problems if "is not the hash of a plan" in problem]


def test_without_generation_events_the_plan_gives_the_failed_workers(run_dir: Path) -> None:
    (run_dir / "events.jsonl").unlink()
    run = load_run(run_dir)
    assert [segment.failed for segment in run.segments] == [(), DEAD, ()]
    assert run.events == []


def test_runs_are_opened_by_folder_or_link_and_other_paths_are_refused(run_dir: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(run_dir, runs / "one")
    (runs / "latest").symlink_to("one")
    source = load_sources([runs / "latest"])[0]
    assert isinstance(source, Run)
    assert source.path == runs / "one"
    refused = [
        (tmp_path / "absent", "no such file or run directory"),
        (run_dir / "trace.json", "view its folder"),
        (runs, "runs: contains 1 run.s.: pass a path, the newest is .*runs/one$"),
    ]
    for path, message in refused:
        with pytest.raises(RecycleError, match=message):
            load_sources([path])[0]
    for number in range(6):
        (runs / str(number) / "logs").mkdir(parents=True)
    with pytest.raises(RecycleError, match=r"runs: contains 7 run.s.: pass a path"):
        load_sources([runs])[0]


@pytest.fixture
def page(run_dir: Path) -> RunPage:
    return RunPage(Workspace.from_sources([load_run(run_dir)]))


def test_a_step_shows_planned_and_executed_lanes_of_an_attempt(page: RunPage) -> None:
    views, options, attempt, hidden = page.timelines(4)
    assert (options, attempt, hidden) == ([{"label": "generation 1", "value": ""}], "", "hidden")
    assert [view["data-name"] for view in canvases(plain(views))] == ["run0-planned", "run0-executed"]
    for table in (lanes.table for lanes in drawn(page.cache, views)):
        assert [table.labels[lane] for lane in np.flatnonzero(table.failed)] == ["1.1"]
        assert {"F1.0", "F1.1", "I1.0", "W1.1"} <= {label(table, i) for i in np.flatnonzero(table.has(Flag.REROUTED))}
    _, options, attempt, hidden = page.timelines(3, "2.0")  # of another step
    assert ([option["value"] for option in options], attempt, hidden) == (["3.0", ""], "", "")
    views, _, attempt, _ = page.timelines(3, "3.0")
    assert attempt == "3.0"
    assert "Executed, step 3: 1.1 failed" in words(plain(views))


def test_an_evaluation_is_named_and_drawn_at_its_step(run_dir: Path) -> None:
    (run_dir / "trace.json").unlink()
    for batch in range(2):
        instructions = [(f"0F0.{j}", 90.0 + 4 * batch + j, 90.5 + 4 * batch + j) for j in range(2)]
        append_iteration(log_path(run_dir, Worker(0, 0)), 4, 1, "0.0", instructions, batch)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines[4]["eval_loss"] = 4.125
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = RunPage(Workspace.from_sources([load_run(run_dir)]))
    assert "evaluation loss 4.125 after step 4" in page.facts()
    (_, executed, evaluated), (_, after) = (
        [entry.table for entry in drawn(page.cache, page.timelines(step)[0])] for step in (4, 5)
    )
    assert [label(evaluated, i) for i in range(4)] == ["F0", "F1", "F0", "F1"]
    assert len(executed) == len(after)


@pytest.mark.parametrize(
    ("further_deaths", "text"),
    [
        ([0, 1], "0 more hosts of each stage can fail without losing an optimizer shard"),
        ([1, 1], "1 more host of each stage can fail without losing an optimizer shard"),
        ([0, "spoilt"], None),
    ],
)
def test_a_run_shows_how_many_further_failures_keep_all_shards(
    run_dir: Path, further_deaths: list[object], text: str | None
) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 9.0, "kind": "shards", "step": 5, "further_deaths": further_deaths}) + "\n")
    facts = [fact for fact in RunPage(Workspace.from_sources([load_run(run_dir)])).facts() if "optimizer shard" in fact]
    assert facts == ([] if text is None else [text])


def test_the_table_of_plans_has_period_bound_gap_and_measured(run_dir: Path) -> None:
    run = load_run(run_dir)
    (table,) = of_type(plain(ReportPage(Workspace.from_sources([run])).plans_in_use()), "Tbody")
    rows = [words(row) for row in table["children"]]
    period = short(simulate(run.plan("bbbb1111"), PROFILE).period, 6)
    assert rows[1] == ["3 to 5", "without 1.1", "bbbb1111", "staggered", period, "–", "–", "212 ms"]
    assert rows[0][5:7] == ["–", "–"]  # the plan's bound is of other times


def test_a_run_without_new_lines_counts_as_stalled(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    path = make_run(tmp_path / "run", live=True)
    assert RunPage(Workspace.from_sources([load_run(path)])).facts()[-1] == "running"
    for file in path.rglob("*"):
        os.utime(file, (1e9, 1e9))
    assert RunPage(Workspace.from_sources([load_run(path)])).facts()[-1] == "ended early or stalled"


def test_a_live_run_is_followed_to_its_last_committed_step(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    path = make_run(tmp_path / "run", live=True)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:-2]))  # two steps more are in the logs
    page = RunPage(Workspace.from_sources([load_run(path)]))
    assert page.run.trace.steps[-1] == 8
    assert page.newest_step() == page.slider()["value"] == 6


def test_an_empty_run_has_pages_without_figures(empty_run_dir: Path) -> None:
    workspace = Workspace.from_sources([load_run(empty_run_dir)])
    page = RunPage(workspace)
    texts = words([plain(each) for each in (page.layout(), ReportPage(workspace).layout(), page.timelines(0)[0])])
    assert {"No step is committed yet.", "No iteration ran yet.", "Nothing has run yet."} <= set(texts)


def ticked(client: Any) -> dict[str, Any]:
    """What the page of a run sets at a tick."""
    inputs = [{"id": "run0-tick", "property": "n_intervals"}]
    (callback,) = [entry for entry in client.get("/_dash-dependencies").get_json() if entry["inputs"] == inputs]
    answer = client.post(
        "/_dash-update-component",
        json={
            "output": callback["output"],
            "outputs": [],
            "changedPropIds": ["run0-tick.n_intervals"],
            "inputs": [{**inputs[0], "value": 1}],
        },
    )
    response: dict[str, Any] = answer.get_json()["sideUpdate"]
    return response


def test_the_first_iteration_of_a_live_run_appears_on_the_open_page(
    tmp_path: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path / "run", live=True)
    (path / "logs").rename(path / "aside")
    metrics = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").unlink()
    client = build_app(load_sources([path])).server.test_client()
    (path / "aside").rename(path / "logs")
    (path / "metrics.jsonl").write_text(metrics)
    monkeypatch.setattr("viz.run.time.monotonic", lambda: 1e9)
    changed = ticked(client)
    assert (changed["run0-step"]["min"], changed["run0-step"]["max"]) == (0, 8)
    assert changed["run0-controls"] == {"className": "controls"}
    assert (changed["run0-newest"], "value" in changed["run0-step"]) == ({"data": [8, False]}, False)
    assert changed["run0-follow"] == {"className": ""}


@pytest.fixture
def times(run_dir: Path) -> ReportPage:
    return ReportPage(Workspace.from_sources([load_run(run_dir)]))


def test_iterations_and_changes_are_drawn_at_their_times(times: ReportPage) -> None:
    report = times.run.report
    figure = over_time_figure(report, times.run.metrics)
    seconds, _, loss, workers = figure.data
    assert list(seconds.x) == [line["time"] for line in times.run.metrics]
    assert list(workers.y) == [6, 6, 6, 5, 5, 5, 6, 6, 6]
    assert sum(seconds.y) == pytest.approx(report.measured)
    assert list(loss.y) == [line["loss"] for line in times.run.metrics]
    lines, bands = ([shape for shape in figure.layout.shapes if shape.type == kind] for kind in ("line", "rect"))
    assert [line.x0 for line in lines] == [change.time for change in report.changes]
    interrupted = [span for span in report.spans if span.part in INTERRUPTIONS and span.seconds > 1e-3 * report.wall]
    assert [(band.x0, band.x1) for band in bands] == [(span.start, span.end) for span in interrupted] != []
    assert [note.text for note in figure.layout.annotations] == [change.what for change in report.changes]


def test_the_bars_of_the_parts_continue_each_other_and_add_up(times: ReportPage) -> None:
    report, end = times.run.report, 0.0
    rows = part_rows(report)
    assert sum(float(row[2]) for row in rows) == pytest.approx(report.wall, abs=0.01)
    for _, ledger, *_ in rows:
        style = ledger.children[0].style
        assert float(style["marginLeft"].rstrip("%")) == pytest.approx(end, abs=0.002)
        end += float(style["width"].rstrip("%"))
    assert end == pytest.approx(100, abs=0.01)
    assert FILLS.keys() == set(TimePart)
    assert len({FILLS[part] for part in INTERRUPTIONS}) == len(INTERRUPTIONS)


def test_a_range_of_the_time_has_parts_that_add_up_to_it(times: ReportPage) -> None:
    report = times.run.report
    begin, end = 0.3 * report.wall, 0.8 * report.wall
    assert sum(clipped(report, begin, end).parts.values()) == pytest.approx(end - begin)
    assert clipped(report, -1.0, 2 * report.wall).parts == report.parts
    (title, *_) = words(plain(times.parts_of((begin, end))))
    assert title == f"Where the time went, from {short(begin)} to {short(end)} s"


@pytest.fixture
def folder(tmp_path: Path, make_run: Callable[..., Path]) -> Path:
    for place, (name, live) in enumerate((("old", False), ("new", True))):
        run = make_run(tmp_path / "runs" / name, live=live)
        os.utime(run, (1e9 + place, 1e9 + place))
    (tmp_path / "runs" / "latest").symlink_to("new")
    return tmp_path / "runs"


def test_a_row_has_the_figures_of_its_run(folder: Path) -> None:
    moment, steps, loss, seconds, speed, alive, failures = summary(folder / "new")
    assert str(moment).endswith(", not finished")
    assert (steps, speed, alive, failures) == (9, "1,000", 6, 1)
    assert float(str(loss)) == pytest.approx(5.5 * 2.718281828 ** (-8 / 20), rel=1e-4)
    assert float(str(seconds)) > 0
    (folder / "old" / "metrics.jsonl").write_text("{")
    (folder / "old" / "events.jsonl.tmp").symlink_to("gone")  # listed, and renamed before it is looked at
    assert summary(folder / "old")[1:3] == [0, None]
    assert summary(folder / "gone")[1:3] == [0, None]


def test_a_folder_that_is_gone_has_no_runs(folder: Path) -> None:
    page = RunsPage(Workspace(run_folders=[folder]))
    shutil.rmtree(folder)
    assert page.compared(["new"]) == of_type(plain(page.layout()), "Code") == []


def test_an_ended_run_is_read_again_once_it_is_resumed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, seconds = LiveRun(load_run(run_dir)), itertools.count(1e9, 1000.0)

    def read_again() -> Run:
        now = next(seconds)
        monkeypatch.setattr("viz.run_files.time.monotonic", lambda: now)
        live.refresh()
        return live.run

    ended, trace = live.run, (run_dir / "trace.json").read_bytes()
    assert read_again() is ended
    (run_dir / "trace.json").unlink()
    assert read_again().live
    (run_dir / "trace.json").write_bytes(trace)
    assert not read_again().live
    shutil.rmtree(run_dir)
    assert read_again().problems == [f"{run_dir}: no such run directory"]


def test_chosen_runs_are_drawn_over_one_time(folder: Path) -> None:
    page = RunsPage(Workspace(run_folders=[folder]))
    (card,) = page.compared(["new", "old", "other"])
    lines = graphs(plain(card))[0]["figure"]["data"]
    assert [line["name"] for line in lines] == ["new", "old"] * 4
    metrics = load_run(folder / "new").metrics
    times = [line["time"] for line in metrics]
    assert (lines[0]["x"], lines[0]["y"]) == (times, list(range(9)))
    assert lines[2]["y"] == [1000.0] * 9
    assert lines[4]["y"] == pytest.approx(np.diff(times).tolist())
    assert lines[6]["y"] == [line["loss"] for line in metrics]
    assert page.compared([]) == page.compared(["other"]) == []


def test_open_runs_have_a_button_and_others_a_command(folder: Path) -> None:
    workspace = Workspace.from_sources([load_run(folder / "new")], run_folders=[folder])
    pages = open_pages(workspace)
    assert [page.title for page in pages][:2] == ["Runs", "new"]
    assert isinstance(pages[0], RunsPage)
    component = plain(pages[0].layout())
    texts = words(component)
    (button,) = of_type(component, "Button")
    assert button["id"]["page"] == "run0"
    assert f"recycle view {folder / 'old'}" in texts
