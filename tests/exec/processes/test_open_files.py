"""Too few open files are said in one line with the number that is needed; a limit that may be raised is."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from recycle import JobError
from recycle.exec.processes.processes import require_open_files
from tests.exec.runs import job

pytestmark = pytest.mark.process

TRAIN = "import sys; from recycle.cli import main; main(['train', 'job.toml', '--steps', '2', '--run', 'run'])"


def trained(directory: Path, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    """`recycle train` of a run of four workers, under limits of its own."""
    (directory / "job.toml").write_text(job(2, 2, 2).to_toml())
    return subprocess.run(
        [sys.executable, "-c", TRAIN],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


@pytest.mark.parametrize("limit", [16, pytest.param(32, marks=pytest.mark.soak), 79])
def test_too_few_are_refused_before_anything_starts(limit: int, tmp_path: Path) -> None:
    done = trained(tmp_path, limit, limit)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"recycle: a run of 4 processes, 4 of them on this machine, needs 80 open files, and the limit here is {limit};"
        " raise it: ulimit -n 80\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("soft", [32, pytest.param(80, marks=pytest.mark.soak)])
def test_what_is_asked_for_is_enough_and_a_limit_that_may_be_raised_is(soft: int, tmp_path: Path) -> None:
    done = trained(tmp_path, soft, 80)
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stdout


def test_the_processes_of_other_nodes_count_for_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    require_open_files(8, 244)
    with pytest.raises(JobError, match=r"a run of 245 processes, 8 of them on this machine, needs 1028 open files"):
        require_open_files(8, 245)
