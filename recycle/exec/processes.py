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
from recycle.exec.waker import Waker
from recycle.shape import Worker

_PR_SET_PDEATHSIG = 1


class Orders(Struct, frozen=True):
    """What the launcher tells a worker process.

    Attributes:
        job: the job as TOML text.
        worker: position, `k.r`.
        stages: that it hosts.
        incarnation: number of this position's process, from 0.
        store: URL of the store.
        run: name of the run in the store.
        address: of this machine, which the other workers connect to.
        faults: (number in the run, text) of what strikes here.
        trace: file for the executed instructions.
        launcher: process id of the launcher.
        started: when the run started, by this machine's monotonic clock.
        checkpoints: folder of the run's checkpoints.
        generation: the last one of an earlier part of the run.
        restored: step of the checkpoint to start from; None for the initial state.
    """

    job: str
    worker: str
    stages: list[int]
    incarnation: int
    store: str
    run: str
    address: str
    faults: list[tuple[int, str]]
    trace: str
    launcher: int
    started: float
    checkpoints: str
    generation: int = 0
    restored: int | None = None


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends; ends it at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the launcher is gone")


class ForkServer:
    """A handle on a process of `recycle.exec.forkserver`; it may serve several runs, one after the other.

    Args:
        kind: the job's kind of model, which says what the server imports.
        threads: OMP threads of every process that it forks.
        log: file for what the server itself prints; None for nowhere.
        checkpoints: import what checkpoints need too, so that no worker has to when it writes its first.
    """

    def __init__(self, kind: str, threads: int = 1, log: Path | None = None, checkpoints: bool = False) -> None:
        self.kind, self.threads, self._log = kind, threads, log
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        self._asked = 0
        self._pending = b""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
            # torch looks up the name of the store's loopback address; a name server that is silent must not cost 5 s
            "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
            "PYTHONWARNINGS": "ignore",  # megatron-core's about optional packages, once per import
        }
        with (log or Path(os.devnull)).open("ab") as output:
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "recycle.exec.forkserver",
                    str(os.getpid()),
                    kind,
                    *["checkpoints"] * checkpoints,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._requests, self.answers = self._server.stdin, self._server.stdout
        os.set_blocking(self.answers.fileno(), False)

    def fork(self, orders: str, log: Path) -> int:
        """Ask for a worker process whose output goes to `log`; returns the number of the request."""
        self._asked += 1
        with contextlib.suppress(BrokenPipeError):  # the server's end is seen by `hear`
            self._requests.write(msgspec.json.encode({"id": self._asked, "log": str(log), "orders": orders}) + b"\n")
            self._requests.flush()
        return self._asked

    def hear(self) -> None:
        """Take what the server says: `pids` of requests, exit `statuses` of pids. Raises RunError when it has ended."""
        *lines, self._pending = (self._pending + (self.answers.read() or b"")).split(b"\n")
        for line in lines:
            said = msgspec.json.decode(line)
            if "id" in said:
                self.pids[said["id"]] = said["pid"]
            else:
                self.statuses[said["pid"]] = said["status"]
        if self._server.poll() is not None:
            tail = _tail(self._log) if self._log is not None else ""
            raise RunError(f"the fork server {_how(self._server.returncode)}; its last lines: {tail}")

    def close(self) -> None:
        """End the server; its workers die with it."""
        self._server.kill()
        self._server.wait()
        for pipe in (self._requests, self.answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class LocalProcesses:
    """Worker processes of one run, one per position, each with its log file.

    Args:
        server: forks them.
        orders: what to tell the n-th process of a worker.
        logs: folder for `k.r.log`.
        waker: ends a `wait` from other threads.
    """

    def __init__(self, server: ForkServer, orders: Callable[[Worker, int], Orders], logs: Path, waker: Waker) -> None:
        self._server, self._orders, self._logs = server, orders, logs
        self._requests: dict[Worker, int] = {}
        self._descriptors: dict[Worker, int] = {}
        self._incarnations: dict[Worker, int] = {}
        self._poll = select.poll()
        self._waker = waker
        self._poll.register(server.answers, select.POLLIN)
        self._poll.register(waker.descriptor, select.POLLIN)

    def start(self, worker: Worker, incarnation: int | None = None) -> None:
        """Ask for the worker's process; the next one, unless its number is given."""
        if incarnation is None:
            incarnation = self._incarnations.get(worker, -1) + 1
        self._incarnations[worker] = incarnation
        orders = msgspec.json.encode(self._orders(worker, incarnation)).decode()
        self._requests[worker] = self._server.fork(orders, self.log(worker))

    def log(self, worker: Worker) -> Path:
        """The worker's log file."""
        return self._logs / f"{worker}.log"

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until a process starts or ends, or the waker wakes."""
        self._poll.poll(seconds * 1000)
        self._waker.clear()

    def _hear(self) -> None:
        self._server.hear()
        for worker, request in self._requests.items():
            if request in self._server.pids and worker not in self._descriptors:
                with contextlib.suppress(ProcessLookupError):
                    self._descriptors[worker] = os.pidfd_open(self._server.pids[request])

    def _status(self, worker: Worker) -> int | None:
        pid = self._server.pids.get(self._requests[worker])
        return None if pid is None else self._server.statuses.get(pid)

    def gone(self) -> dict[Worker, str]:
        """Processes that ended since the last call, with how. Raises RunError when the fork server itself ended."""
        self._hear()
        ended = {worker: status for worker in self._requests if (status := self._status(worker)) is not None}
        for worker in ended:
            del self._requests[worker]
            descriptor = self._descriptors.pop(worker, None)
            if descriptor is not None:
                os.close(descriptor)
        return {worker: _how(status) for worker, status in ended.items()}

    def running(self, worker: Worker) -> bool:
        """Whether the worker has a process, or will have one in a moment."""
        return worker in self._requests and self._status(worker) is None

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
        return self._server.pids[self._requests[worker]]

    def tail(self, worker: Worker) -> str:
        """The last lines of the worker's log."""
        return _tail(self.log(worker))

    def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for all processes to end by themselves, then kill the rest."""
        deadline = time.monotonic() + patience
        with contextlib.suppress(RunError):
            while self._requests:
                self.gone()
                if time.monotonic() > deadline:
                    for worker in self._requests:
                        self.kill(worker)
                self.wait(0.05)


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
