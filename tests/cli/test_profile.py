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


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECYCLE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "job.toml"
    path.write_text(EMULATED)
    return path


def test_a_job_is_measured_and_the_file_is_one_to_plan_with(command: Command, job: Path, tmp_path: Path) -> None:
    outcome = command("profile", job, "-o", "p.json", "--repeats", "2")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[1].split() == [
        "stage",
        "forward",
        "input",
        "weight",
        "reduce",
        "step",
        "message",
        "activation",
        "static",
    ]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[-1].startswith("p.json: written, hash ")
    found = Profile.load("p.json")
    assert all(seconds >= 0.002 for seconds in found.per_stage("forward", 2))
    (tmp_path / "with.toml").write_text(EMULATED.replace("[planner]", '[times]\nprofile = "p.json"\n[planner]'))
    planned = command("plan", "with.toml", "--json").json
    assert planned["period"] > 0.012
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_json_is_one_object_that_holds_the_profile(command: Command, job: Path) -> None:
    told = command("profile", job, "-o", "p.json", "--repeats", "2", "--json").json
    assert told["profile"] == json.loads(Path("p.json").read_text())
    assert told["hash"] == Profile.load("p.json").digest()


def test_a_run_is_held_against_its_plan(command: Command, job: Path) -> None:
    assert command("train", job, "--run", "run").status == 0
    outcome = command("profile", "run", "-o", "ran.json")
    assert outcome.status == 0
    assert outcome.out.splitlines()[0] == "seconds executed / planned"
    assert "2 ms" in outcome.out.splitlines()[2]
    assert "executed period" in outcome.out
    told = command("profile", "run", "-o", "ran.json", "--json").json
    assert told["planned_period"] == pytest.approx(0.012, rel=0.2)
    assert told["period"] / told["planned_period"] - 1 == pytest.approx(told["period_error"], abs=1.0)
    assert Profile.load("ran.json").per_stage("backward_weight", 2)[0] >= 0.002


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["job.toml", "-o", "nowhere/p.json"], ["nowhere/p.json: cannot be written", "does not exist"]),
        (["job.toml", "-o", "."], [".: cannot be written", "not a regular file"]),
        (["job.toml", "-o", "p.json", "--repeats", "0"], ["--repeats", "at least 1"]),
        (["missing.toml", "-o", "p.json"], ["missing.toml", "cannot be read"]),
        ([".", "-o", "p.json"], ["is no run directory", "job.toml"]),
        (["wide.toml", "-o", "p.json"], ["tensor_parallel"]),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str], words: list[str], command: Command, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide.toml").write_text(EMULATED.replace("ranks = 2", "ranks = 2\ntensor_parallel = 2"))
    if arguments[0] == ".":
        job.unlink()
    assert command("profile", *arguments).refused(*words)
    assert not (tmp_path / "p.json").exists()
