"""`recycle compare`: one JSON object or tables, and bad input refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle.systems import SYSTEMS
from tests.cli.command import Command

JOB = "[shape]\npipelines = 3\nranks = 4\nmicro_batches = 6\n[memory]\nlimit = 12\n"

STILL = "forward = 0\nbackward_input = 0\nbackward_weight = 0\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("3600000,remove,n1\n7200000,add,n1\n9000000,remove,n2\n86400000,add,n2\n")
    return path


def test_all_systems_on_a_trace(command: Command, job: Path, trace: Path) -> None:
    outcome = command("compare", job, "--trace", trace, "--json")
    printed = outcome.json
    assert (outcome.status, outcome.err) == (0, "")
    assert [entry["name"] for entry in printed["systems"]] == list(SYSTEMS)
    assert printed["traces"][0]["failures"] == 2
    assert printed["traces"][0]["references"]["1f1b"]["goodput"] == pytest.approx(18 / 27)
    for entry in printed["systems"]:
        assert entry["fits"]
        assert entry["goodput"] <= entry["fault_free"]
        booked = entry["samples"] / entry["fault_free"] + sum(entry["lost"].values())
        assert booked == pytest.approx(86400)


def test_the_same_seed_generates_the_same_trace(command: Command, job: Path) -> None:
    options = ("--systems", "oobleck", "--days", "40", "--rate", "50", "--json")
    once = command("compare", job, *options, "--seed", "5").json
    assert once == command("compare", job, *options, "--seed", "5").json
    assert once != command("compare", job, *options, "--seed", "6").json


def test_tables_name_systems_and_references(command: Command, job: Path, trace: Path) -> None:
    outcome = command("compare", job, "--trace", trace, "--systems", "recycle,checkpoint_restart")
    assert outcome.status == 0
    for word in ("fault-free 1f1b", "fault-scaled zero-bubble", "recycle", "checkpoint_restart", "trace.csv"):
        assert word in outcome.out
    assert "oobleck" not in outcome.out


def test_more_traces_and_a_longer_pause(command: Command, job: Path, trace: Path) -> None:
    one = command("compare", job, "--trace", trace, "--trace", trace, "--systems", "recycle", "--json").json
    assert [entry["trace"] for entry in one["systems"]] == ["trace.csv"] * 2
    slow = command("compare", job, "--trace", trace, "--systems", "recycle", "--pause", "76", "--json").json
    assert slow["systems"][0]["lost"]["detect"] == 2 * 76
    assert slow["systems"][0]["goodput"] < one["systems"][0]["goodput"]


def test_what_runs_after_a_failure_can_be_saved_and_timed(
    command: Command, job: Path, trace: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    found = command("compare", job, "--trace", trace, "--save", folder, "--json").json
    for entry in found["systems"]:
        file = folder / f"{entry['name']}.json"
        assert command("check", file).status == 0
        timed = command("simulate", file, "--profile", folder / f"{entry['name']}.profile.json", "--json").json
        rate = next(change["rate"] for change in entry["timeline"][1:])
        if entry["name"] != "sample_dropping":
            assert 18 / timed["period"] == pytest.approx(rate, rel=0.05)
    late = command("compare", job, "--trace", trace, "--systems", "recycle", "--save", folder, "--after", "9")
    assert late.status == 0
    assert "recycle had fewer failures" in late.err


def test_bad_input_is_one_line(command: Command, job: Path, trace: Path, tmp_path: Path) -> None:
    still = tmp_path / "still.toml"
    still.write_text("[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n[times]\n" + STILL)
    assert command("compare", still, "--days", "0.1").refused("still.toml: [times]")
    assert command("compare", job, "--systems", "slipstream").refused("'slipstream' is not a system")
    assert command("compare", tmp_path / "none.toml").refused("none.toml")
    parts = tmp_path / "sharded.toml"
    parts.write_text(JOB + "[train]\nsharded_optimizer = true\n")
    assert command("compare", parts).refused("[train] sharded_optimizer: systems run other shapes", '"analytic"')
    bad = tmp_path / "bad.csv"
    bad.write_text("0,add,n1\n5,add,n1\n")
    assert command("compare", job, "--trace", bad).refused("bad.csv, line 2", "is there already")
    assert command("compare", job, "--trace", trace, "--population", "1").refused("more than the population")
