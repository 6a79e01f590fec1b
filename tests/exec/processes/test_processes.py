"""How the workers of a machine end: noticed at once, reported once; open files; and the waker."""

import fcntl
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from recycle import JobError, Worker
from recycle.exec.processes import processes
from recycle.exec.processes.forkserver import WorkerProcess, last_lines
from recycle.exec.processes.processes import LocalProcesses, Waker, require_open_files
from recycle.exec.protocol import LINE_SEPARATOR, Start
from recycle.exec.worker.specification import RunSpecification
from tests.exec.runs import job
from tests.waiting import until
from tests.warm import WarmProcess, run_recycle

pytestmark = pytest.mark.process

WORKER = Worker(0, 0)


SLEEP = "import time; time.sleep(100)"


LARGE = """
import mmap, os, signal
memory = mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
memory[::4096] = bytes(len(memory) // 4096)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Holds 2 GB in small pages, which the kernel takes a tenth of a second to free."""


class _Server:
    """Starts Python programs, one after the other, in place of workers."""

    def __init__(self, *programs: str):
        self._programs, self._started = list(programs), {}
        self.forked = []
        self.after = []
        self.answers, self._unused = os.pipe()

    def fork(self, specification: str, log: Path, after: list[WorkerProcess], function: str) -> WorkerProcess:
        started = subprocess.Popen([sys.executable, "-S", "-c", self._programs.pop(0)], start_new_session=True)
        self._started[started.pid] = started
        self.forked.append(WorkerProcess(started.pid, os.pidfd_open(started.pid)))
        self.after.append(after)
        return self.forked[-1]

    def read_answers(self):
        pass

    def reap(self, process: WorkerProcess):
        os.close(process.descriptor)
        self._started.pop(process.pid).wait()

    def kept(self) -> list[int]:
        """Ids of the processes that are not reaped."""
        return list(self._started)

    def close(self):
        for process in self._started.values():
            process.kill()
            process.wait()
        os.close(self.answers)
        os.close(self._unused)


class _Machine:
    """Processes of `WORKER`, one per program; with `later`, the program of its next one."""

    def __init__(self, *programs: str, later: Sequence[str] = ()):
        self.server, self.waker = _Server(*programs, *later), Waker()
        run = RunSpecification(job="", cut=[], stages={}, faults=[], agent="", address="", started=0.0, directory=".")
        self.processes = LocalProcesses(self.server, run, [WORKER], self.waker, len(programs))
        self.processes.start(Start(str(WORKER), 0, str(WORKER), 0))

    def wait_for_report(self) -> str:
        deadline = time.monotonic() + 30
        while not (gone := self.processes.take_ends()):
            assert time.monotonic() < deadline
            self.processes.wait(1.0)
        return gone[WORKER][0]

    def end(self):
        """Wait until no process is left."""
        self.processes.end(30.0)
        assert self.server.kept() == []

    def close(self):
        self.server.close()
        self.waker.close()


@pytest.fixture
def machines():
    machines = []
    yield machines
    for machine in machines:
        machine.close()


def test_an_end_is_reported_while_the_kernel_still_frees_the_memory(machines):
    machine = _Machine(LARGE, later=["pass"])
    machines.append(machine)
    assert machine.wait_for_report() == "killed by SIGKILL"
    assert not wait([machine.server.forked[0].descriptor], 0)
    assert not machine.processes.running(WORKER)
    machine.processes.start(Start(str(WORKER), 1, str(WORKER), 1))
    assert machine.server.after == [[], machine.server.forked[:1]]
    assert machine.wait_for_report() == "ended with exit code 0"
    machine.end()


def test_killed_process_is_reported_without_polling(machines, monkeypatch):
    monkeypatch.setattr(processes, "POLL_SECONDS", 60.0)
    machines.append(_Machine(SLEEP))
    machines[0].processes.wait(0.1)
    assert machines[0].processes.take_ends() == {}
    machines[0].server.forked[0].kill()
    killed = time.monotonic()
    assert machines[0].wait_for_report() == "killed by SIGKILL"
    assert time.monotonic() - killed < 30.0


def test_a_worker_fails_with_its_first_process_and_the_others_are_killed(machines):
    machines.append(_Machine(SLEEP, "raise SystemExit(3)", SLEEP))
    assert machines[0].wait_for_report() == "tensor rank 1 ended with exit code 3"
    machines[0].end()


WRAPPER = """
import fcntl, subprocess, sys
lock = open({path!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
subprocess.run(["sleep", "100"], pass_fds=[lock.fileno()])
"""
"""A worker that starts its script as a child, as a shell script does; both hold a lock."""


def is_locked(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_what_a_worker_has_started_ends_with_it(machines, tmp_path):
    path = tmp_path / "lock"
    machines.append(_Machine(WRAPPER.format(path=str(path))))
    worker = machines[0].server.forked[0].pid
    until(lambda: Path(f"/proc/{worker}/task/{worker}/children").read_text() and is_locked(path))
    machines[0].processes.kill(WORKER)
    assert machines[0].wait_for_report() == "killed by SIGKILL"
    until(lambda: not is_locked(path))


def test_the_last_lines_of_a_large_log_are_read_from_its_end(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nfirst\nlast\n")
    assert last_lines(log, 2) == LINE_SEPARATOR.join(("first", "last"))
    log.write_text("only")
    assert last_lines(log) == "only"


# Open files.


TRAIN = "train", "job.toml", "--steps", "2", "--run", "run"
REFUSED = (
    "recycle: a run of 4 processes, 4 of them on this machine, needs 80 open files, and the limit here is {};"
    " raise it: ulimit -n 80 [job-error]\n"
)


def limit_files(limit: int):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def train_with(limit: int):
    limit_files(limit)
    run_recycle(*TRAIN)


def test_too_few_are_refused_before_anything_starts(tmp_path):
    (tmp_path / "job.toml").write_text(job(2, 2, 2).to_toml())
    with (tmp_path / "output").open("wb") as output:
        streams = dict.fromkeys((1, 2), output.fileno())
        assert WarmProcess(train_with, 79, streams=streams, directory=tmp_path).wait(120) == 2
    assert (tmp_path / "output").read_text() == REFUSED.format(79)
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_sixteen_are_enough_to_be_refused(tmp_path):
    (tmp_path / "job.toml").write_text(job(2, 2, 2).to_toml())
    command = [sys.executable, "-c", f"import sys; from recycle.cli import main; main({list(TRAIN)})"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, preexec_fn=lambda: limit_files(16)
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", REFUSED.format(16))


def test_the_processes_of_other_nodes_count_for_their_connections(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    require_open_files(8, 244)
    with pytest.raises(JobError, match=r"a run of 245 processes, 8 of them on this machine, needs 1028 open files"):
        require_open_files(8, 245)


# The waker.


def is_readable(descriptor: int) -> bool:
    return select.select([descriptor], [], [], 0) == ([descriptor], [], [])


def test_wake_after_close_writes_into_no_file_that_got_the_descriptor():
    waker = Waker()
    waker.close()
    reader, writer = os.pipe()
    waker.wake()
    assert not is_readable(reader)
    os.close(reader)
    os.close(writer)
