"""What a shell may hand to a command: a full disk, an encoding without most characters, paths that cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recycle.cli import main
from tests.cli.command import Command
from tests.exec.runs import job

pytestmark = pytest.mark.process

COMMAND = [sys.executable, "-c", "from recycle.cli import main; main()"]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LONG = "x" * 300
SCHEDULE = ("schedule", "1f1b", "-D", "2", "-P", "2", "-m", "2")


def called(
    *arguments: str | bytes | Path, directory: Path, out: Path | None = None, **variables: str
) -> tuple[int, str]:
    """Exit code and standard error of a command; its standard output goes to the file `out`."""
    with (out or Path(os.devnull)).open("wb") as stdout:
        done = subprocess.run(
            [*COMMAND, *arguments],
            cwd=directory,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
            timeout=120,
            check=False,
        )
    return done.returncode, done.stderr.decode(errors="replace")


def is_one_line(said: str, *words: str) -> bool:
    return said.startswith("recycle: ") and said.count("\n") == 1 and all(word in said for word in words)


def test_a_full_standard_output_is_said_in_one_line(tmp_path: Path) -> None:
    code, said = called(*SCHEDULE, directory=tmp_path, out=Path("/dev/full"))
    assert code == 1
    assert is_one_line(said, "standard output: No space left on device")


def test_training_goes_on_though_standard_output_is_full(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(job(2, 2, 2).to_toml())
    arguments = ("train", "job.toml", "--steps", "3", "--run", "run")
    code, said = called(*arguments, directory=tmp_path, out=Path("/dev/full"))
    assert code == 1
    assert is_one_line(said, "standard output: No space left on device")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), SCHEDULE, ("simulate", "plan.json")])
def test_a_terminal_that_knows_ascii_only_is_no_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([*SCHEDULE, "-o", str(tmp_path / "plan.json")])
    assert called(*arguments, directory=tmp_path, **ASCII) == (0, "")


@pytest.mark.parametrize("variables", [{}, ASCII])
def test_a_run_directory_whose_name_is_not_utf8_is_refused_before_anything_starts(
    variables: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(job(2, 2, 2).to_toml())
    code, said = called("train", "job.toml", "--run", b"run\xff", directory=tmp_path, **variables)
    assert code == 2
    assert is_one_line(said, "this path is not UTF-8 text; choose another one")
    assert os.listdir(tmp_path) == ["job.toml"]


def test_a_job_in_a_folder_whose_name_is_not_utf8_names_the_path_that_cannot_be_kept(tmp_path: Path) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"job\xff")
    os.mkdir(folder)
    with open(os.path.join(folder, b"job.toml"), "w") as file:
        file.write(job(2, 2, 2, data={"path": "corpus.txt"}).to_toml())
    path = os.path.join(folder, b"job.toml")
    code, said = called("train", path, "--run", "run", directory=tmp_path)
    assert code == 2
    assert is_one_line(said, "corpus.txt: this path is not UTF-8 text")


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "job.toml", "--run", LONG),
        ("train", LONG),
        ("train", "job.toml", "--schedule", LONG),
        (*SCHEDULE, "-o", LONG),
        ("check", LONG),
        ("plan", "job.toml", "-o", LONG),
        ("plan", "job.toml", "--failures", "1", "--library", LONG),
        ("profile", "job.toml", "-o", LONG),
        ("convert", "job.toml", LONG),
        ("compare", "job.toml", "--trace", LONG),
        ("view", LONG),
    ],
    ids=lambda arguments: " ".join(argument for argument in arguments if argument != LONG),
)
def test_a_path_that_is_too_long_is_refused_in_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(job(2, 2, 2, planner={"steps": 1}).to_toml())
    assert Command(capsys)(*arguments).refused()
