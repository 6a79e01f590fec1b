import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from recycle.cli import main
from recycle.ir.check import check
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import Job
from recycle.job.profile import Profile
from recycle.job.shape import Worker
from recycle.plans import PlanLibrary

TINY = """
[shape]
pipelines = 3
ranks = 2
micro_batches = 2
[memory]
limit = 3
"""
HUGE = "[shape]\npipelines = 2\nranks = 2\nmicro_batches = 4194304\n"
LARGE = "[shape]\npipelines = 64\nranks = 64\nmicro_batches = 128\n[planner]\nseconds = 5\n"
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


def test_plans_are_kept_in_the_cache_and_that_is_said_unless_it_is_refused(run, tmp_path):
    status, out, _ = run(TINY, "--failures", 1, "--no-cache")
    assert (status, "3 plans, kept nowhere; --library DIR keeps them" in out) == (0, True)
    assert not (tmp_path / "cache").exists()
    _, out, _ = run(TINY, "--failures", 1)
    assert "3 plans, kept in" in out
    assert len(list((tmp_path / "cache" / "plans").glob("*.json"))) == 3


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
    assert (one["lower_bound"], one["gap"], one["searched"]) == (9, 0, True)
    _, out, _ = run(TINY, "--failures", 2, "--library", tmp_path / "plans")
    (line,) = [line for line in out.splitlines() if line.startswith("1 0 ")]
    assert line.split()[:2] == ["1", "0"]
    assert {"77.8%", "93.3%", "9"} <= set(line.split())


def test_plans_that_were_not_searched_are_said_to_be_the_list_schedulers(run, tmp_path):
    text = WORKED_EXAMPLE.replace("steps = 400000", "seconds = 0.01").replace("limit = 6", "limit = 5")
    _, out, _ = run(text, "--failures", 1, "--library", tmp_path / "plans", "--json")
    rows = json.loads(out)["table"]
    hurried = [row for row in rows if not row["searched"]]
    assert [row for row in rows if row["gap"] > 0] == hurried != []
    _, out, _ = run(text, "--failures", 1, "--library", tmp_path / "plans")
    assert f"{len(hurried)} plans are the list scheduler's, made on the spot" in out


def test_units_of_a_worker_are_printed_as_ranges(run):
    """Three pipelines of two ranks with two chunks of two layers; whoever helps without 1.1 hosts other ranges."""
    text = "[shape]\npipelines = 3\nranks = 2\nchunks = 2\nmicro_batches = 4\n[memory]\nlimit = 16\nstate_limit = 1.5\n"
    text += '[model]\nlayers = 8\n[planner]\nsteps = 20\nlayout = "elastic"\n'
    status, out, _ = run(text, "--failed", "1.1")
    assert status == 0
    assert "0.0: 0-1 and 4-5, 0.1: 2-3 and 6-7" in out
    assert "takes on units" in out


def test_json_says_what_keeps_layers_in_place(run):
    text = "[shape]\npipelines = 2\nranks = 2\nmicro_batches = 4\n[model]\nlayers = 2\n"
    text += '[planner]\nsteps = 20\nlayout = "elastic"\n'
    status, out, _ = run(text, "--failed", "1.1", "--json")
    assert status == 0
    assert json.loads(out)["layout_limit"] == {
        "cause": "limits",
        "limits": [{"key": "memory.state_limit", "value": 1.25, "needed": 2.0}],
        "period": 18.0,
        "layers": [1, 2],
    }
    _, out, _ = run(text + "[memory]\nstate_limit = 2.0\n", "--failed", "1.1", "--json")
    raised = json.loads(out)
    assert raised["period"] == 18.0
    assert raised["moves"]
    assert "layout_limit" not in raised


@pytest.mark.soak
@pytest.mark.search
def test_where_all_vectors_are_too_many_that_is_said(run):
    wide = "[shape]\npipelines = 6\nranks = 6\nmicro_batches = 1\n[planner]\nsteps = 1\n"
    status, out, _ = run(wide, "--failures", 9, "--processes", 1, "--json")
    planned = json.loads(out)
    assert (status, planned["complete"]) == (0, False)
    vectors = [tuple(p["vector"]) for p in planned["plans"]]
    assert len(vectors) < 200
    assert {(k,) * 6 for k in range(6)} <= set(vectors)
    assert {sum(vector) for vector in vectors} >= set(range(10))


