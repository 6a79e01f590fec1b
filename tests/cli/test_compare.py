"""`recycle compare`: one JSON object or tables, and bad input refused in one line."""

from pathlib import Path

import pytest

from recycle.systems import SYSTEMS

JOB = "[shape]\npipelines = 3\nranks = 4\nmicro_batches = 6\n[memory]\nlimit = 12\n"


@pytest.fixture(autouse=True)
def files():
    Path("job.toml").write_text(JOB)
    Path("trace.csv").write_text("3600000,remove,n1\n7200000,add,n1\n9000000,remove,n2\n86400000,add,n2\n")


def test_all_systems_on_a_trace_with_their_schedules_after_a_failure(command):
    outcome = command("compare job.toml --trace trace.csv --save saved --json")
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
        stem = f"saved/{entry['name']}"
        assert command(f"check {stem}.json").status == 0
        timed = command(f"simulate {stem}.json --profile {stem}.profile.json --json").json
        rate = next(change["rate"] for change in entry["timeline"][1:])
        if entry["name"] != "sample_dropping":
            assert 18 / timed["period"] == pytest.approx(rate, rel=0.05)


def test_the_same_seed_generates_the_same_trace(command):
    options = "--systems oobleck --days 40 --rate 50 --json"
    once = command(f"compare job.toml {options} --seed 5").json
    assert once == command(f"compare job.toml {options} --seed 5").json
    assert once != command(f"compare job.toml {options} --seed 6").json


def test_more_traces_and_a_longer_pause(command):
    twice = command("compare job.toml --trace trace.csv --trace trace.csv --systems recycle --json").json
    assert [entry["trace"] for entry in twice["systems"]] == ["trace.csv"] * 2
    slow = command("compare job.toml --trace trace.csv --systems recycle --pause 76 --json").json
    assert slow["systems"][0]["lost"]["detect"] == 2 * 76
    assert slow["systems"][0]["goodput"] < twice["systems"][0]["goodput"]


def test_a_trace_with_fewer_failures_than_asked_for_is_named(command):
    late = command("compare job.toml --trace trace.csv --systems recycle --save saved --after 9")
    assert late.status == 0
    assert "recycle had fewer failures" in late.err
