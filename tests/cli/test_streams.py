"""Unusual environments of a command: a full disk, an ASCII terminal, invalid paths."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.exec.runs import job

pytestmark = pytest.mark.process

COMMAND = [sys.executable, "-c", "from recycle.cli import main; main()"]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SCHEDULE = "schedule 1f1b -D 2 -P 2 -m 2"


def called(*arguments: str | bytes, out: str = os.devnull, **variables: str) -> tuple[int, str]:
    """Exit code and standard error of a command, of which text is split; its standard output goes to the file `out`."""
    words = [word for argument in arguments for word in (argument.split() if isinstance(argument, str) else [argument])]
    with open(out, "wb") as stdout:
        done = subprocess.run(
            [*COMMAND, *words],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            timeout=120,
            check=False,
        )
    return done.returncode, done.stderr.decode(errors="replace")


def is_one_line(errors: str, *words: str) -> bool:
    return errors.startswith("recycle: ") and errors.count("\n") == 1 and all(word in errors for word in words)


@pytest.fixture(autouse=True)
def job_file():
    Path("job.toml").write_text(job(2, 2, 2, planner={"steps": 1}).to_toml())


@pytest.mark.parametrize("line", [SCHEDULE, "train job.toml --steps 3 --run run"])
def test_full_standard_output_does_not_stop_training(line):
    code, errors = called(line, out="/dev/full")
    assert code == 1
    assert is_one_line(errors, "standard output: No space left on device")
    if "train" in line:
        assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("line", ["train --help", SCHEDULE, "simulate plan.json"])
def test_a_terminal_that_knows_ascii_only_is_no_error(line, command):
    assert command(f"{SCHEDULE} -o plan.json").status == 0
    assert called(line, **ASCII) == (0, "")


def test_run_directory_that_is_not_utf8_is_refused(command):
    says = "this path is not UTF-8 text; choose another one"
    code, errors = called("train job.toml --run", b"run\xff", **ASCII)
    assert code == 2
    assert is_one_line(errors, says)
    assert command("train job.toml --run", Path(os.fsdecode(b"run\xff"))).refused(says)
    assert os.listdir() == ["job.toml"]


def test_job_in_a_folder_that_is_not_utf8_is_refused(tmp_path, command):
    folder = os.path.join(os.fsencode(tmp_path), b"job\xff")
    os.mkdir(folder)
    with open(os.path.join(folder, b"job.toml"), "w") as file:
        file.write(job(2, 2, 2, data={"path": "corpus.txt"}).to_toml())
    path = os.path.join(folder, b"job.toml")
    assert command("train", Path(os.fsdecode(path)), "--run run").refused("corpus.txt: this path is not UTF-8 text")


@pytest.mark.parametrize(
    "line",
    [
        "train job.toml --run",
        "train",
        "train job.toml --schedule",
        f"{SCHEDULE} -o",
        "check",
        "plan job.toml -o",
        "plan job.toml --failures 1 --library",
        "profile job.toml -o",
        "convert job.toml",
        "compare job.toml --trace",
        "view",
    ],
)
def test_a_path_that_is_too_long_is_refused_in_one_line(line, command):
    assert command(f"{line} {'x' * 300}").refused()