@pytest.mark.soak
@pytest.mark.search
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


@pytest.mark.slow
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


@pytest.mark.process
def test_ctrl_c_keeps_what_is_planned(tmp_path):
    (tmp_path / "job.toml").write_text(WORKED_EXAMPLE.replace("400000", "400000000").replace("limit = 6", "limit = 4"))
    arguments = ["plan", "job.toml", "--failures", "1", "--library", "plans", "--processes", "2"]
    code = f"import sys; from recycle.cli import main; main({arguments!r})"
    environment = {**os.environ, "RECYCLE_CACHE": str(tmp_path / "cache")}
    running = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    job = Job.load(tmp_path / "job.toml")
    deadline = time.monotonic() + 300
    while len(PlanLibrary(tmp_path / "plans", job).vectors()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=120)
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
        (TINY, ["--failed", "0.1,1.1,2.1"], "plan: --failed: no live worker is left for stage 1"),
        (TINY, ["--failed", "1.1;0.0"], "plan: --failed: '1.1;0.0' is not a worker: write pipeline.rank"),
        (TINY, ["-o", "/dev/full"], "/dev/full: cannot be written (there is something that is not a regular file)"),
        (TINY, ["-o", "/tmp"], "/tmp: cannot be written (there is something that is not a regular file)"),
        (TINY, ["--failures", "1", "--library", "/dev/null"], "/dev/null: cannot be made a plan library (File exists)"),
        (TINY + "limits = 4\n", [], "limits"),
        (TINY.replace("limit = 3", "limit = 0"), [], "[memory] limit"),
        (TINY.replace("limit = 3", "limit = [3]"), [], "[memory] limit: lists 1 ranks, the shape has 2"),
        (TINY.replace("limit = 3", "limit = [3, 0]"), [], "[memory] limit: a worker must hold at least 1 activation"),
        (
            TINY + "[planner]\nreroute = false\n",
            ["--failed", "0.1"],
            "micro-batches of 0.1 when it is dead; set reroute",
        ),
        (HUGE, [], "job.toml: [shape]: D=2 P=2 m=4194304 has 50,331,648 operations, more than the 4,194,304"),
        (HUGE, ["--failures", "1"], "a first plan would need about 50 GB of memory and 8 minutes"),
        (LARGE, [], "[planner] seconds: 5 are too few for the 1,572,864 operations of D=64 P=64 m=128: a first plan"),
        (TINY + "[planner]\nseconds = 0.001\n", [], "[planner] seconds: expected `float` >= 0.01"),
        (TINY + "[times]\nforward = -1\n", [], "[times] forward: must be finite and at least 0, got -1"),
        (TINY + "[times]\nforward = [1, -2]\n", [], "[times] forward: stage 1 must be finite and at least 0, got -2"),
        (TINY + "[times]\nbackward_input = [1, 0]\n", [], "job.toml: [times] backward_input: stage 1 takes 0"),
        (TINY + "[times]\nforward = nan\n", [], "job.toml: [times] forward: must be finite and at least 0, got nan"),
        (TINY + "[times]\nlink = inf\n", [], "job.toml: [times] link: must be finite and at least 0, got inf"),
        (TINY + '[times]\nstep = "1"\n', [], "job.toml: [times] step: expected `float | array`, got `str`"),
        (
            TINY + "[times]\nforward = 1e-9\n",
            [],
            "job.toml: [times] forward: stage 0 takes 1e-09, on one of its workers",
        ),
        (TINY + "[times]\nstep = [1, 1e308]\n", [], "job.toml: [times] step: stage 1 takes 1e+308, on one of"),
        (TINY + "[times]\nlink = 1e308\n", [], "job.toml: [times] link: a transfer takes 1e+308, more than 1e+12"),
        (TINY, ["--failures", "1", "--within", "0"], "--within: must be above 0"),
        (TINY, ["--failures", "1", "--within", "1e-9"], "1e-09 seconds are too few: 3 of 3 vectors have no plan"),
        (TINY, ["--failures", "1", "--again"], "--again: needs --failures N and --library DIR"),
        (TINY, ["--library", "plans", "--again"], "--again: needs --failures N and --library DIR"),
        (TINY, ["--failures", "1", "--processes", "0"], "--processes: must be at least 1"),
        (TINY, ["--library", "nowhere", "--profile", "none.json"], "recycle: none.json: cannot be read"),
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
        f"recycle: {tmp_path / 'job.toml'} with {tmp_path / 'bytes.json'}: [memory] limit: stage 1"
        " has memory for 0 activations beside its static bytes, and one micro-batch"
        " needs 1; raise the limit\n"
    )
    text = TINY.replace("limit = 3", 'limit = "4 GB"\nactivation = "1 GB"\nstatic = ["1 GB", "5 GB"]')
    assert run(text)[1:] == (out, err.replace(f" with {tmp_path / 'bytes.json'}", ""))


