"""The worker processes of this machine: start them, see at once when one ends, kill each by its own descriptor."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from recycle.child import Child
from recycle.errors import RunError
from recycle.exec.exit_description import LINE_SEPARATOR, with_last_lines
from recycle.exec.members import member_name
from recycle.exec.processes.forkserver import PRELOADED
from recycle.exec.processes.waker import Waker
from recycle.exec.transport.transports import known_environment
from recycle.exec.worker.specification import REFUSED, RunSpecification, WorkerSpecification
from recycle.shape import Worker

END_SECONDS = 5.0
"""How long the end of a run waits for processes that it has killed, or whose start it does not know of."""


REFUSED_THE_JOB = "refused the job"
"""How a worker ended that says what is wrong with the job in its last line."""


def worker_environment(threads: int, of_transport: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that computes as a worker does.

    Args:
        threads: OMP threads.
        of_transport: variables that the transport needs.
    """
    return {
        **of_transport,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
        # torch looks up the name of the store's loopback address; a name server that is silent must not cost 5 s
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
        "PYTHONWARNINGS": "ignore",  # megatron-core's about optional packages, once per import
    }


class ForkServer:
    """A handle on a process of `recycle.exec.processes.forkserver`; it may serve several runs, one after the other.

    Args:
        kind: the job's kind of model, which says what the server imports.
        threads: OMP threads of every process that it forks.
        log: file for what the server itself prints; None for nowhere.
        checkpoints: import what checkpoints need too, so that no worker has to when it writes its first.
        environment: variables that the transport of its workers needs; those of all known ones when left out.
        modules: to import as well: a user's own.
        folders: to find them in, before Python's own path.
    """

    def __init__(
        self,
        kind: str,
        threads: int = 1,
        log: Path | None = None,
        checkpoints: bool = False,
        environment: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        folders: Sequence[str] = (),
    ) -> None:
        self.kind, self.threads, self._log = kind, threads, log
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        self._asked = 0
        self._pending, self._unsent = b"", b""
        variables = worker_environment(threads, known_environment() if environment is None else environment)
        kinds = (kind, "checkpoints") if checkpoints else (kind,)
        imported = [*(module for one in kinds for module in PRELOADED[one]), *modules]
        with (log or Path(os.devnull)).open("ab") as output:
            self._child = Child(
                "recycle.exec.processes.forkserver",
                os.pathsep.join(folders),
                *imported,
                environment=variables,
                errors=output,
            )
        self.answers = self._child.answers
        for pipe in (self.answers, self._child.requests):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._child.process.pid

    def fork(self, specification: str, log: Path) -> int:
        """Ask for a worker process whose output goes to `log`; returns the number of the request."""
        self._asked += 1
        request = {"id": self._asked, "log": str(log), "specification": specification}
        self._unsent += msgspec.json.encode(request) + b"\n"
        self._send()
        return self._asked

    def _send(self) -> None:
        """Write as much as the server's pipe takes: one that stands still keeps nobody waiting."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._child.requests.fileno(), self._unsent) :]

    def read_answers(self) -> None:
        """Take what the server says: `pids` and exit `statuses` of requests. Raises RunError when it has ended."""
        self._send()
        *lines, self._pending = (self._pending + (self.answers.read() or b"")).split(b"\n")
        for line in lines:
            said = msgspec.json.decode(line)
            if "pid" in said:
                self.pids[said["id"]] = said["pid"]
            else:
                self.statuses[said["id"]] = said["status"]
        code = self._child.process.poll()
        if code is not None:
            tail = _tail(self._log) if self._log is not None else ""
            raise RunError(f"the fork server {with_last_lines(_how(code), tail)}")

    def close(self) -> None:
        """End the server; its workers die with it."""
        self._child.close()


_Member = tuple[Worker, int]
"""A process: its worker and its tensor rank."""


class LocalProcesses:
    """Implements `Processes` for one run on this machine, with T processes per worker, each with its log file.

    A worker fails as one: when a process of it ends other than by itself, the others are killed.

    Args:
        server: forks them.
        run: what all of them are started with.
        places: positions of this machine, in the order of its GPUs.
        waker: ends a `wait` from other threads.
        tensor_parallel: T.
    """

    def __init__(
        self,
        server: ForkServer,
        run: RunSpecification,
        places: Sequence[Worker],
        waker: Waker,
        tensor_parallel: int = 1,
    ) -> None:
        self._server, self._run, self._places = server, run, list(places)
        self._logs = Path(run.directory) / "logs"
        self._tensor_ranks = range(tensor_parallel)
        self._requests: dict[_Member, int] = {}
        self._descriptors: dict[_Member, int] = {}
        self._incarnations: dict[Worker, int] = {}
        self._started_in: dict[Worker, int] = {}
        self._ended: dict[Worker, str] = {}
        self._failed: dict[Worker, int] = {}
        self._poll = select.poll()
        self._waker = waker
        self._poll.register(server.answers, select.POLLIN)
        self._poll.register(waker.descriptor, select.POLLIN)

    def start(
        self,
        worker: Worker,
        generation: int,
        restored: int | None = None,
        *,
        incarnation: int | None = None,
        place: Worker | None = None,
    ) -> None:
        """As `Processes.start`.

        Args:
            incarnation: their number; the next one when left out.
            place: position of this machine whose GPUs they use; the worker's own when left out.
        """
        number = self.incarnation(worker) + 1 if incarnation is None else incarnation
        self._incarnations[worker], self._started_in[worker] = number, generation
        self._failed.pop(worker, None)
        self._ended.pop(worker, None)
        first = self._places.index(worker if place is None else place) * len(self._tensor_ranks)
        for rank in self._tensor_ranks:
            specification = WorkerSpecification(
                run=self._run,
                worker=str(worker),
                incarnation=number,
                generation=generation,
                restored=restored,
                tensor_rank=rank,
                local_index=first + rank,
            )
            text = msgspec.json.encode(specification).decode()
            self._requests[worker, rank] = self._server.fork(text, self.log(worker, rank))

    def started_in(self, worker: Worker) -> int | None:
        return self._started_in.get(worker)

    def missing_nodes(self, workers: Collection[Worker]) -> list[int]:
        """None: this machine is always there."""
        return []

    def move(self, positions: Collection[Worker], startable: Collection[Worker]) -> None:
        """Nothing to do: this machine can start a process for every position."""

    def log(self, worker: Worker, tensor_rank: int = 0) -> Path:
        """The log file of a worker's process."""
        return self._logs / f"{member_name(worker, tensor_rank)}.log"

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until a process starts or ends, or the waker wakes."""
        self._poll.poll(seconds * 1000)
        self._waker.clear()

    def _hear(self) -> None:
        self._server.read_answers()
        for member, request in self._requests.items():
            if request in self._server.pids and member not in self._descriptors:
                with contextlib.suppress(ProcessLookupError):
                    self._descriptors[member] = os.pidfd_open(self._server.pids[request])
                    self._poll.register(self._descriptors[member], select.POLLIN)

    def _status(self, member: _Member) -> int | None:
        """How a process ended, as the server says, or the kernel as long as the server has not taken note of it."""
        request = self._requests[member]
        if request not in self._server.statuses and member in self._descriptors:
            return _unnoted_status(self._server.pids[request], self._descriptors[member])
        return self._server.statuses.get(request)

    def gone(self) -> dict[Worker, str]:
        """Workers of which a process ended since the last call, with how; one that ends well does so with its last.

        Raises RunError when the fork server itself ended.
        """
        self._hear()
        ended = {member: status for member in self._requests if (status := self._status(member)) is not None}
        found: dict[Worker, str] = {}
        for (worker, rank), status in ended.items():
            del self._requests[worker, rank]
            descriptor = self._descriptors.pop((worker, rank), None)
            if descriptor is not None:
                self._poll.unregister(descriptor)
                os.close(descriptor)
            if worker not in self._failed and (status or not self._members(worker)):
                self._failed[worker] = rank
                found[worker] = _how(status) if len(self._tensor_ranks) == 1 else f"tensor rank {rank} {_how(status)}"
        self._ended |= found
        for worker in self._failed:
            self.kill(worker)
        return found

    def ended(self, worker: Worker) -> str | None:
        return self._ended.get(worker)

    def _members(self, worker: Worker) -> list[_Member]:
        return [(worker, rank) for rank in self._tensor_ranks if (worker, rank) in self._requests]

    def running(self, worker: Worker) -> bool:
        return any(self._status(member) is None for member in self._members(worker))

    def incarnation(self, worker: Worker) -> int:
        return self._incarnations.get(worker, -1)

    def kill(self, worker: Worker) -> None:
        """SIGKILL the worker's processes that are still there."""
        for member in self._members(worker):
            if member in self._descriptors:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._descriptors[member], signal.SIGKILL)

    def tail(self, worker: Worker) -> str:
        """The last lines of the worker's log: of the process that failed first, if one did."""
        return _tail(self.log(worker, self._failed.get(worker, 0)))

    def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for all processes to end by themselves, then kill the rest.

        What the server was asked for and has not said to have started by then is not waited for: it ends by itself,
        without a store.
        """
        deadline = time.monotonic() + patience
        with contextlib.suppress(RunError):
            while self._requests and time.monotonic() < deadline + END_SECONDS:
                self.gone()
                if time.monotonic() > deadline:
                    for worker in {worker for worker, _ in self._requests}:
                        self.kill(worker)
                self.wait(0.05)


def _unnoted_status(pid: int, descriptor: int) -> int | None:
    """How a process ended that its parent has not waited for yet; None when it has not ended, or was waited for.

    Args:
        descriptor: of the process; by it another one with its id is told apart.
    """
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    if not ended.poll(0):
        return None
    try:
        *_, status = fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        known = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()
    except OSError:
        return None
    is_it = fields[0] == "Z" and known[known.index("Pid:") + 1] == str(pid)
    return os.waitstatus_to_exitcode(int(status)) if is_it else None


def _tail(log: Path, lines: int = 8) -> str:
    with contextlib.suppress(OSError):
        return LINE_SEPARATOR.join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""


def _how(code: int) -> str:
    if code == REFUSED:
        return REFUSED_THE_JOB
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
