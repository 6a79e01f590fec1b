import json

import pytest

from recycle.cli import main
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.shape import Worker

TINY = """
[shape]
pipelines = 3
ranks = 2
micro_batches = 2
[memory]
limit = 3
"""
WORKED_EXAMPLE = """
[shape]
pipelines = 3
ranks = 4
micro_batches = 6
[memory]
limit = 6
[planner]
steps = 400000
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `recycle plan JOB ...` and gives (exit status, standard output, standard error)."""
    monkeypatch.setenv("RECYCLE_CACHE", str(tmp_path / "cache"))

    def call(text, *arguments):
        path = tmp_path / "job.toml"
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["plan", str(path), *map(str, arguments)])
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


def test_the_worked_example_is_planned_in_the_names_that_were_given(run, tmp_path):
    status, out, _ = run(WORKED_EXAMPLE, "--failed", "1.2", "-o", tmp_path / "plan.json", "--json")
    planned = json.loads(out)
    assert status == 0
    assert planned["vector"] == [0, 0, 1, 0]
    assert (planned["period"], planned["lower_bound"], planned["gap"], planned["moves"]) == (27, 27, 0, [])
    assert set(planned) == {"vector", "makespan", "period", "lower_bound", "gap", "seconds", "moves"}
    schedule = Schedule.load(tmp_path / "plan.json")
    assert schedule.failed == {Worker(1, 2)}
    assert simulate(schedule).period == 27
    assert max(filter(None, simulate(schedule).peak_activations)) <= 6


def test_a_table_shows_period_bound_and_gap(run):
    status, out, _ = run(TINY, "--failed", "0.0,1.1")
    assert status == 0
    assert "period" in out
    assert "1 1" in out
    assert "optimal" in out


def test_a_library_is_written_and_re_used(run, tmp_path):
    status, out, _ = run(TINY, "--failures", 1, "--library", tmp_path / "plans", "--json")
    assert status == 0
    assert [(p["vector"], p["period"]) for p in json.loads(out)["plans"]] == [([0, 0], 7), ([1, 0], 9), ([0, 1], 9)]
    named = {row["file"] for row in json.loads(out)["table"]}
    assert {p.name for p in (tmp_path / "plans").glob("*.json")} == {*named, "manifest.json"}
    assert len(named) == 3
    assert run(TINY, "--failures", 1, "--library", tmp_path / "plans", "--json")[1] == out  # seconds are those kept
    one = json.loads(run(TINY, "--failed", "2.1", "--library", tmp_path / "plans", "--json")[1])
    assert one == json.loads(out)["plans"][2]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (TINY, ["--failed", "5.2"], "worker 5.2 is outside the grid"),
        (TINY, ["--failed", "one"], "'one' is not a worker"),
        (TINY, ["--failed", "0.0", "--failures", "1"], "--failed or --failures, not both"),
        (TINY, ["--failures", "-1"], "must be at least 0"),
        (TINY, ["--failures", "1", "-o", "x.json"], "--library DIR instead of -o"),
        (TINY, ["--failures", "1", "--library", "/proc/plans"], "/proc/plans: "),
        (TINY, ["-o", "/no/such/folder/plan.json"], "/no/such/folder"),
        (TINY, ["--failed", "0.1,1.1,2.1"], "no live worker is left for stage 1"),
        (TINY + "limits = 4\n", [], "limits"),
        (TINY.replace("limit = 3", "limit = 0"), [], "[memory] limit"),
        (TINY + "[planner]\nreroute = false\n", ["--failed", "0.1"], "reroute = true"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, text, arguments, message):
    status, out, err = run(text, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    assert "recycle plan job.toml --failed 1.2 -o plan.json" in capsys.readouterr().out
