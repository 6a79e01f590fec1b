"""The run directory, the link to the newest one, its logs on a disk that is full for a while, and the run's key."""

import contextlib
import json
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recycle import Job, JobError, RecycleError, RunError, Worker
from recycle.exec.launch import run_address, run_directory
from recycle.exec.launch.run_address import NoLeader, run_key, write_address
from recycle.exec.launch.run_directory import LineLog, RunDirectory
from recycle.exec.links import Link
from recycle.exec.protocol import Drain, Drained, Refused, RunInfo
from recycle.runs.logs import append_iteration, log_path
from tests.exec.runs import job

JOB = Job.from_toml("[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n")


def test_latest_leads_to_the_run_that_was_started_last(tmp_path):
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        RunDirectory(runs / name, JOB)
        assert (runs / "latest").readlink() == Path(name)
    assert sorted(path.name for path in runs.iterdir()) == ["latest", "one", "two"]


def test_a_run_in_latest_itself_leaves_the_link_alone(tmp_path):
    runs = tmp_path / "runs"
    (runs / "one").mkdir(parents=True)
    (runs / "latest").symlink_to("one")
    RunDirectory(runs / "latest", JOB)
    assert (runs / "latest").readlink() == Path("one")


def test_only_a_folder_of_runs_gets_the_link_and_a_file_of_its_name_stays(tmp_path):
    RunDirectory(tmp_path / "mine", JOB)
    assert not (tmp_path / "latest").is_symlink()
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "latest").write_text("kept")
    RunDirectory(runs / "one", JOB)
    assert (runs / "latest").read_text() == "kept"


def test_files_follow_the_umask_and_the_lock_is_private(tmp_path):
    before = os.umask(0o027)
    try:
        directory = RunDirectory(tmp_path / "run", JOB)
        directory.event("fault")
        write_address(directory.path, "local://name", "")
        append_iteration(log_path(directory.path, Worker(0, 0)), 0, 1, "0.0", [("0F0.0", 0.0, 1.0)])
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in directory.path.rglob("*")}
    assert modes.pop(directory.path / ".lock") == 0o600
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o640}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o750}


def test_directory_of_a_run_under_way_is_in_use(tmp_path):
    opened = RunDirectory(tmp_path / "run", JOB)
    with pytest.raises(JobError, match="is in use by another"):
        RunDirectory(tmp_path / "run", JOB)
    opened.close()
    with pytest.raises(JobError, match="holds a run already"):
        RunDirectory(tmp_path / "run", JOB)


def test_drain_of_a_run_that_ends_before_it_answers_is_refused(tmp_path, monkeypatch):
    ours, of_leader = socket.socketpair()
    of_leader.close()
    monkeypatch.setattr(run_address, "connect_to_run", lambda path: Link(ours, Drained | Refused))
    with pytest.raises(JobError, match="this run has ended"):
        run_address.drain(tmp_path, "1.1", None, print)
    ours.close()


def test_drain_between_two_leaders_asks_the_next_one(tmp_path, monkeypatch):
    ours, of_leader = socket.socketpair()
    answers = [NoLeader(), Link(ours, Drained | Refused)]

    def connect(path):
        answer = answers.pop(0)
        if isinstance(answer, NoLeader):
            raise answer
        return answer

    monkeypatch.setattr(run_address, "connect_to_run", connect)
    (tmp_path / "job.toml").write_text(job(2, 1, 1).to_toml())
    (tmp_path / "run").touch()
    write_address(tmp_path, "etcd://127.0.0.1:1", "mine")
    leader = Link(of_leader, Drain)
    leader.send(Refused("", "the answer of the next leader"))
    with pytest.raises(JobError, match="the answer of the next leader"):
        run_address.drain(tmp_path, "1.0", None, print)
    assert leader.read() == [Drain("1.0", None)]
    ours.close()
    of_leader.close()


def test_drain_of_a_run_whose_agents_were_all_killed_ends(tmp_path, monkeypatch):
    """Killed agents leave their address in the directory, and this etcd has no process."""
    ours, of_leader = socket.socketpair()
    of_leader.close()
    links = [Link(ours, Drained | Refused)]
    connect = run_address.connect_to_run
    monkeypatch.setattr(run_address, "connect_to_run", lambda path: links.pop() if links else connect(path))
    store = {"store": "etcd://127.0.0.1:1", "lease": 2, "store_timeout": 0.1}
    (tmp_path / "job.toml").write_text(job(2, 1, 1, membership=store).to_toml())
    (tmp_path / "run").touch()
    write_address(tmp_path, store["store"], "mine")
    with pytest.raises(RunError, match=r"no agent has led this run for 2\.1 s"):
        run_address.drain(tmp_path, "1.0", None, print)
    ours.close()


