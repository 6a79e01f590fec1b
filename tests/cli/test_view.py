"""`recycle view`: one line per mistake, exit 2, and a server that Ctrl-C ends quietly."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from recycle import RecycleError, Schedule, Shape
from recycle.cli import main
from recycle.ir.families import one_f_one_b
from recycle.job.profile import Profile


@pytest.fixture
def schedule_file(tmp_path: Path) -> Path:
    one_f_one_b(Shape(2, 2, 2)).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command prints."""
    with pytest.raises(SystemExit) as ended:
        main(["view", *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "absent.json: no such file or run directory" in refused([str(tmp_path / "absent.json")], capsys)


def test_a_broken_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text('{"format": "recycle-sch')
    assert "bad.json: not valid JSON, perhaps truncated" in refused([str(tmp_path / "bad.json")], capsys)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a run directory" in refused([str(tmp_path)], capsys)


def test_nothing_to_draw_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "name a schedule file, run directory, job or comparison to draw" in refused(["--export", "plan.svg"], capsys)


def test_a_second_job_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one.toml", "two.toml"):
        (tmp_path / name).write_text("[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n")
    said = refused([str(tmp_path / "one.toml"), str(tmp_path / "two.toml")], capsys)
    assert "two.toml: is a second job file" in said


def test_a_broken_job_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text("[shape]\npipelines = 'many'\n")
    assert "job.toml" in refused([str(tmp_path / "job.toml")], capsys)


def test_a_port_in_use_is_one_line(schedule_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in refused([str(schedule_file), "--port", str(port)], capsys)


def test_without_dash_the_extra_is_named(
    schedule_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def without_dash(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "dash" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_dash)
    assert "pip install 'recycle-pipeline[viz]'" in refused([str(schedule_file)], capsys)
    with pytest.raises(SystemExit) as ended:
        main(["view", str(schedule_file), "--export", str(tmp_path / "plan.svg")])
    assert not ended.value.code
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_export_writes_the_file_and_says_so(
    schedule_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["view", str(schedule_file), "--export", str(tmp_path / "plan.html")])
    assert not ended.value.code
    assert capsys.readouterr().out == f"wrote {tmp_path / 'plan.html'}\n"
    assert 'data-address="data:application/gzip;base64,' in (tmp_path / "plan.html").read_text()


def test_times_and_families_are_options_as_of_simulate(
    tmp_path: Path, schedule_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn(*arguments: str) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            main(["view", *arguments, "--export", str(tmp_path / "out.svg")])
        assert not ended.value.code, capsys.readouterr().err
        return re.findall("period ([0-9.]+)", (tmp_path / "out.svg").read_text())

    assert drawn(str(schedule_file)) == ["9"]
    assert drawn(str(schedule_file), "--times", "2,2,2") == ["18"]
    assert drawn("--families", "-P", "2", "-m", "2")[:2] == ["9", "9"]  # GPipe, 1F1B
    capsys.readouterr()
    assert "give --times or --profile or --job" in refused(
        [str(schedule_file), "--times", "1,1,1", "--job", "job.toml"], capsys
    )


def test_what_does_not_run_is_exported_with_a_word_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stuck = {"0.0": "0B0.0 0F0.0", "0.1": "1F0.0 1B0.0"}
    Schedule.from_text(Shape(1, 2, 1), stuck).save(tmp_path / "stuck.json")
    with pytest.raises(SystemExit) as ended:
        main(["view", str(tmp_path / "stuck.json"), "--export", str(tmp_path / "stuck.svg")])
    assert not ended.value.code
    assert capsys.readouterr().err.startswith("stuck.json: the schedule deadlocks: ")
    assert "stuck.json: does not run to its end, drawn as far as it does" in (tmp_path / "stuck.svg").read_text()


@pytest.mark.process
def test_it_prints_its_address_serves_and_ends_quietly_on_ctrl_c(schedule_file: Path) -> None:
    command = [sys.executable, "-c", "from recycle.cli import main; main()", "view", str(schedule_file), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)
        connection.request("GET", "/_dash-layout")
        response = connection.getresponse()
        assert response.status == 200
        assert b"plan.json" in response.read()
        connection.close()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=120)
        assert (out, error, process.returncode) == ("", "", 0)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.process
def test_the_viewer_loads_no_torch(schedule_file: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom recycle.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "import viz.app\nassert 'torch' not in sys.modules and 'mip' not in sys.modules"
    )
    target = str(tmp_path / "plan.svg")
    subprocess.run([sys.executable, "-c", code, "view", str(schedule_file), "--export", target], check=True)


def test_without_a_file_examples_are_shown_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import viz.app

    served: list[object] = []

    def serve(app: object, port: int, on_ready: object) -> None:
        served.append(app)

    monkeypatch.setattr(viz.app, "serve", serve)
    with pytest.raises(SystemExit) as ended:
        main(["view"])
    assert not ended.value.code
    (app,) = served
    layout = app.server.test_client().get("/_dash-layout").get_json()  # type: ignore[attr-defined]
    assert tab_labels(layout) == ["Start", "Schedules", "Compare", "Plans and what-if", "Validate"]
    assert "recycle view runs/latest" in json.dumps(layout)


def test_a_job_and_its_library_open_the_plan_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import viz.app
    from recycle.job import Job
    from recycle.solve.filling import plan_library

    (tmp_path / "job.toml").write_text("[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n[planner]\nsteps = 1\n")
    plan_library(Job.load(tmp_path / "job.toml"), 1, tmp_path / "plans")
    served: list[object] = []

    def serve(app: object, port: int, on_ready: object) -> None:
        served.append(app)

    monkeypatch.setattr(viz.app, "serve", serve)
    for arguments in (["job.toml", "plans"], ["plans"]):
        with pytest.raises(SystemExit) as ended:
            main(["view", *(str(tmp_path / name) for name in arguments)])
        assert not ended.value.code
    for app in served:
        layout = app.server.test_client().get("/_dash-layout").get_json()  # type: ignore[attr-defined]
        assert tab_labels(layout) == ["Plans and what-if", "Validate"]
        assert "The library holds 3 plans." in json.dumps(layout)


def tab_labels(layout: dict[str, Any]) -> list[str]:
    tabs = layout["props"]["children"][1]["props"]["children"][0]["props"]["children"]
    return [tab["props"]["label"] for tab in tabs]


def test_files_of_other_formats_are_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "plan.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(SystemExit) as ended:
        main(["view", str(tmp_path / "plan.csv"), "--export", str(tmp_path / "plan.svg")])
    assert not ended.value.code
    assert (tmp_path / "plan.svg").read_text().count("<rect") >= 8


def test_a_profile_beside_the_file_times_it(schedule_file: Path) -> None:
    from viz.sources import load_source

    plain = load_source(schedule_file).timeline
    Profile(forward=2.0, backward_input=3.0, backward_weight=4.0).save(schedule_file.with_name("plan.profile.json"))
    timed = load_source(schedule_file).timeline
    assert (plain.makespan, timed.makespan) == (9, 27)
    schedule_file.with_name("plan.profile.json").write_text("{")
    with pytest.raises(RecycleError, match=r"plan\.profile\.json"):
        load_source(schedule_file)
