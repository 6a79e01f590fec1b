"""A child process answers line by line, ends with its parent or when it is killed, and its end is seen."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recycle.child import Child
from tests.waiting import until

pytestmark = pytest.mark.process

ECHO = """
import sys, os
from recycle.child import serve
requests, answers = serve(sys.argv[1])
print("a solver's chatter", flush=True)
answers.write(str(os.getpid()).encode() + b"\\n")
for line in requests:
    answers.write(sys.argv[2].encode() + line)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    monkeypatch.setattr("recycle.child.subprocess", subprocess)
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    return "echo_child"


def test_answers_are_lines_and_prints_go_to_standard_error(echo, tmp_path):
    with (tmp_path / "errors").open("w+b") as errors:
        child = Child(echo, ">", errors=errors)
        lines = child.lines()
        assert int(next(lines)) == child.process.pid
        for request in ({"a": 1}, [2, "three"]):
            child.send(request)
        assert [next(lines), next(lines)] == [b'>{"a":1}\n', b'>[2,"three"]\n']
        child.close()
        assert (tmp_path / "errors").read_text() == "a solver's chatter\n"
    assert child.process.returncode == -signal.SIGKILL


def test_the_end_of_a_child_is_the_end_of_its_answers(echo):
    child = Child(echo, ">", errors=subprocess.DEVNULL)
    lines = child.lines()
    next(lines)
    os.kill(child.process.pid, signal.SIGKILL)
    assert list(lines) == []
    child.send("not read")
    child.close()


def test_a_child_ends_with_its_parent(echo):
    code = (
        f"from recycle.child import Child; child = Child('{echo}', '>');"
        " print(next(child.lines()).decode(), flush=True); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    status = Path(f"/proc/{pid}/stat")
    until(lambda: not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z", 10.0)
