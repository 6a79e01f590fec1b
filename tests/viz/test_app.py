"""The pages answer their callbacks, serve everything themselves, and have something to say when there is nothing."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recycle import RecycleError, Schedule, Shape, Worker
from recycle.runs.logs import append_iteration, log_path
from tests.viz.components import graphs, of_type, plain, words
from viz.app import build_app, serve
from viz.kinds import label
from viz.lane_cache import LaneCache
from viz.lanes import Flag, LaneTable
from viz.pages.bench import SLOTS, slot_id
from viz.pages.run_page import RunPage
from viz.pages.schedule_page import SchedulePage
from viz.run_files import LiveRun, load_run
from viz.sources import load_source


def views(component: Any) -> list[dict[str, Any]]:
    """The timelines of a component."""
    if isinstance(component, list):
        return [view for part in component for view in views(part)]
    if not isinstance(component, dict) or "props" not in component:
        return []
    here = [component["props"]] if component["props"].get("className") == "lanes-view" else []
    return here + views(component["props"].get("children"))


def table_of(cache: LaneCache, view: dict[str, Any]) -> LaneTable:
    shown = cache.get(Path(view["data-address"]).stem)
    return shown.table


@pytest.fixture
def page(run_dir: Path) -> RunPage:
    return RunPage(LiveRun(load_run(run_dir)))


def test_a_step_shows_planned_and_executed_with_the_failed_lane(page: RunPage) -> None:
    shown, options, attempt, hidden = page.timelines(4, None)
    component = plain(shown)
    assert (options, attempt, hidden) == ([{"label": "generation 1", "value": 1}], 1, "hidden")
    for view in views(component):
        table = table_of(page.cache, view)
        assert [table.labels[lane] for lane in np.flatnonzero(table.failed)] == ["1.1"]
        assert {"F1.0", "F1.1", "I1.0", "W1.1"} <= {label(table, i) for i in np.flatnonzero(table.has(Flag.REROUTED))}
    assert graphs(component) == []  # lanes have axes of their own
    assert [view["data-name"] for view in views(component)] == ["run-planned", "run-executed"]


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
    shown = {step: views(plain(page.timelines(step, None)[0])) for step in (4, 5)}
    assert [len(at_step) for at_step in shown.values()] == [3, 2]
    executed, evaluated = (table_of(page.cache, view) for view in shown[4][1:])
    assert [label(evaluated, i) for i in range(4)] == ["F0", "F1", "F0", "F1"]
    assert len(executed) == len(table_of(page.cache, shown[5][1]))
    (curves,) = graphs(plain(page.overview()))
    (losses,) = [trace for trace in curves["figure"]["data"] if trace["name"] == "evaluation loss"]
    assert (list(losses["x"]), list(losses["y"])) == ([4], [4.125])


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
    assert words(plain(page.notable_steps())) == [
        "before the failure: step 2",
        "during the failure: step 4",
        "after the return: step 7",
    ]


def test_the_table_of_plans_has_period_bound_gap_and_measured(run_dir: Path) -> None:
    rows = RunPage(LiveRun(load_run(run_dir))).segment_rows()
    assert rows[1][:7] == ["3 to 5", "without 1.1", "bbbb1111", "staggered", 11.0, 10.0, "10 %"]
    assert rows[1][7] == "212 ms"
    assert rows[0][5:7] == [None, None]


def test_the_table_of_plans_says_which_steps_had_a_barrier(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines[3]["mode"] = "barrier"
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = RunPage(LiveRun(load_run(run_dir))).segment_rows()
    assert [row[3] for row in rows] == ["staggered", "staggered in 2 steps, barrier in 1 step", "staggered"]


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


def test_problems_stand_above_what_can_be_drawn(run_dir: Path) -> None:
    (run_dir / "plans" / "bbbb1111.json").write_text("{")
    page = RunPage(LiveRun(load_run(run_dir)))
    texts = words(plain(page.overview()))
    assert texts[0] == "1 problem"
    assert "bbbb1111.json" in texts[1]
    shown, *_ = page.timelines(4, None)
    assert "The plan bbbb1111 of step 4 cannot be read." in words(plain(shown))
    assert len(views(plain(shown))) == 1


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


def test_schedules_share_one_time_axis_and_compare_figures(
    tmp_path: Path, schedule_file: Path, healthy: Schedule
) -> None:
    healthy.save(tmp_path / "healthy.json")
    page = SchedulePage([load_source(schedule_file), load_source(tmp_path / "healthy.json")])
    component = plain(page.timelines())
    assert {view["data-linked"] for view in views(component)} == {"schedules"}
    assert [view["data-span"] for view in views(component)] == ["11.0"] * 2
    head, rows = page.figures()
    assert head == ["", "broken.json", "healthy.json"]
    named = {row[0]: row[1:] for row in rows}
    assert (named["makespan"], named["period"], named["peak memory"]) == (["11", "9"], ["11", "9"], ["2", "2"])
    assert named["bound"] == ["10 (gap 10 %)", None]


def test_a_schedule_that_deadlocks_is_drawn_until_it_hangs(tmp_path: Path) -> None:
    shape = Shape(pipelines=1, ranks=2, micro_batches=1)
    stuck = Schedule.from_text(shape, {"0.0": "0B0.0 0F0.0", "0.1": "1F0.0 1B0.0"})
    stuck.save(tmp_path / "stuck.json")
    page = SchedulePage([load_source(tmp_path / "stuck.json")])
    texts = words(plain(page.layout()))
    assert any("deadlocks" in text and "shown until it hangs" in text for text in texts)
    assert len(views(plain(page.timelines()))) == 1
    assert {row[0]: row[1] for row in page.figures()[1]}["largest bubble"] is None


def test_the_application_serves_itself_and_names_no_other_host(run_dir: Path, schedule_file: Path) -> None:
    app = build_app([load_source(run_dir), load_source(schedule_file)])
    client = app.server.test_client()
    page = client.get("/").get_data(as_text=True)
    assert "http://" not in page
    assert "https://" not in page
    assert client.get("/assets/style.css").status_code == 200
    layout = client.get("/_dash-layout").get_json()
    main = layout["props"]["children"][1]
    assert [tab["label"] for tab in of_type(main, "Tab")] == [
        "run",
        "Time of run",
        "broken.json",
        "Compare",
        "Validate",
    ]
    places = [part for part in of_type(main, "Div") if part.get("className") == "mode"]
    assert {part["data-page"] for part in places if part["children"]} == {"run0"}  # others fill theirs when opened
    named = ("run0", "time0", "schedules", "compare", "validate")
    outputs = [[{"id": slot_id(slot, page), "property": "children"} for page in named] for slot in SLOTS]
    kinds = "...".join(f'{{"page":["ALL"],"type":"mode-{slot}"}}.children' for slot in SLOTS)
    request = {
        "output": f"..{kinds}...opened.data..",
        "outputs": [*outputs, {"id": "opened", "property": "data"}],
        "inputs": [{"id": "pages", "property": "value", "value": "validate"}],
        "state": [{"id": "opened", "property": "data", "value": ["run0"]}],
        "changedPropIds": ["pages.value"],
    }
    answer = client.post("/_dash-update-component", json=request).get_json()["response"]
    assert answer.pop("opened")["data"] == ["run0", "validate"]
    assert {json.loads(key)["page"] for key in answer} == {"validate"}


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


def test_a_port_in_use_is_one_clear_line(run_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RecycleError, match=rf"port {port} is in use: give another with --port"):
            serve(build_app([load_source(run_dir)]), port)
    with pytest.raises(RecycleError, match="port 70000 cannot be used"):
        serve(build_app([load_source(run_dir)]), 70000)


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
