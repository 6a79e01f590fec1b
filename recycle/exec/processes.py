"""The worker processes of this machine: start them, see at once when one ends, kill each by its own descriptor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from recycle.errors import RunError
from recycle.shape import Worker

_PR_SET_PDEATHSIG = 1


class Orders(Struct, frozen=True):
    """What the launcher tells a worker process.

    Attributes:
        job: the job as TOML text.
        worker: position, `k.r`.
        incarnation: number of this position's process, from 0.
        address, port: the launcher's store.
        faults: (number in the run, text) of the kills that strike here.
        trace: file for the executed instructions.
        launcher: process id of the launcher.
        started: when the run started, by this machine's monotonic clock.
    """

    job: str
    worker: str
    incarnation: int
    address: str
    port: int
    faults: list[tuple[int, str]]
    trace: str
    launcher: int
    started: float


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends; ends it at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the launcher is gone")


class LocalProcesses:
    """Worker processes, one per position, each with its log file, forked off one server process.

    Args:
        kind: the job's kind of model, which says what the server imports.
        orders: what to tell the n-th process of a worker.
        logs: folder for `k.r.log`.
        threads: OMP threads of each process.
    """

    def __init__(self, kind: str, orders: Callable[[Worker, int], Orders], logs: Path, threads: int) -> None:
        self._orders, self._logs = orders, logs
        self._pids: dict[Worker, int] = {}
        self._descriptors: dict[Worker, int] = {}
        self._incarnations: dict[Worker, int] = {}
        self._asked: set[Worker] = set()
        self._statuses: dict[int, int] = {}
        self._poll = select.poll()
        self._pending = b""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
        }
        self._server_log = logs / "forkserver.log"
        with self._server_log.open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "recycle.exec.forkserver", kind, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        self._poll.register(self._server.stdout, select.POLLIN)

    def start(self, worker: Worker) -> None:
        """Ask for the worker's process; its output goes to its log."""
        incarnation = self._incarnations.get(worker, -1) + 1
        self._incarnations[worker] = incarnation
        self._asked.add(worker)
        orders = msgspec.json.encode(self._orders(worker, incarnation)).decode()
        request = {"worker": str(worker), "log": str(self.log(worker)), "orders": orders}
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen by `gone`
            self._server.stdin.write(msgspec.json.encode(request) + b"\n")
            self._server.stdin.flush()

    def log(self, worker: Worker) -> Path:
        """The worker's log file."""
        return self._logs / f"{worker}.log"

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until a process starts or ends."""
        self._poll.poll(seconds * 1000)

    def _hear(self) -> None:
        """Take what the server says: who was forked, who has ended how."""
        assert self._server.stdout is not None
        chunk = self._server.stdout.read() or b""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            said = msgspec.json.decode(line)
            if "worker" in said:
                worker = Worker.parse(said["worker"])
                self._asked.discard(worker)
                self._pids[worker] = said["pid"]
                with contextlib.suppress(ProcessLookupError):
                    self._descriptors[worker] = os.pidfd_open(said["pid"])
                    self._poll.register(self._descriptors[worker], select.POLLIN)
            else:
                self._statuses[said["pid"]] = said["status"]

    def gone(self) -> dict[Worker, str]:
        """Processes that ended since the last call, with how. Raises RunError when the fork server itself ended."""
        self._hear()
        if self._server.poll() is not None:
            tail = _tail(self._server_log)
            raise RunError(f"the fork server {_how(self._server.returncode)}; its last lines: {tail}")
        ended = {w: self._statuses[pid] for w, pid in self._pids.items() if pid in self._statuses}
        for worker in ended:
            del self._pids[worker]
            descriptor = self._descriptors.pop(worker, None)
            if descriptor is not None:
                self._poll.unregister(descriptor)
                os.close(descriptor)
        return {worker: _how(status) for worker, status in ended.items()}

    def running(self, worker: Worker) -> bool:
        """Whether the worker has a process, or will have one in a moment."""
        self._hear()
        return worker in self._asked or (worker in self._pids and self._pids[worker] not in self._statuses)

    def incarnation(self, worker: Worker) -> int:
        """Number of the worker's present process, from 0; -1 when it never had one."""
        return self._incarnations.get(worker, -1)

    def kill(self, worker: Worker) -> None:
        """SIGKILL the worker's process, if it is still there."""
        if worker in self._descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptors[worker], signal.SIGKILL)

    def pid(self, worker: Worker) -> int:
        """Process id of the worker's present process."""
        return self._pids[worker]

    def tail(self, worker: Worker) -> str:
        """The last lines of the worker's log."""
        return _tail(self.log(worker))

    def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for all processes to end by themselves, then kill the rest and the server."""
        deadline = time.monotonic() + patience
        while self._server.poll() is None and any(map(self.running, [*self._pids])) and time.monotonic() < deadline:
            self.wait(0.05)
        for worker in list(self._pids):
            self.kill(worker)
        self._server.kill()
        self._server.wait()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _tail(log: Path, lines: int = 8) -> str:
    with contextlib.suppress(OSError):
        return " | ".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
