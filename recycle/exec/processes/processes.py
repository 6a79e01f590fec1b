"""The worker processes of this machine: starts them, detects their ends at once, and kills them by descriptor.

After a kill /proc shows the exit code at once, so the end is reported then. A successor waits until the kernel has
freed the memory (2 GB in 0.13 s), when the descriptor becomes readable.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from recycle.errors import JobError, RunError
from recycle.exec.members import member_name
from recycle.exec.processes.forkserver import COMMAND, WORKER, ForkServer, WorkerProcess, describe_exit, last_lines
from recycle.exec.protocol import Start
from recycle.exec.worker.specification import RunSpecification, WorkerSpecification
from recycle.job.shape import Worker


class Waker:
    """`wake` makes `descriptor` readable until the next `clear`; safe from any thread."""

    def __init__(self) -> None:
        self.descriptor, self._end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._end, False)

    def wake(self) -> None:
        """Make the descriptor readable. Does nothing after `close`."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._end, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        descriptors = self.descriptor, self._end
        self.descriptor = self._end = -1  # a later file may get the number of a closed descriptor
        for descriptor in descriptors:
            os.close(descriptor)


BASE = 48
"""Open files of any process: Python's own, logs, pipes, the agent; up to 30 were counted in a launcher."""
PER_CHILD = 8
"""Open files of a launcher or agent per child: connections, a descriptor, and room to spare."""
PER_PEER = 4
"""Open files of a worker per peer: in the group of all and among a stage's hosts, for two generations."""


WANTED = 1 << 14
"""Open files that a process may have, if the hard limit allows it: communicators open files for every connection."""


def require_open_files(started_here: int, in_all: int) -> None:
    """Raise this process's limit of open files, which its children inherit, to `WANTED` or the run's needs.

    `started_here` of the run's `in_all` processes start from this one. Raises JobError if that is impossible.
    """
    needed = BASE + max(PER_CHILD * started_here, PER_PEER * in_all)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 62 if hard == resource.RLIM_INFINITY else hard
    if limit < needed:
        raise JobError(
            f"a run of {in_all} processes, {started_here} of them on this machine, needs {needed} open files, and the"
            f" limit here is {hard}; raise it: ulimit -n {needed}"
        )
    wanted = min(limit, max(needed, WANTED))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


END_SECONDS = 5.0
"""Seconds that the end of a run waits for killed processes, and for requested processes of unknown state."""
POLL_SECONDS = 0.03
"""Seconds between checks whether a process's memory is being freed; a check takes 7 us per process."""


class LocalProcesses:
    """The processes of one run on this machine, `tensor_parallel` per worker, each with its log file.

    If a process of a worker fails, the worker's others are killed. `places` are positions, in the order of the GPUs.
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
        self._processes: dict[tuple[Worker, int], WorkerProcess] = {}  # by worker and tensor rank
        self._ending: list[tuple[Worker, WorkerProcess]] = []
        self._next_poll = 0.0
        self._failed: set[Worker] = set()
        self._poll = select.poll()
        self._waker = waker
        self._poll.register(server.answers, select.POLLIN)
        self._poll.register(waker.descriptor, select.POLLIN)

    def start(self, order: Start) -> None:
        """Start the processes of a worker whose previous processes have ended."""
        worker = Worker.parse(order.worker)
        self._failed.discard(worker)
        before = [process for ending, process in self._ending if ending == worker]
        first = self._places.index(Worker.parse(order.place)) * len(self._tensor_ranks)
        for rank in self._tensor_ranks:
            specification = WorkerSpecification(
                run=self._run,
                worker=order.worker,
                incarnation=order.incarnation,
                generation=order.generation,
                restored=order.restored,
                tensor_rank=rank,
                local_index=first + rank,
            )
            text, function = msgspec.json.encode(specification).decode(), COMMAND if self._run.command else WORKER
            self._processes[worker, rank] = self._server.fork(text, self._log(worker, rank), before, function)

    def watch(self, descriptor: int) -> None:
        self._poll.register(descriptor, select.POLLIN)

    def _log(self, worker: Worker, tensor_rank: int) -> Path:
        return self._logs / f"{member_name(worker, tensor_rank)}.log"

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for a process to start or end, or for the waker."""
        deadline = time.monotonic() + seconds
        while not self._notice_ends() and (remaining := deadline - time.monotonic()) > 0:
            if self._poll.poll(min(remaining, POLL_SECONDS) * 1000):
                break
        self._waker.clear()

    def _notice_ends(self) -> bool:
        now = time.monotonic()
        if now < self._next_poll:
            return False
        self._next_poll = now + POLL_SECONDS
        for process in self._processes.values():
            process.poll()
        return any(process.code is not None for process in self._processes.values())

    def take_ends(self) -> dict[Worker, tuple[str, str]]:
        """Return worker -> (how it ended, last log lines) for new ends. Raises RunError if the fork server ended."""
        self._server.read_answers()
        for process in self._processes.values():
            if process.pid:
                self._poll.register(process.descriptor, select.POLLIN)
        over = {descriptor for descriptor, _ in self._poll.poll(0)}
        reported: dict[Worker, tuple[str, str]] = {}
        for (worker, rank), process in list(self._processes.items()):
            if process.descriptor in over:
                process.poll()
            if process.code is None:
                continue
            del self._processes[worker, rank]
            self._ending.append((worker, process))
            process.kill()
            if worker not in self._failed and (process.code or not self._processes_of(worker)):
                how = describe_exit(process.code)
                how = how if len(self._tensor_ranks) == 1 else f"tensor rank {rank} {how}"
                self._failed.add(worker)
                reported[worker] = how, last_lines(self._log(worker, rank))
        for ending in [ending for ending in self._ending if ending[1].descriptor in over]:
            self._ending.remove(ending)
            self._poll.unregister(ending[1].descriptor)
            self._server.reap(ending[1])
        for worker in self._failed:
            self.kill(worker)
        return reported

    def _processes_of(self, worker: Worker) -> list[WorkerProcess]:
        members = ((worker, rank) for rank in self._tensor_ranks)
        return [self._processes[member] for member in members if member in self._processes]

    def running(self, worker: Worker) -> bool:
        return bool(self._processes_of(worker))

    def kill(self, worker: Worker) -> None:
        for process in self._processes_of(worker):
            process.kill()

    def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for all processes to end by themselves, then kill the rest."""
        deadline = time.monotonic() + patience
        with contextlib.suppress(RunError):
            while (self._processes or self._ending) and time.monotonic() < deadline + END_SECONDS:
                self.take_ends()
                if time.monotonic() > deadline:
                    for worker in {worker for worker, _ in self._processes}:
                        self.kill(worker)
                self.wait(0.05)
