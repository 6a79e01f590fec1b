"""A run directory is read as far as it can be read, its segments follow the membership, and its pages show them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recycle import RecycleError, Worker
from recycle.runs.logs import append_iteration, log_path
from recycle.runs.report import TimePart
from tests.viz.components import canvases, drawn, of_type, plain, words
from viz.app import build_app
from viz.figures.charts import FILLS, MARKS, over_time_figure, parts_figure
from viz.kinds import label
from viz.lanes import Flag
from viz.numbers import short
from viz.pages import open_pages
from viz.pages.page import Workspace
from viz.pages.report_page import ReportPage, changes_table, facts, part_rows
from viz.pages.run_page import RunPage
from viz.pages.runs_page import HEAD, RunsPage, summary
from viz.run import Run
from viz.run_files import LiveRun, load_run
from viz.sources import load_source

DEAD = (Worker(1, 1),)


def test_phases_are_the_stretches_between_changes(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert run.problems == []
    assert [(p.steps, p.plan, p.generation, p.failed) for p in run.segments] == [
        ("0 to 2", "aaaa0000", 0, ()),
        ("3 to 5", "bbbb1111", 1, DEAD),
        ("6 to 8", "aaaa0000", 2, ()),
    ]
    assert [(moment.title, moment.step) for moment in run.notable_steps] == [
        ("before the failure", 2),
        ("during the failure", 4),
        ("after the return", 7),
    ]


def test_a_step_that_was_broken_off_keeps_both_attempts(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert run.generations_of(3) == [0, 1]
    assert (run.plan_of(3, 0), run.plan_of(3)) == ("aaaa0000", "bbbb1111")
    assert run.failed_in(3, 0) == run.failed_in(3) == DEAD
    early, late, planned = run.executed(3, 0), run.executed(3), run.planned(3, 0)
    first, second = early.lanes, late.lanes
    assert len(first) < len(second)
    assert first.failed.tolist() == second.failed.tolist() == [False, False, False, True, False, False]
    assert not first.has(Flag.REROUTED).any()
    assert second.has(Flag.REROUTED).any()
    assert not planned.lanes.failed.any()


def test_figures_are_the_planners_own_or_simulated(run_dir: Path) -> None:
    run = load_run(run_dir)
    stated, simulated = run.figures("bbbb1111"), run.figures("aaaa0000")
    assert (stated.period, stated.lower_bound, stated.gap) == (11.0, 10.0, 0.1)
    assert simulated.period == pytest.approx(9.7)
    assert simulated.lower_bound is None
    assert run.measured(4, 4) == pytest.approx(0.0173 * stated.makespan, abs=1e-6)
    assert run.measured(3, 5) == pytest.approx(0.0173 * stated.makespan + 0.01, abs=1e-6)


def test_a_live_run_is_read_from_its_logs(tmp_path: Path, make_run: Callable[..., Path], run_dir: Path) -> None:
    live, finished = load_run(make_run(tmp_path / "live", live=True)), load_run(run_dir)
    assert (live.live, finished.live) == (True, False)
    for run in (live, finished):
        assert run.trace.steps == list(range(9))
    assert np.array_equal(live.trace.columns.kind, finished.trace.columns.kind)


def remove_plan(path: Path) -> str:
    (path / "plans" / "bbbb1111.json").unlink()
    return "bbbb1111.json: cannot be read"


def cut_plan(path: Path) -> str:
    plan = path / "plans" / "bbbb1111.json"
    plan.write_text(plan.read_text()[:200])
    return "bbbb1111.json: not valid JSON"


def break_job(path: Path) -> str:
    (path / "job.toml").write_text("[shape]\npipelines = 0\n")
    return "job.toml: "


def cut_trace(path: Path) -> str:
    trace = path / "trace.json"
    trace.write_text(trace.read_text()[:5000])
    return "trace.json: not valid JSON"


def spoil_metrics(path: Path) -> str:
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"loss": 1.0}\n{"step": 9, "lo')
    return "metrics.jsonl: a line without a step"


def spoil_log(path: Path) -> str:
    (path / "trace.json").unlink()
    line = {"step": 0, "generation": 0, "role": "0.0", "instructions": [["nonsense", 0, 1]]}
    (path / "logs" / "0.0.trace.jsonl").write_text(json.dumps(line) + "\n")
    return "0.0.trace.jsonl: line 1"


@pytest.mark.parametrize("damage", [remove_plan, cut_plan, break_job, cut_trace, spoil_metrics, spoil_log])
def test_damage_is_a_problem_and_the_rest_is_shown(run_dir: Path, damage: Callable[[Path], str]) -> None:
    message = damage(run_dir)
    run = load_run(run_dir)
    segments = run.segments
    assert [run.figures(segment.plan) is not None for segment in segments].count(True) >= 2
    assert any(message in problem for problem in run.problems)
    assert len(run.metrics) == 9
    assert [segment.steps for segment in segments] == ["0 to 2", "3 to 5", "6 to 8"]
    assert [segment.failed for segment in segments] == [(), DEAD, ()]
    assert (run.executed(4) is None) == (damage is spoil_log)


@pytest.mark.parametrize("name", ["../../outside", "/outside", "..", "", "bbbb1111/../../../outside", "BBBB1111", 7])
def test_a_plan_outside_of_the_run_is_not_loaded(run_dir: Path, name: object) -> None:
    shutil.copy(run_dir / "plans" / "bbbb1111.json", run_dir.parent / "outside.json")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    named = str(run_dir.parent / "outside") if name == "/outside" else name
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({**line, "plan": named}) + "\n" for line in lines))
    run = load_run(run_dir)
    assert run.plan(run.plan_of(8)) is None
    assert [problem for problem in run.problems if "is not the hash of a plan" in problem]


def test_without_generation_events_the_plan_says_who_is_dead(run_dir: Path) -> None:
    (run_dir / "events.jsonl").unlink()
    run = load_run(run_dir)
    assert [segment.failed for segment in run.segments] == [(), DEAD, ()]
    assert run.events == []


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "no such file or run directory"), (".", "holds a run; name it"), ("run/trace.json", "view its folder")],
)
def test_what_is_neither_is_refused_with_the_reason(run_dir: Path, name: str, message: str) -> None:
    with pytest.raises(RecycleError, match=message):
        load_source(run_dir.parent / name)


def test_a_folder_of_runs_names_them_and_the_link_to_the_newest_opens(run_dir: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(run_dir, runs / "one")
    with pytest.raises(RecycleError, match=r"runs: holds a run; name it: .*runs/one$"):
        load_source(runs)
    (runs / "latest").symlink_to("one")
    source = load_source(runs / "latest")
    assert isinstance(source, Run)
    assert source.path == runs / "one"
    for number in range(6):
        (runs / str(number) / "logs").mkdir(parents=True)
    with pytest.raises(RecycleError, match=r"runs: holds several runs; name those to see: .* and 2 more$"):
        load_source(runs)


@pytest.fixture
def page(run_dir: Path) -> RunPage:
    return RunPage(LiveRun(load_run(run_dir)))


def test_a_step_shows_planned_and_executed_with_the_failed_lane(page: RunPage) -> None:
    shown, options, attempt, hidden = page.timelines(4, None)
    assert (options, attempt, hidden) == ([{"label": "generation 1", "value": 1}], 1, "hidden")
    assert [view["data-name"] for view in canvases(plain(shown))] == ["run-planned", "run-executed"]
    for table in (lanes.table for lanes in drawn(page.cache, shown)):
        assert [table.labels[lane] for lane in np.flatnonzero(table.failed)] == ["1.1"]
        assert {"F1.0", "F1.1", "I1.0", "W1.1"} <= {label(table, i) for i in np.flatnonzero(table.has(Flag.REROUTED))}


def test_the_player_leads_along_steps_and_changes_and_stays_at_the_ends(page: RunPage) -> None:
    moves = ("step after", "step before", "change after", "change before")
    assert [page.moved(4, how) for how in moves] == [5, 3, 6, 3]
    assert [page.moved(8, how) for how in moves] == [8, 7, 8, 6]
    assert [page.moved(0, how) for how in moves] == [1, 0, 3, 0]
    assert page.moved(None, "step after") == 1


def test_an_evaluation_is_named_and_drawn_at_its_step(run_dir: Path) -> None:
    (run_dir / "trace.json").unlink()
    for batch in range(2):
        ran = [(f"0F0.{j}", 90.0 + 4 * batch + j, 90.5 + 4 * batch + j) for j in range(2)]
        append_iteration(log_path(run_dir, Worker(0, 0)), 4, 1, "0.0", ran, batch)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines[4]["eval_loss"] = 4.125
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = RunPage(LiveRun(load_run(run_dir)))
    assert "evaluation loss 4.125 after step 4" in page.facts()
    (_, executed, evaluated), (_, after) = (
        [shown.table for shown in drawn(page.cache, page.timelines(step, None)[0])] for step in (4, 5)
    )
    assert [label(evaluated, i) for i in range(4)] == ["F0", "F1", "F0", "F1"]
    assert len(executed) == len(after)


@pytest.mark.parametrize(
    ("deaths", "words"),
    [
        ([[1, 1], [0, 1]], "0 more hosts of stage 0 may die with no optimizer shard lost"),
        ([[0, 1], [1, 1]], "1 more host of each stage may die with no optimizer shard lost"),
        ([], None),
        ([[0, "spoilt"]], None),
    ],
)
def test_a_run_says_how_many_further_deaths_its_shards_bear(
    run_dir: Path, deaths: list[list[object]], words: str | None
) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        for each in deaths:
            file.write(json.dumps({"time": 9.0, "kind": "shards", "step": 5, "further_deaths": each}) + "\n")
    told = [fact for fact in RunPage(LiveRun(load_run(run_dir))).facts() if "optimizer shard" in fact]
    assert told == ([] if words is None else [words])


def test_a_step_tried_twice_offers_both_attempts(page: RunPage) -> None:
    _, options, attempt, hidden = page.timelines(3, None)
    assert options == [{"label": "generation 0 (broken off)", "value": 0}, {"label": "generation 1", "value": 1}]
    assert (attempt, hidden) == (1, "")
    shown, _, attempt, _ = page.timelines(3, 0)
    assert attempt == 0
    assert "Executed, step 3: 1.1 failed" in words(plain(shown))


def test_the_page_opens_during_the_failure(page: RunPage) -> None:
    slider = page.slider()
    assert (slider["min"], slider["max"], slider["value"]) == (0, 8, 4)
    assert slider["marks"] == {0: "0", 3: "3", 6: "6", 8: "8"}


def test_the_table_of_plans_has_period_bound_gap_and_measured(run_dir: Path) -> None:
    rows = RunPage(LiveRun(load_run(run_dir))).segment_rows()
    assert rows[1][:7] == ["3 to 5", "without 1.1", "bbbb1111", "staggered", 11.0, 10.0, "10 %"]
    assert rows[1][7] == "212 ms"
    assert rows[0][5:7] == [None, None]


def test_a_run_without_a_new_line_for_long_is_not_said_to_run(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    path = make_run(tmp_path / "run", live=True)
    assert RunPage(LiveRun(load_run(path))).facts()[-1] == "running"
    for file in path.rglob("*"):
        os.utime(file, (1e9, 1e9))
    assert RunPage(LiveRun(load_run(path))).facts()[-1] == "ended early, or stands still"


def test_a_live_run_is_followed_to_its_last_committed_step(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    path = make_run(tmp_path / "run", live=True)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:-2]))  # two steps more are in the logs
    page = RunPage(LiveRun(load_run(path)))
    assert page.run.trace.steps[-1] == 8
    assert page.newest() == page.slider()["value"] == 6


def test_an_empty_run_says_what_will_appear(run_dir: Path) -> None:
    for file in ("metrics.jsonl", "events.jsonl", "trace.json"):
        (run_dir / file).unlink()
    for log in (run_dir / "logs").iterdir():
        log.unlink()
    page = RunPage(LiveRun(load_run(run_dir)))
    texts = words(plain(page.layout()))
    assert "No step is committed yet." in texts
    assert "No plan is in use yet." in texts
    shown, *_ = page.timelines(0, None)
    assert "No iteration ran yet." in words(plain(shown))


def test_a_live_run_is_read_again(
    tmp_path: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path / "run", live=True)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:5]))
    page = RunPage(LiveRun(load_run(path)))
    (path / "metrics.jsonl").write_text("".join(lines))
    page.refresh()
    assert len(page.run.metrics) == 5
    monkeypatch.setattr("viz.run.time.monotonic", lambda: 1e9)
    page.refresh()
    assert len(page.run.metrics) == 9


def post(client: Any, output: str, changed: str, **values: Any) -> dict[str, Any]:
    """What the callback that sets `output` answers when `changed` did; `values` by component, without the prefix."""
    (callback,) = [entry for entry in client.get("/_dash-dependencies").get_json() if output in entry["output"]]
    names = (part.rsplit(".", 1) for part in callback["output"].strip(".").split("..."))
    outputs = [{"id": identifier, "property": name} for identifier, name in names]
    answer = client.post(
        "/_dash-update-component",
        json={
            "output": callback["output"],
            "outputs": outputs if callback["output"].startswith("..") else outputs[0],
            "changedPropIds": [changed],
            **{
                role: [{**entry, "value": values[entry["id"].removeprefix("run0-")]} for entry in callback[role]]
                for role in ("inputs", "state")
            },
        },
    )
    response: dict[str, Any] = answer.get_json()["response"]
    return response


def test_the_first_iteration_of_a_live_run_appears_by_itself(
    tmp_path: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path / "run", live=True)
    (path / "logs").rename(path / "aside")
    metrics = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").unlink()
    client = build_app([load_source(path)]).server.test_client()
    (path / "aside").rename(path / "logs")
    (path / "metrics.jsonl").write_text(metrics)
    monkeypatch.setattr("viz.run.time.monotonic", lambda: 1e9)
    follow: list[str] = ["follow"]
    changed = post(client, "run0-overview.children", "run0-tick.n_intervals", tick=1, began=False, follow=follow)
    assert changed["run0-began"] == {"data": True}
    assert (changed["run0-step"]["min"], changed["run0-step"]["max"]) == (0, 8)
    assert changed["run0-controls"] == {"className": "controls"}
    assert changed["run0-step"]["value"] == changed["run0-followed"]["data"] == 8
    assert changed["run0-follow"] == {"className": ""}
    again = post(client, "run0-overview.children", "run0-tick.n_intervals", tick=2, began=True, follow=[])
    assert "run0-began" not in again
    assert "value" not in again["run0-step"]
    stay = post(client, "run0-follow.value", "run0-step.value", step=3, followed=8)
    assert stay["run0-follow"] == {"value": []}


@pytest.fixture
def times(run_dir: Path) -> ReportPage:
    return ReportPage(LiveRun(load_run(run_dir)))


def test_iterations_throughput_and_workers_stand_at_their_times_with_the_changes_marked(times: ReportPage) -> None:
    report = times.run.report
    figure = over_time_figure(report, times.run.metrics, 6)
    seconds, tokens, workers = figure.data
    assert list(seconds.x) == [line["time"] for line in times.run.metrics]
    assert list(workers.y) == [6, 6, 6, 5, 5, 5, 6, 6, 6]
    assert list(tokens.y) == [1000.0] * 9
    assert sum(seconds.y) == pytest.approx(report.measured)
    failure, back = report.changes
    assert (failure.kind, failure.step, back.kind, back.step) == ("failure", 3, "re-join", 6)
    assert [shape.x0 for shape in figure.layout.shapes] == [failure.time, back.time]
    lines = [(shape.line.color, shape.line.dash) for shape in figure.layout.shapes]
    assert lines == [MARKS["failure"], MARKS["re-join"]]
    assert [note.text for note in figure.layout.annotations] == [failure.what, "1.1 re-joined"]


def test_the_bar_and_the_table_have_every_part_and_add_up(times: ReportPage) -> None:
    report = times.run.report
    bars = {bar.name: bar.x[0] for bar in parts_figure(report).data}
    assert sum(bars.values()) == pytest.approx(100)
    rows = part_rows(report)
    assert [row[0] for row in rows] == [part.value for part, seconds in report.parts.items() if seconds]
    assert sum(float(str(row[1])) for row in rows) == pytest.approx(report.wall, abs=0.01)
    assert set(bars) <= {row[0] for row in rows}
    assert len(set(FILLS.values())) == len(TimePart)


def test_a_change_has_a_row_with_what_it_cost(times: ReportPage) -> None:
    report = times.run.report
    head, rows = changes_table(report.changes)
    failure = dict(zip(head, rows[0], strict=True))
    assert failure["change"] == "failure"
    assert failure["redone"] == short(report.changes[0].costs[TimePart.REDONE])
    assert failure["all"] == f"{report.changes[0].seconds:.3f}"
    assert "1 failure" in facts(report)
    shown = " ".join(words(plain(times.layout())))
    assert "Where the time went" in shown
    assert "What changes cost, in seconds" in shown
    assert times.exported()


def test_a_run_that_has_committed_nothing_yet_says_so(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    path = make_run(tmp_path / "run", live=True)
    for name in ("metrics", "events"):
        (path / f"{name}.jsonl").write_text("")
    assert "Nothing has run yet." in words(plain(ReportPage(LiveRun(load_run(path))).layout()))


@pytest.fixture
def folder(tmp_path: Path, make_run: Callable[..., Path]) -> Path:
    for place, (name, live) in enumerate((("old", False), ("new", True))):
        run = make_run(tmp_path / "runs" / name, live=live)
        os.utime(run, (1e9 + place, 1e9 + place))
    (tmp_path / "runs" / "latest").symlink_to("new")
    return tmp_path / "runs"


def test_a_line_holds_the_figures_of_its_run(folder: Path) -> None:
    moment, steps, loss, seconds, speed, alive, failures = summary(folder / "new")
    assert str(moment).endswith(", not finished")
    assert (steps, speed, alive, failures) == (9, "1,000", 6, 1)
    assert float(str(loss)) == pytest.approx(5.5 * 2.718281828 ** (-8 / 20), rel=1e-4)
    assert float(str(seconds)) > 0
    (folder / "old" / "metrics.jsonl").write_text("{")
    assert summary(folder / "old")[1:3] == [0, None]


def test_runs_that_are_open_have_a_button_and_others_their_command(folder: Path) -> None:
    workspace = Workspace.of([load_run(folder / "new")], run_folders=[folder])
    pages = open_pages(workspace)
    assert [page.title for page in pages][:2] == ["Runs", "new"]
    assert isinstance(pages[0], RunsPage)
    component = plain(pages[0].layout())
    texts = words(component)
    assert texts[:2] == [f"Runs in {folder}", "The newest first."]
    assert texts[2 : 2 + len(HEAD) - 1] == list(HEAD[:-1])
    (button,) = of_type(component, "Button")
    assert button["id"]["page"] == "run0"
    assert f"recycle view {folder / 'old'}" in texts