def test_a_limit_in_bytes_plans_as_the_same_one_in_activations(run):
    in_bytes = TINY.replace("limit = 3", 'limit = "7 GB"\nactivation = "2 GB"\nstatic = "1 GB"')
    planned = [json.loads(run(text, "--failed", "1.1", "--json")[1]) for text in (TINY, in_bytes)]
    assert [(plan["period"], plan["lower_bound"]) for plan in planned] == [(planned[0]["period"],) * 2] * 2


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"forward": [1, 0]}, "profile: forward: stage 1 takes 0; a plan needs a time above 0"),
        ({"backward_input": 0}, "profile: backward_input: stage 0 takes 0"),
        ({"backward_weight": -1}, "profile: backward_weight must be finite and at least 0, got -1.0"),
        ({"forward": [1]}, "profile: forward lists 1 stages, the job has 2"),
        ({"static": []}, "profile: static lists 0 stages, the job has 2"),
        ({"speed": {"9.9": 2}}, "profile: speed: worker 9.9 is outside the grid"),
        ({"speed": {"first": 2}}, "'first' is not a worker: write pipeline.rank"),
        ({"speed": {"00.1": 2}}, "profile: speed: write 0.1 in place of '00.1'"),
        ({"speed": {"0.1": 1e-9}}, "profile: forward: stage 0 takes 1, on one of its workers less than 1e-06"),
        ({"message": 1e300, "bandwidth": 1e-300}, "profile: link: a transfer takes inf, more than 1e+12"),
        ({"links": {"9.0>0.1": {"latency": 1}}}, "profile: links: '9.0>0.1' names a worker outside the grid"),
        ({"forward": float("nan")}, "p.json: JSON is malformed"),
    ],
)
def test_a_profile_that_cannot_be_planned_with_is_named_with_the_place(run, tmp_path, profile, message):
    (tmp_path / "p.json").write_text(json.dumps(profile))
    status, out, err = run(TINY, "--profile", tmp_path / "p.json")
    assert (status, out) == (2, "")
    assert str(tmp_path / "p.json") in err
    assert message in err
    assert err.count("\n") == 1


def test_a_weight_gradient_that_takes_no_time_is_planned(run):
    status, out, _ = run(TINY + "[times]\nbackward_weight = [0, 1]\n", "--failed", "1.1", "--json")
    assert (status, json.loads(out)["period"]) == (0, 9)


@pytest.mark.slow
def test_workers_named_twice_count_once(run):
    once, twice = (json.loads(run(TINY, "--failed", names, "--json")[1]) for names in ("1.1", "1.1, 01.1,"))
    assert {**once, "seconds": 0} == {**twice, "seconds": 0}


def test_as_many_failures_as_every_stage_bears_are_all_there_can_be(run, tmp_path):
    status, out, _ = run(TINY, "--failures", 4, "--library", tmp_path / "plans", "--json")
    assert (status, json.loads(out)["complete"]) == (0, True)
    assert [row["vector"] for row in json.loads(out)["table"]][-1] == [2, 2]
    status, out, error = run(TINY, "--failures", 5, "--library", tmp_path / "more", "--json")
    assert (status, out, (tmp_path / "more").exists()) == (2, "", False)
    assert "at most 4 of the 6 workers can be dead while every stage has a host, got 5" in error


def test_a_tiny_budget_gives_the_best_checked_plan_with_its_gap(run, tmp_path):
    text = "[shape]\npipelines = 8\nranks = 8\nmicro_batches = 32\n[memory]\nlimit = 8\n[planner]\nseconds = 0.01\n"
    status, out, _ = run(text, "--failed", "1.4", "-o", tmp_path / "p.json", "--json")
    planned = json.loads(out)
    assert status == 0
    assert planned["gap"] == pytest.approx(planned["period"] / planned["lower_bound"] - 1)
    assert planned["gap"] > 0
    schedule = Schedule.load(tmp_path / "p.json")
    assert simulate(schedule).period == planned["period"]
    assert check(schedule, limits=[8.0] * 8) == []


