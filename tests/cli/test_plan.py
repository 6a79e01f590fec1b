import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recycle.cli import main
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import Job
from recycle.plans import PlanLibrary
from recycle.profile import Profile
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


def test_the_library_shows_throughput_against_fault_free_and_against_the_share_alive(run, tmp_path):
    _, out, _ = run(TINY, "--failures", 2, "--library", tmp_path / "plans", "--json")
    rows = json.loads(out)["table"]
    assert json.loads(out)["complete"] is True
    assert [row["failures"] for row in rows] == [0, 1, 1, 2, 2, 2]
    one = rows[1]
    assert (one["period"], one["throughput"], one["of_ideal"]) == (9, 7 / 9, 7 / 9 / (5 / 6))
    _, out, _ = run(TINY, "--failures", 2, "--library", tmp_path / "plans")
    (line,) = [line for line in out.splitlines() if line.startswith("1 0 ")]
    assert line.split()[:2] == ["1", "0"]
    assert {"77.8%", "93.3%", "9"} <= set(line.split())


def test_where_all_vectors_are_too_many_that_is_said(run):
    wide = "[shape]\npipelines = 6\nranks = 6\nmicro_batches = 1\n[planner]\nsteps = 1\n"
    status, out, _ = run(wide, "--failures", 9, "--processes", 1, "--json")
    planned = json.loads(out)
    assert (status, planned["complete"]) == (0, False)
    vectors = [tuple(p["vector"]) for p in planned["plans"]]
    assert len(vectors) < 200
    assert {(k,) * 6 for k in range(6)} <= set(vectors)
    assert {sum(vector) for vector in vectors} >= set(range(10))


