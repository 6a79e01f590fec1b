"""The worker processes of this machine: start them, see at once when one ends, kill them by their own process id."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

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
    """Worker processes, one per position, each with its log file.

    Args:
        orders: what to tell the n-th process of a worker.
        logs: folder for `k.r.log`.
        threads: OMP threads of each process.
    """

    def __init__(self, orders: Callable[[Worker, int], Orders], logs: Path, threads: int) -> None:
        self._orders, self._logs, self._threads = orders, logs, threads
        self._processes: dict[Worker, subprocess.Popen[bytes]] = {}
        self._descriptors: dict[Worker, int] = {}
        self._incarnations: dict[Worker, int] = {}
        self._poll = select.poll()

    def start(self, worker: Worker) -> None:
        """Start the worker's process; its output goes to its log."""
        incarnation = self._incarnations.get(worker, -1) + 1
        self._incarnations[worker] = incarnation
        orders = msgspec.json.encode(self._orders(worker, incarnation)).decode()
        threads = str(self._threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log(worker).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "recycle.exec.worker", orders],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._processes[worker] = process
        self._descriptors[worker] = os.pidfd_open(process.pid)
        self._poll.register(self._descriptors[worker], select.POLLIN)

    def log(self, worker: Worker) -> Path:
        """The worker's log file."""
        return self._logs / f"{worker}.log"

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until a process ends."""
        self._poll.poll(seconds * 1000)

    def gone(self) -> dict[Worker, str]:
        """Processes that ended since the last call, with how."""
        ended = {w: p for w, p in self._processes.items() if w in self._descriptors and p.poll() is not None}
        for worker in ended:
            descriptor = self._descriptors.pop(worker)
            self._poll.unregister(descriptor)
            os.close(descriptor)
        return {worker: _how(process.returncode) for worker, process in ended.items()}

    def running(self, worker: Worker) -> bool:
        """Whether the worker has a process."""
        return worker in self._processes and self._processes[worker].poll() is None

    def incarnation(self, worker: Worker) -> int:
        """Number of the worker's present process, from 0; -1 when it never had one."""
        return self._incarnations.get(worker, -1)

    def kill(self, worker: Worker) -> None:
        """SIGKILL the worker's process, if it is still there."""
        if self.running(worker):
            with contextlib.suppress(ProcessLookupError):
                self._processes[worker].kill()

    def pid(self, worker: Worker) -> int:
        """Process id of the worker's present process."""
        return self._processes[worker].pid

    def tail(self, worker: Worker, lines: int = 8) -> str:
        """The last lines of the worker's log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log(worker).read_text(errors="replace").splitlines()[-lines:])
        return ""

    def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for all processes to end by themselves, then kill the rest."""
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        for worker, process in self._processes.items():
            self.kill(worker)
            process.wait()
        self.gone()


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
