"""`recycle view`: one line per mistake, exit 2, and a server that Ctrl-C ends quietly."""

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import viz.app
from recycle import Job, Schedule, Shape
from recycle.ir.families import one_f_one_b
from recycle.solve.filling import plan_library
from tests.cli.command import Command


@pytest.fixture(autouse=True)
def schedule_file():
    one_f_one_b(Shape(2, 2, 2)).save("plan.json")


def exported(command: Command, line: str) -> str:
    """What `recycle view ...` writes to a picture."""
    assert command(f"view {line} --export out.svg").status == 0
    return Path("out.svg").read_text()


def test_a_port_in_use_is_one_line(command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert command(f"view plan.json --port {port}").refused(f"port {port} is in use")


def test_without_dash_the_extra_is_named(command, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *other: None if name == "dash" else find(name, *other)
    )
    assert command("view plan.json").refused("pip install 'recycle-pipeline[viz]'")
    assert exported(command, "plan.json").startswith("<svg")


def test_export_writes_the_file_and_says_so(command):
    assert command("view plan.json --export plan.html").out == "wrote plan.html\n"
    assert 'data-address="data:application/gzip;base64,' in Path("plan.html").read_text()


def test_times_and_families_are_options_as_of_simulate(command):
    for line, periods in (
        ("plan.json", ["9"]),
        ("plan.json --times 2,2,2", ["18"]),
        ("--families -P 2 -m 2", ["9", "9"]),  # GPipe, 1F1B
    ):
        assert re.findall("period ([0-9.]+)", exported(command, line))[:2] == periods


def test_deadlocked_schedule_is_exported_with_a_note(command):
    Schedule.from_text(Shape(1, 2, 1), {"0.0": "0B0.0 0F0.0", "0.1": "1F0.0 1B0.0"}).save("stuck.json")
    assert command("view stuck.json --export out.svg").err.startswith("stuck.json: deadlocks")
    assert "stuck.json: deadlocks; drawn up to the deadlock" in Path("out.svg").read_text()


@pytest.mark.process
def test_it_prints_its_address_serves_and_ends_quietly_on_ctrl_c():
    command = [sys.executable, "-c", "from recycle.cli import main; main()", "view", "plan.json", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
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
def test_the_viewer_loads_no_torch():
    code = (
        "import sys\nfrom recycle.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "import viz.app\nassert 'torch' not in sys.modules and 'mip' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, "view", "plan.json", "--export", "plan.svg"], check=True)


@pytest.fixture
def layouts(command, monkeypatch):
    """Labels of the tabs, and the whole layout, of the page that a command serves."""
    served = []
    monkeypatch.setattr(viz.app, "serve", lambda app, port, on_ready: served.append(app))

    def layout_of(line):
        assert command(line).status == 0
        layout = served.pop().server.test_client().get("/_dash-layout").get_json()
        tabs = layout["props"]["children"][1]["props"]["children"][0]["props"]["children"]
        return [tab["props"]["label"] for tab in tabs], json.dumps(layout)

    return layout_of


def test_examples_are_shown_without_a_file(layouts):
    tabs, layout = layouts("view")
    assert tabs == ["Start", "Schedules", "Compare", "Plans and what-if", "Validate"]
    assert "recycle view FILE" in layout


def test_a_job_and_its_library_open_the_plan_browser(layouts):
    Path("job.toml").write_text("[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n[planner]\nsteps = 1\n")
    plan_library(Job.load("job.toml"), 1, Path("plans"))
    for line in ("view job.toml plans", "view plans"):
        tabs, layout = layouts(line)
        assert tabs == ["Plans and what-if", "Validate"]
        assert layout.count('"vector"') == 3
