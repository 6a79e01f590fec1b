"""A process that imports the heavy packages once and forks the workers, and the launcher's handle on it.

Importing megatron-core costs seconds of CPU per process; forked, a worker is up in a fraction of one, at the start of
a run and when it re-joins. Requests are JSON lines on standard input. `["LOG", "SPECIFICATION", [5]]` forks a worker,
which waits until process 5 has ended; the answer is its process id, a line on standard output. `7` reaps process 7,
which has ended. Until then no other process gets its id, and /proc says how it ended even while the server is stopped.

The server must have a single thread when it forks (torch starts its threads on first use, not on import); that is
checked. It dies with the launcher, and each worker with it.

The fork server of `multiprocessing` is not enough. There is one per process, with the variables and the modules of its
first use. Each process that it forks runs the user's script again. It skips a module that cannot be imported. While it
is stopped, ends are not noticed and a start blocks. Its `kill` may hit a later process with the same id.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from recycle.child import Child, die_with_parent, serve
from recycle.errors import RunError
from recycle.exec.exit_description import LINE_SEPARATOR, REFUSED_THE_JOB, with_last_lines
from recycle.exec.transport.transports import known_environment
from recycle.exec.worker.specification import REFUSED

PRELOADED = {
    **dict.fromkeys(
        ("gpt", "llama", "qwen", "mixtral"),
        (
            "recycle.exec.model.gpt",
            "recycle.exec.model.part",
            "recycle.exec.model.parallel_state",
            "recycle.exec.model.split.backward",
        ),
    ),
    "emulated": (),
    "checkpoints": (
        "torch.distributed.checkpoint.hf_storage",
        "torch.distributed.checkpoint.state_dict_saver",
        "torch.distributed.checkpoint.state_dict_loader",
        "safetensors.torch",
    ),
}
"""Modules to import before forking: by the job's kind of model, and for a run that keeps checkpoints."""


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
        # torch may look up the name of an address; a name server that is silent must not cost 5 s
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
        "PYTHONWARNINGS": "ignore",  # megatron-core's about optional packages, once per import
    }


@dataclass(eq=False)
class WorkerProcess:
    """A worker's process.

    Attributes:
        pid: its id; 0 until the server has answered. No other process has it before `ForkServer.reap`.
        descriptor: its pidfd, readable after it has ended; -1 until the server has answered.
        code: its exit code, once `look` has seen that the kernel frees its memory or that it has ended.
    """

    pid: int = 0
    descriptor: int = -1
    code: int | None = None

    def look(self) -> None:
        """Bring `code` up to date.

        With much memory this is long before the end: 0.1 ms after a kill instead of 134 ms with 2 GB. Needs the right
        to read the last field of /proc/PID/stat, which a process has for those of its user.
        """
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/statm", "rb", buffering=0) as memory:
            if memory.read(2) == b"0 ":
                status = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b" ")[2]
                self.code = os.waitstatus_to_exitcode(int(status))

    def kill(self) -> None:
        """SIGKILL the process, if it is known and has not ended."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)


class ForkServer:
    """A handle on a fork server; it may serve several runs, one after the other.

    Args:
        kind: the job's kind of model, which says what the server imports.
        threads: OMP threads of every process that it forks.
        log: file for what the server itself prints; None for nowhere.
        checkpoints: import what checkpoints need too, so that no worker has to when it writes its first.
        environment: variables that the transport of its workers needs; those of all known ones when left out.
        modules: to import as well: a user's own.
        folders: to find them in, before Python's own path.

    Attributes:
        answers: readable when `read_answers` has something to read.
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
        self._log, self._pending, self._unsent = log, b"", b""
        self._unanswered: deque[WorkerProcess] = deque()
        variables = worker_environment(threads, known_environment() if environment is None else environment)
        imported = [*PRELOADED[kind], *(PRELOADED["checkpoints"] if checkpoints else ()), *modules]
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

    def fork(self, specification: str, log: Path, after: Sequence[WorkerProcess] = ()) -> WorkerProcess:
        """Ask for a worker's process.

        Args:
            log: takes its output.
            after: processes that must end before it does anything, none of which is reaped.
        """
        self._send([str(log), specification, [process.pid for process in after]])
        self._unanswered.append(WorkerProcess())
        return self._unanswered[-1]

    def reap(self, process: WorkerProcess) -> None:
        """Free the id and the descriptor of a process that has ended."""
        os.close(process.descriptor)
        self._send(process.pid)

    def _send(self, *requests: object) -> None:
        """Write as much as the server's pipe takes: a server that is stopped keeps nobody waiting."""
        self._unsent += b"".join(json.dumps(request).encode() + b"\n" for request in requests)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._child.requests.fileno(), self._unsent) :]

    def read_answers(self) -> None:
        """Let the processes that the server has forked be known. Raises RunError when the server has ended."""
        self._send()
        *lines, self._pending = (self._pending + (self.answers.read() or b"")).split(b"\n")
        for line in lines:
            process = self._unanswered.popleft()
            with contextlib.suppress(ProcessLookupError):  # the server has ended since, and its workers with it
                process.descriptor, process.pid = os.pidfd_open(int(line)), int(line)
        code = self._child.process.poll()
        if code is not None:
            tail = last_lines(self._log) if self._log is not None else ""
            raise RunError(f"the fork server {with_last_lines(describe_exit(code), tail)}")

    def close(self) -> None:
        """End the server; its workers die with it."""
        self._child.close()


def describe_exit(code: int) -> str:
    """An exit code in words: "killed by SIGKILL"."""
    if code == REFUSED:
        return REFUSED_THE_JOB
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def last_lines(log: Path, count: int = 8) -> str:
    """The last lines of a log file; "" without one."""
    with contextlib.suppress(OSError):
        return LINE_SEPARATOR.join(log.read_text(errors="replace").splitlines()[-count:])
    return ""


def main(launcher: str, folders: str, *modules: str) -> None:
    """The server's process, until standard input ends.

    Args:
        folders: to look for modules in before Python's own path, as PYTHONPATH has them.
        modules: to import before forking, beside the worker's.
    """
    requests, answers = serve(launcher)
    sys.path[:0] = filter(None, folders.split(os.pathsep))
    for module in ("recycle.exec.worker.worker", *modules):
        importlib.import_module(module)
    importlib.import_module("recycle.ir.plugins").load_plugins()
    importlib.import_module("recycle.exec.worker.warm_up").warm_up()
    gc.collect()
    gc.freeze()  # what is imported stays, so that no worker's collector looks at it, and so copies its pages
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(f"forkserver: {threads} threads after the imports; forking would not be safe")
    for request in map(json.loads, requests):
        if isinstance(request, int):
            os.waitpid(request, 0)
        else:
            answers.write(b"%d\n" % _fork(*request))


def _fork(log: str, specification: str, after: list[int]) -> int:
    """The id of the process that becomes the worker, and does not return from here."""
    parent, awaited = os.getpid(), [os.pidfd_open(ending) for ending in after]
    pid = os.fork()
    if pid:
        for descriptor in awaited:
            os.close(descriptor)
        return pid
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        while awaited:
            wait([awaited.pop()])
        _redirect(Path(log))
        from recycle.exec.worker.worker import run_worker

        run_worker(specification)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    """Standard streams of the worker's own, and none of the server's descriptors."""
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for target, source in enumerate((null, output, output)):
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the server's holds requests that it has read ahead


if __name__ == "__main__":
    main(*sys.argv[1:])