def test_a_new_profile_says_what_is_stale_and_plans_that_again(run, tmp_path):
    text = WORKED_EXAMPLE.replace("400000", "3000").replace("limit = 6", "limit = 4")
    run(text, "--failures", 1, "--library", tmp_path / "plans")
    Profile(forward=[1.0, 1.0, 1.0, 3.0], backward_weight=[1.0, 1.0, 0.2, 1.0]).save(tmp_path / "new.json")
    arguments = ["--library", tmp_path / "plans", "--profile", tmp_path / "new.json"]
    status, out, _ = run(text, *arguments, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["threshold"] == 0.02
    assert [p["vector"] for p in found["plans"]] == [d["vector"] for d in sorted(found["drift"], key=_by_failures)]
    for drift in found["drift"]:
        assert drift["growth"] == pytest.approx(drift["period"] / drift["lower_bound"] - 1 - drift["stored_gap"])
        assert drift["stale"] == (drift["growth"] > 0.02)
        assert drift["period_now"] <= drift["period"]
        assert drift["stale"] or drift["period_now"] == drift["period"]
    assert {drift["stale"] for drift in found["drift"]} == {True, False}
    assert json.loads(run(text, *arguments, "--json")[1])["drift"] == []
    _, out, _ = run(text, "--library", tmp_path / "plans", "--profile", tmp_path / "new.json", "--failures", 1)
    assert "all plans are of this profile" in out
    run(text, "--failures", 1, "--library", tmp_path / "plans")  # back to unit times
    _, out, _ = run(text, *arguments)
    assert "of 5 plans made for another profile are stale (gap grown by more than 2.0%)" in out
    assert {line.split()[-2] for line in out.splitlines()[2:7]} <= {"stale", "kept"}


def _by_failures(drift):
    return sum(drift["vector"]), drift["vector"]


def test_a_worker_that_changes_stage_is_named_with_what_it_copies(run, tmp_path):
    Profile(static=[8.0, 24.0, 8.0, 8.0], bandwidth=1.0).save(tmp_path / "bytes.json")
    text = "[shape]\npipelines = 4\nranks = 4\nmicro_batches = 8\n[memory]\nlimit = 7\n[planner]\nsteps = 200\n"
    arguments = ["--failed", "0.1,1.1", "--profile", tmp_path / "bytes.json", "-o", tmp_path / "plan.json"]
    stays = json.loads(run(text, *arguments, "--json")[1])
    assert (stays["vector"], stays["period"], stays["moves"]) == ([0, 2, 0, 0], 48, [])
    moved = json.loads(run(text, *arguments, "--move", "--json")[1])
    assert moved["period"] == 33
    (move,) = moved["moves"]
    assert move["role"] in ("0.1", "1.1")
    assert move["source"] in ("2.1", "3.1")
    assert move["bytes"] == 24
    assert f"{move['worker']} takes over {move['role']}: copies 24 bytes" in run(text, *arguments, "--move")[1]
    assert {str(worker) for worker in Schedule.load(tmp_path / "plan.json").failed} == (
        {"0.1", "1.1", move["worker"]} - {move["role"]}
    )


def test_ctrl_c_keeps_what_is_planned(tmp_path):
    (tmp_path / "job.toml").write_text(WORKED_EXAMPLE.replace("400000", "400000000").replace("limit = 6", "limit = 4"))
    arguments = ["plan", "job.toml", "--failures", "1", "--library", "plans", "--processes", "2"]
    code = f"import sys; from recycle.cli import main; main({arguments!r})"
    environment = {**os.environ, "RECYCLE_CACHE": str(tmp_path / "cache")}
    running = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    job = Job.load(tmp_path / "job.toml")
    deadline = time.monotonic() + 60
    while len(PlanLibrary(tmp_path / "plans", job).vectors()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130
    assert said == "recycle: interrupted; what was planned is kept in plans: run it again to go on\n"
    assert len(list(PlanLibrary(tmp_path / "plans", job).plans())) == 5


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
        (TINY + "[planner]\nseconds = 0.001\n", [], "[planner] seconds: expected `float` >= 0.01"),
        (TINY + "[times]\nforward = -1\n", [], "[times] forward: must be finite and at least 0, got -1"),
        (TINY + "[times]\nforward = [1, -2]\n", [], "[times] forward: stage 1 must be finite and at least 0, got -2"),
        (TINY + "[times]\nbackward_input = [1, 0]\n", [], "[times] backward_input: stage 1 takes 0"),
        (TINY, ["--failures", "1", "--within", "0"], "--within: must be above 0"),
        (TINY, ["--failures", "1", "--within", "1e-9"], "1e-09 seconds are too few: 3 of 3 vectors have no plan"),
        (TINY, ["--failures", "1", "--processes", "0"], "--processes: must be at least 1"),
        (TINY, ["--library", "nowhere", "--profile", "none.json"], "none.json: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, text, arguments, message):
    status, out, err = run(text, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_memory_that_one_micro_batch_does_not_fit_into_names_the_stage(run, tmp_path):
    Profile(activation=[1e9, 1e9], static=[1e9, 5e9]).save(tmp_path / "bytes.json")
    text = TINY.replace("limit = 3", 'limit = "4 GB"') + f'[times]\nprofile = "{tmp_path / "bytes.json"}"\n'
    status, out, err = run(text)
    assert (status, out) == (2, "")
    assert err == (
        "recycle: [memory] limit: stage 1 has memory for 0 activations beside its static bytes, and one micro-batch"
        " needs 1; raise the limit\n"
    )


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    assert "recycle plan job.toml --failed 1.2 -o plan.json" in capsys.readouterr().out


def test_ctrl_c_ends_a_search_with_the_best_plan_so_far(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text("[shape]\npipelines = 8\nranks = 8\nmicro_batches = 32\n[memory]\nlimit = 8\n")
    script = Path(sys.executable).parent / "recycle"
    command = [script, "plan", job, "--failed", "1.4", "-o", tmp_path / "p.json"]
    terminal, inside = os.openpty()  # the terminal shows when the search has begun
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=inside)
    os.close(inside)
    shown = b""
    while b"searching" not in shown:
        shown += os.read(terminal, 4096)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(25) == 0
    os.close(terminal)
    made = Schedule.load(tmp_path / "p.json")
    assert made.metadata["seconds"] < 25
    assert 112 <= made.metadata["period"] <= 117
