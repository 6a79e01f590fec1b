"""What can be compared, and how executed steps and plans come onto one clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recycle import RecycleError, Schedule
from viz.operands import Operands, on_one_axis
from viz.run_files import load_run
from viz.sources import load_source, schedule_source


@pytest.fixture
def operands(run_dir: Path, tmp_path: Path, healthy: Schedule, schedule_file: Path) -> Operands:
    healthy.save(tmp_path / "healthy.json")
    return Operands(lambda: [load_source(tmp_path / "healthy.json"), load_source(schedule_file), load_run(run_dir)])


def test_files_plans_and_executed_steps_are_offered(operands: Operands) -> None:
    titles = list(operands.choices().values())
    assert titles[:4] == [
        "healthy.json",
        "broken.json",
        "run: plan of steps 0 to 2, all workers",
        "run: plan of steps 3 to 5, without 1.1",
    ]
    assert titles[-1] == "run: executed step 8"
    assert len(operands.choices()) == len(set(titles))
    assert operands.first_choice() == ["file/0", "file/1"]


def test_a_run_alone_is_compared_with_its_plan_during_the_failure(run_dir: Path) -> None:
    assert Operands(lambda: [load_run(run_dir)]).first_choice() == ["plan/0/bbbb1111", "step/0/4"]


def test_files_alone_keep_their_units(operands: Operands) -> None:
    both, said = on_one_axis([operands.get("file/0"), operands.get("file/1")])
    assert said == []
    assert [one.timeline.makespan for one in both] == [9.0, 11.0]
    assert both[0].lanes.unit == ""


def test_a_plan_is_stretched_to_the_clock_of_what_ran_and_that_is_said(operands: Operands) -> None:
    both, said = on_one_axis([operands.get("plan/2/bbbb1111"), operands.get("step/2/4")])
    assert both[0].timeline.makespan == pytest.approx(both[1].timeline.makespan, rel=1e-6)
    assert "1 unit = 0.0173 s; both from their first start" in said[0]
    assert "transfers none was used before it was sent; clocks may disagree by up to 1.73 ms" in said[1]


def test_a_step_of_clocks_that_disagree_is_refused(run_dir: Path) -> None:
    run = load_run(run_dir)
    ahead = np.isin(run.trace.process, [2, 3])
    run.trace = replace(run.trace, start=run.trace.start + 5.0 * ahead, end=run.trace.end + 5.0 * ahead)
    operands = Operands(lambda: [run])
    with pytest.raises(RecycleError, match="clocks of this trace's workers are not aligned"):
        on_one_axis([operands.get("plan/0/bbbb1111"), operands.get("step/0/4")])


def test_a_key_of_somewhere_else_is_refused(operands: Operands) -> None:
    for key in ("file/7", "step/2/99", "../../etc/passwd", ""):
        with pytest.raises(RecycleError, match="is not there to be compared"):
            operands.get(key)


def test_memory_limits_come_from_the_plan_else_from_the_job(run_dir: Path, tmp_path: Path, healthy: Schedule) -> None:
    (run_dir / "job.toml").write_text((run_dir / "job.toml").read_text() + "[memory]\nlimit = [2, 1]\n")
    files = [("limited", [3, 2.5]), ("other", [1]), ("odd", [True, "x"]), ("none", None)]
    sources = [schedule_source(Path(name), healthy.with_metadata(limits=limits)) for name, limits in files]
    operands = Operands(lambda: [*sources, load_run(run_dir)])
    assert [operands.get(f"file/{place}").explainer.limits for place in range(4)] == [(3.0, 2.5), None, None, None]
    assert operands.get("step/4/4").explainer.limits == (2.0, 1.0)
    assert operands.get("plan/4/aaaa0000").explainer.limits == (2.0, 1.0)