# Logs: a limit on the size of files stands in for a full disk.


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_wait_for_room_and_come_out_whole_and_in_order(tmp_path):
    path = tmp_path / "log"
    log = LineLog(path)
    assert log.append("first") is None
    with files_of_at_most(10):
        assert log.append("second") == "File too large"
        assert path.read_text() == "first\n"
        assert log.append("third") == "File too large"
    assert log.append("fourth") is None
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
    log.close()


def test_a_slow_disk_is_named_once(tmp_path, monkeypatch):
    warnings = []
    directory = RunDirectory(tmp_path / "run", JOB)
    directory.warn = warnings.append
    directory.event("fault")
    assert warnings == []
    monkeypatch.setattr(run_directory, "SLOW_SECONDS", 0.0)
    for step in range(2):
        directory.metric({"step": step})
    (warning,) = warnings
    assert str(tmp_path / "run" / "metrics.jsonl") in warning


def test_agents_write_whole_lines_after_one_that_was_killed_or_had_no_room(tmp_path):
    """One agent has the role; the next one appends after a line that the first one could not finish."""
    path = tmp_path / "metrics.jsonl"
    info = RunInfo(identity="mine", job="", steps=9, faults=[], started=time.time())
    former, present = (RunDirectory(tmp_path, JOB, shared=info) for _ in range(2))
    assert former.metric({"step": 0})
    with files_of_at_most(path.stat().st_size + 4):
        assert former.metric({"step": 1})
        former.forget_waiting()
        assert present.metric({"step": 2})
    with path.open("a") as log:
        log.write('{"st')
    assert not present.has_metrics_of(1)
    assert present.metric({"step": 3})
    assert not former.metric({"step": 3})
    former.close()
    present.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2, 3]


def test_agent_that_starts_again_needs_no_room_on_the_disk(tmp_path):
    info = RunInfo(identity="mine", job="", steps=9, faults=[], started=time.time())
    RunDirectory(tmp_path, JOB, shared=info).close()
    write_address(tmp_path, "etcd://127.0.0.1:1", "mine")
    with files_of_at_most(0):
        RunDirectory(tmp_path, JOB, shared=info).close()
        write_address(tmp_path, "etcd://127.0.0.1:1", "mine")
        with pytest.raises(RecycleError, match="cannot be written"):
            write_address(tmp_path, "etcd://127.0.0.1:1", "another")


def test_lines_that_are_lost_at_the_end_of_a_run_are_counted(tmp_path):
    directory, warnings = RunDirectory(tmp_path / "run", JOB), []
    directory.warn_of_lost_lines()
    with files_of_at_most(0):
        directory.metric({"step": 0})
        directory.metric({"step": 1})
        directory.warn = warnings.append
        directory.warn_of_lost_lines()
    assert warnings == [f"{tmp_path}/run/metrics.jsonl: lacks the last 2 lines (File too large)"]


def test_memory_for_waiting_lines_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "MOST_BYTES", 8)
    log = LineLog(tmp_path / "log")
    with files_of_at_most(0):
        for word in ("one", "two", "six"):
            log.append(word)
    log.close()
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_the_torn_end_of_an_earlier_log_is_removed(tmp_path):
    path = tmp_path / "log"
    path.write_text("whole\ntor")
    log = LineLog(path)
    log.append("next")
    log.close()
    assert path.read_text() == "whole\nnext\n"


def test_going_back_keeps_the_first_lines_written_or_waiting(tmp_path):
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


# The key.


def test_all_that_ask_at_once_get_one_key_and_leave_one_file(tmp_path):
    with ThreadPoolExecutor(16) as threads:
        keys = set(threads.map(run_key, [tmp_path] * 64))
    (key,) = keys
    assert len(key) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert run_key(tmp_path) == key == (tmp_path / "key").read_bytes()
    (tmp_path / "other").mkdir()
    assert run_key(tmp_path / "other") != key


def test_only_this_user_can_read_the_key_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        run_key(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_key_that_others_can_read_or_write_is_refused(tmp_path, mode):
    run_key(tmp_path)
    (tmp_path / "key").chmod(mode)
    with pytest.raises(JobError, match="only this user can read; remove it"):
        run_key(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_key_of_another_user_is_refused(tmp_path):
    run_key(tmp_path)
    os.chown(tmp_path / "key", 65534, 65534)
    with pytest.raises(JobError, match="only this user can read"):
        run_key(tmp_path)


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_key_of_another_length_is_refused(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(JobError, match="must hold 32 bytes"):
        run_key(tmp_path)


def test_symbolic_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    run_key(tmp_path / "elsewhere")
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere/key")
    with pytest.raises(JobError, match="key: Too many levels of symbolic links"):
        run_key(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "key"]