def _drop_a_forward(text):
    return text.replace("0F0.0 ", "", 1)


def _swap_two(text):
    return text.replace("0F0.0 0F0.1", "0F0.1 0F0.0", 1)


def _boast(text):
    return text.replace('"period": 7.0', '"period": 5.0')


@pytest.mark.parametrize("forge", [_drop_a_forward, _swap_two, _boast])
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("arguments", [["--failed", ""], ["--failures", "0"]])
def test_a_plan_in_the_library_that_was_tampered_with_is_made_again(run, tmp_path, forge, is_listed, arguments):
    folder = tmp_path / "plans"
    run(TINY, "--failures", 0, "--library", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (entry,) = manifest["plans"]
    text = (folder / entry["file"]).read_text()
    forged = forge(text)
    assert forged != text
    (folder / entry["file"]).write_text(forged)
    if is_listed:  # by someone who knows how the manifest vouches for files
        entry["digest"], entry["columns"] = hashlib.sha256(forged.encode()).hexdigest()[:32], ""
        (folder / "manifest.json").write_text(json.dumps(manifest))
    status, out, _ = run(TINY, *arguments, "--library", folder, "--json")
    printed = json.loads(out)
    assert (status, printed.get("plans", [printed])[0]["period"]) == (0, 7)
    (kept,) = PlanLibrary(folder, Job.load(tmp_path / "job.toml")).plans()
    assert (kept.period, check(kept.schedule, limits=[3.0, 3.0])) == (7, [])


def test_a_library_full_of_garbage_is_filled_all_the_same_and_left_alone(run, tmp_path):
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(b"\xff\0garbage")
    (folder / "notes.json").write_text("{}")
    (folder / "folder.json").mkdir()
    (folder / "nowhere.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe.json")  # a reader would wait for ever
    status, out, _ = run(TINY, "--failures", 1, "--library", folder, "--json")
    assert (status, [row["period"] for row in json.loads(out)["table"]]) == (0, [7, 9, 9])
    assert {"notes.json", "folder.json", "nowhere.json", "pipe.json"} < {path.name for path in folder.iterdir()}
    job = Job.load(tmp_path / "job.toml")
    assert [plan.period for plan in PlanLibrary(folder, job).plans()] == [7, 9, 9]


def test_a_manifest_of_another_job_counts_for_nothing_but_is_kept(run, tmp_path):
    folder = tmp_path / "plans"
    run(TINY, "--failures", 1, "--library", folder)
    other = TINY.replace("ranks = 2", "ranks = 3")
    _, out, _ = run(other, "--failures", 1, "--library", folder, "--json")
    assert [row["vector"] for row in json.loads(out)["table"]] == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.columns")}
    run(TINY, "--failures", 1, "--library", folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.columns")} == before


@pytest.mark.process
def test_ctrl_c_ends_a_search_with_the_best_plan_so_far(tmp_path):
    job = tmp_path / "job.toml"
    shape = "[shape]\npipelines = 3\nranks = 4\nmicro_batches = 6\nchunks = 2\n"
    job.write_text(f"{shape}[memory]\nlimit = 4\n[planner]\nseconds = 1000\n")
    script = Path(sys.executable).parent / "recycle"
    command = [script, "plan", job, "--failed", "1.2", "-o", tmp_path / "p.json"]
    terminal, inside = os.openpty()  # the terminal shows when the search has begun
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=inside)
    os.close(inside)
    searching = threading.Event()

    shown = b""

    def read() -> None:
        """Read to the end: a terminal that nobody reads is full after a while, and holds up whoever writes to it."""
        nonlocal shown
        with suppress(OSError):
            while chunk := os.read(terminal, 4096):
                shown += chunk
                if b"searching" in shown:
                    searching.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert searching.wait(200)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    status = process.wait(200)
    reader.join()
    assert status == 0, shown.decode()
    os.close(terminal)
    made = Schedule.load(tmp_path / "p.json")
    assert made.metadata["seconds"] < 500
    assert 61 <= made.metadata["period"] <= 75
