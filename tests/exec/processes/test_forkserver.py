"""A fork server over a long run: process ids come again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recycle.exec.processes.processes import ForkServer

pytestmark = pytest.mark.process

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
ATTEMPTS = 50


def until(condition: Callable[[], bool], server: ForkServer) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        server.read_answers()
        time.sleep(0.01)


def test_how_a_process_ended_is_not_taken_for_the_end_of_a_later_one_with_its_id(tmp_path: Path) -> None:
    server = ForkServer("emulated")
    try:
        first = server.fork("no specification", tmp_path / "first.log")
        until(lambda: first in server.statuses, server)
        for _ in range(ATTEMPTS):  # another process may take the id first
            try:
                LAST_PID.write_text(str(server.pids[first] - 1))
            except OSError:
                pytest.skip("the next process id cannot be chosen here; it takes root")
            second = server.fork("no specification", tmp_path / "second.log")
            until(lambda asked=second: asked in server.pids, server)  # type: ignore[misc]
            if server.pids[second] == server.pids[first]:
                break
            until(lambda asked=second: asked in server.statuses, server)  # type: ignore[misc]
        else:
            pytest.skip("another process took the id each time")
        until(lambda: second in server.statuses, server)
        assert (server.statuses[first], server.statuses[second]) == (1, 1)
        assert first != second
    finally:
        server.close()


def test_a_users_modules_are_imported_once_by_the_server_and_by_no_worker(tmp_path: Path) -> None:
    trace = tmp_path / "imported"
    (tmp_path / "of_a_user.py").write_text(f"import os\nopen({str(trace)!r}, 'a').write(f'{{os.getpid()}} ')\n")
    server = ForkServer("emulated", modules=["of_a_user"], folders=[str(tmp_path)])
    try:
        worker = server.fork("no specification", tmp_path / "worker.log")
        until(lambda: worker in server.statuses, server)
        assert trace.read_text().split() == [str(server.pid)]
    finally:
        server.close()
