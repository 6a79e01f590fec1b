"""Scripts that run in a forked process end as in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from recycle.exec.worker.command import is_this_python

pytestmark = pytest.mark.process
SCRIPT = """
import atexit, sys, threading, time
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print(__name__, sys.argv[1:])
"""
RUN = "import sys; from recycle.exec.worker.command import run_to_the_end; run_to_the_end(sys.argv[1:])"


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(3)", "sys.exit('refused')", "raise ValueError('wrong')"])
def test_script_ends_as_under_python(end, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + end)
    own, forked = (
        subprocess.run([sys.executable, *command, path, "-x", "1"], capture_output=True, text=True, check=False)
        for command in ([], ["-c", RUN])
    )
    assert (forked.returncode, forked.stdout) == (own.returncode, own.stdout)
    assert "thread" in own.stdout
    assert forked.stderr == own.stderr


def test_names_of_this_interpreter_are_told_from_those_of_others(tmp_path):
    folder, own = Path(sys.executable).parent, Path(sys.executable).resolve()
    assert is_this_python(sys.executable)
    assert is_this_python(str(folder / "python3")) == ((folder / "python3").resolve() == own)
    (tmp_path / "python").symlink_to(own)  # as in another environment of the same interpreter
    assert not is_this_python(str(tmp_path / "python"))
    assert not is_this_python("true")
    assert not is_this_python("no-such-command")
