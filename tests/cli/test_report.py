"""`recycle report`: what a run leaves is put to parts that add up, whole and cut off anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle.runs.read_report import load_report
from recycle.runs.report import TimePart
from tests.cli.command import Command
from tests.runs.test_report import assert_whole

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


@pytest.mark.process
def test_the_parts_of_a_real_run_add_up_whole_and_cut_off_anywhere(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    shown = command(f"report {run}").out
    assert "12 steps in" in shown
    assert "1.1 killed by SIGKILL" in shown
    (run / "trace.json").unlink()  # as a run that was killed leaves it
    for name in ("metrics.jsonl", "events.jsonl"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[: len(whole) // 2])
    assert_whole(load_report(run))
