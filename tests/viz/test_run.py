"""A run directory is read as far as it can be read, and its segments follow the membership."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recycle import RecycleError, Worker
from viz.lanes import Flag
from viz.run import Run
from viz.run_files import load_run
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
