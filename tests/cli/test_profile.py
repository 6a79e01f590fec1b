"""`recycle profile`: what it prints and writes, and what it refuses before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle import Profile
from tests.cli.command import Command

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
def job() -> None:
    Path("job.toml").write_text(EMULATED)


def test_a_job_is_measured_and_the_file_is_one_to_plan_with(command: Command, tmp_path: Path) -> None:
    outcome = command("profile job.toml -o p.json --repeats 2")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    titles = "stage forward input weight reduce step message activation static"
    assert lines[1].split() == titles.split()
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[-1].startswith("p.json: written, hash ")
    found = Profile.load("p.json")
    assert all(seconds >= 0.002 for seconds in found.per_stage("forward", 2))
    Path("with.toml").write_text(EMULATED.replace("[planner]", '[times]\nprofile = "p.json"\n[planner]'))
    planned = command("plan with.toml --json").json
    assert planned["period"] > 0.012
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_json_is_one_object_that_holds_the_profile(command: Command) -> None:
    told = command("profile job.toml -o p.json --repeats 2 --json").json
    assert told["profile"] == json.loads(Path("p.json").read_text())
    assert told["hash"] == Profile.load("p.json").digest()


def test_a_run_is_held_against_its_plan(command: Command) -> None:
    assert command("train job.toml --run run").status == 0
    outcome = command("profile run -o ran.json")
    assert outcome.status == 0
    assert outcome.out.splitlines()[0] == "seconds executed / planned"
    assert "2 ms" in outcome.out.splitlines()[2]
    assert "executed period" in outcome.out
    told = command("profile run -o ran.json --json").json
    assert told["planned_period"] == pytest.approx(0.012, rel=0.2)
    assert told["period"] / told["planned_period"] - 1 == pytest.approx(told["period_error"], abs=1.0)
    assert Profile.load("ran.json").per_stage("backward_weight", 2)[0] >= 0.002
