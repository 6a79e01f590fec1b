"""`recycle profile` and `recycle report`: measured profiles, and the parts of a run's time."""

import json
from pathlib import Path

import pytest

from recycle import Profile
from recycle.runs.metrics import RUN_METRICS
from recycle.runs.read_report import load_report
from recycle.runs.report import TimePart
from tests.runs.test_report import assert_whole

pytestmark = pytest.mark.process

EMULATED = """
[shape]
pipelines = 2
ranks = 2
micro_batches = 2
[planner]
seconds = 1
[model]
kind = "emulated"
seconds_per_unit = 0.002
[train]
steps = 5
"""


@pytest.fixture(autouse=True)
def job():
    Path("job.toml").write_text(EMULATED)


def test_measured_profile_can_be_planned_with(command, tmp_path):
    outcome = command("profile job.toml -o p.json --repeats 2")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    titles = "stage forward input weight reduce step message activation static"
    assert lines[1].split() == titles.split()
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[-1].startswith("p.json: written, hash ")
    measured = Profile.load("p.json")
    assert all(seconds >= 0.002 for seconds in measured.per_stage("forward", 2))
    Path("with.toml").write_text(EMULATED.replace("[planner]", '[times]\nprofile = "p.json"\n[planner]'))
    planned = command("plan with.toml --json").json
    assert planned["period"] > 0.012
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_executed_profile_is_compared_with_the_plan(command):
    assert command("train job.toml --run run").status == 0
    outcome = command("profile run -o ran.json")
    assert outcome.status == 0
    ran = Profile.load("ran.json")
    assert outcome.out.splitlines()[0] == "seconds executed / planned"
    assert "2 ms" in outcome.out.splitlines()[2]
    assert "executed period" in outcome.out
    printed = command("profile run -o ran.json --json").json
    assert (printed["profile"], printed["hash"]) == (json.loads(Path("ran.json").read_text()), ran.digest())
    assert printed["planned_period"] == pytest.approx(0.012, rel=0.2)
    assert printed["period"] / printed["planned_period"] - 1 == pytest.approx(printed["period_error"], abs=1.0)
    assert ran.per_stage("backward_weight", 2)[0] >= 0.002


JOB = """
[shape]
pipelines = 2
ranks = 2
micro_batches = 2
[planner]
seconds = 1
[model]
kind = "emulated"
seconds_per_unit = 0.01
[train]
steps = 12
checkpoint_every = 4
clip = 1e9
[membership]
drift = 0.0
"""


def test_report_parts_of_a_real_run_add_up(command, tmp_path, monkeypatch):
    monkeypatch.setenv("RECYCLE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "job.toml").write_text(JOB)
    run = tmp_path / "run"
    faults = "--fault kill:1.1@3 --fault rejoin:1.1@6 --fault nan:0.0@9"
    assert command(f"train job.toml --run {run} {faults}").status == 0
    report = load_report(run)
    assert_whole(report)
    assert [(change.kind, change.step) for change in report.changes] == [
        ("failure", 3),
        ("re-join", 6),
        ("repetition", 9),
    ]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    assert last <= report.wall < last + 5
    parts = report.parts
    assert all(
        parts[part] > 0
        for part in (TimePart.USEFUL, TimePart.WAITING, TimePart.REDONE, TimePart.FORMING, TimePart.MOVING)
    )
    # What was emulated is known: (F + I + W) of 2 micro-batches on the mean of the live workers.
    shares = [4 / line["live_workers"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    assert 0.95 < parts[TimePart.USEFUL] / (sum(shares) * 6 * 0.01) < 2.0  # a machine with too much to do sleeps longer
    assert report.expected is not None
    printed = command(f"report {run} --json").json
    assert sum(printed["parts"].values()) == pytest.approx(printed["wall"], rel=1e-5)
    assert printed["steps"] == 12
    metrics = command(f"report {run} --prometheus").out.splitlines()
    assert f'recycle_wall_seconds{{run="run"}} {report.wall}' in metrics
    assert f'recycle_part_seconds{{part="redone",run="run"}} {parts[TimePart.REDONE]}' in metrics
    assert sum(line.startswith("# TYPE ") for line in metrics) == len(RUN_METRICS)
    shown = command(f"report {run}").out
    assert "12 steps in" in shown
    assert "1.1 killed by SIGKILL" in shown
    (run / "trace.json").unlink()  # as a run that was killed leaves it
    for name in ("metrics.jsonl", "events.jsonl"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) // 2])
    assert_whole(load_report(run))
