"""The run directory, and the link to the newest one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from recycle import Job
from recycle.exec.launch.contact import leave_contact
from recycle.exec.launch.run_directory import RunDirectory
from recycle.job.shape import Worker
from recycle.runs.logs import append_iteration, log_path

JOB = Job.from_toml("[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n")


def test_latest_leads_to_the_run_that_was_started_last(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        RunDirectory(runs / name, JOB)
        assert (runs / "latest").readlink() == Path(name)
    assert sorted(path.name for path in runs.iterdir()) == ["latest", "one", "two"]


def test_only_a_folder_of_runs_gets_the_link_and_a_file_of_its_name_stays(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "mine", JOB)
    assert not (tmp_path / "latest").is_symlink()
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "latest").write_text("kept")
    RunDirectory(runs / "one", JOB)
    assert (runs / "latest").read_text() == "kept"


def test_a_run_has_the_modes_that_the_umask_gives_and_nobody_else_can_lock_it(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        directory = RunDirectory(tmp_path / "run", JOB)
        directory.event("fault")
        leave_contact(directory.path, "local://name", "")
        append_iteration(log_path(directory.path, Worker(0, 0)), 0, 1, "0.0", [("0F0.0", 0.0, 1.0)])
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in directory.path.rglob("*")}
    assert modes.pop(directory.path / ".lock") == 0o600
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o640}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o750}
