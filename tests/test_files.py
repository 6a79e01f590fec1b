"""Files are read whole or refused: endless, waiting, giant and absent ones, in whatever error the caller raises."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recycle import JobError, RecycleError, ScheduleError
from recycle.files import MOST_BYTES, read_whole, write_whole


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "whole")
    assert read_whole(tmp_path / "file", RecycleError) == b"whole"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_whole(tmp_path / "link", RecycleError, most=5) == b"whole"


@pytest.mark.parametrize("refusal", [JobError, ScheduleError])
def test_a_file_that_cannot_be_read_raises_what_the_caller_says(refusal: type[RecycleError], tmp_path: Path) -> None:
    with pytest.raises(refusal, match=r"none: cannot be read \(No such file or directory\)"):
        read_whole(tmp_path / "none", refusal)
    with pytest.raises(refusal, match=r"cannot be read \(Is a directory\)"):
        read_whole(tmp_path, refusal)
    with pytest.raises(refusal, match=r"a\\x00b: cannot be read \(embedded null byte\)"):
        read_whole("a\0b", refusal)


def test_a_pipe_nobody_writes_to_and_a_device_without_end_are_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(ScheduleError, match=rf"{path}: cannot be read \(not a regular file"):
            read_whole(path, ScheduleError)


def test_a_giant_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # a hole: takes no room on the disk
    with pytest.raises(ScheduleError, match=r"giant: too large .*\(536870913 bytes, at most 536870912\)"):
        read_whole(tmp_path / "giant", ScheduleError)
    (tmp_path / "small").write_bytes(b"123456")
    with pytest.raises(JobError, match=r"\(6 bytes, at most 5\)"):
        read_whole(tmp_path / "small", JobError, most=5)


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(RecycleError, match=rf"{path}: cannot be written \(there is something that is not a reg"):
            write_whole(path, "text")
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
