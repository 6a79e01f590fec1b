"""A log on a disk that is full for a while: a limit on the size of files stands in for it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from recycle.exec.launch import run_directory
from recycle.exec.launch.run_directory import LineLog


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_wait_for_room_and_come_out_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LineLog(path)
    assert log.append("first") is None
    with files_of_at_most(10):
        assert log.append("second") == "File too large"
        assert path.read_text() == "first\nseco"
        assert log.append("third") == "File too large"
    assert log.append("fourth") is None
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
    log.close()


def test_memory_for_waiting_lines_is_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_directory, "MOST_BYTES", 8)
    log = LineLog(tmp_path / "log")
    with files_of_at_most(0):
        for word in ("one", "two", "six"):
            log.append(word)
    log.close()
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_the_torn_end_of_an_earlier_log_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("whole\ntor")
    log = LineLog(path)
    log.append("next")
    log.close()
    assert path.read_text() == "whole\nnext\n"


def test_going_back_keeps_the_first_lines_written_or_waiting(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for kept in range(5):
        path.unlink(missing_ok=True)
        log = LineLog(path)
        log.append("a1")
        log.append("a2")
        with files_of_at_most(7):
            log.append("a3")
            log.append("a4")
            log.rewind(kept)
        log.append("b")
        log.close()
        assert path.read_text().split() == [*["a1", "a2", "a3", "a4"][:kept], "b"]
