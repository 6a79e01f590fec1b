"""The run directory, and the link to the newest one."""

from __future__ import annotations

from pathlib import Path

from recycle import Job
from recycle.exec.launch.run_directory import RunDirectory

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
