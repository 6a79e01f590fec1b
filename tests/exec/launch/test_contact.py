"""The run's key: made once, whole, for this user only."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recycle import JobError
from recycle.exec.launch.contact import run_key


def test_all_that_ask_at_once_get_one_key_and_leave_one_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        keys = set(threads.map(run_key, [tmp_path] * 64))
    (key,) = keys
    assert len(key) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert run_key(tmp_path) == key == (tmp_path / "key").read_bytes()
    (tmp_path / "other").mkdir()
    assert run_key(tmp_path / "other") != key


def test_only_this_user_can_read_the_key_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run_key(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_key_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    run_key(tmp_path)
    (tmp_path / "key").chmod(mode)
    with pytest.raises(JobError, match="only this user can read; remove it"):
        run_key(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_key_of_another_user_is_refused(tmp_path: Path) -> None:
    run_key(tmp_path)
    os.chown(tmp_path / "key", 65534, 65534)
    with pytest.raises(JobError, match="only this user can read"):
        run_key(tmp_path)


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_key_of_another_length_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(JobError, match="must hold 32 bytes"):
        run_key(tmp_path)


def test_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run_key(tmp_path / "elsewhere")
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere/key")
    with pytest.raises(JobError, match="key: Too many levels of symbolic links"):
        run_key(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "key"]


def test_directory_without_room_for_a_key_is_an_error_of_the_job(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="key: No such file or directory"):
        run_key(tmp_path / "missing")
