"""A process that imports the heavy packages once and forks the workers, and the launcher's handle on it.

Importing megatron-core takes seconds of CPU per process. Requests are JSON lines on standard input:

    ["FUNCTION", "ARGUMENT", "LOG", [5]]   fork a process that waits for the end of process 5 and calls the function;
                                           the answer is its process id, a line on standard output
    7                                      reap process 7, which has ended; its id stays reserved until then, and
                                           /proc says how it ended even while the server is stopped
    {"folders": [...], "modules": [...]}   import modules, found in these folders before Python's own path
    "LOG"                                  print to this file from now on

If imports have started threads or CUDA, as they do on GPUs, a forked process could not compute; it then starts a new
Python, which imports for itself. The server dies with the launcher, and the forked processes die with the server. The
fork server of `multiprocessing` does not suffice: it runs the user's script again in each fork, ignores failed imports,
and blocks while stopped.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
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
from recycle.errors import JobError, RecycleError, RunError
from recycle.exec.protocol import LINE_SEPARATOR, REFUSED_THE_JOB, as_clause, with_last_lines
from recycle.exec.worker.specification import REFUSED
from recycle.job.architecture import FAMILIES
from recycle.megatron_versions import COMPILER

SEND_SECONDS = 0.1
"""Seconds between attempts to send what the server's pipe did not accept."""
LOG_END = 1 << 14
"""Bytes at the end of a log in which its last lines are looked for; a log may have gigabytes, and no line ends."""
WORKER = "recycle.exec.worker.worker:run_worker"
COMMAND = "recycle.exec.worker.command:run_command"
PRELOADED = {
    **dict.fromkeys(FAMILIES, ("recycle.exec.model.gpt", "recycle.exec.model.megatron_stage")),
    "emulated": (),
    "script": ("megatron.core.models.gpt.gpt_model", "recycle.megatron.own_loop", COMPILER),
}
"""Modules to import before forking, by the job's kind of model."""


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a worker-like process with this many OMP threads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
        # torch may look up the name of an address; a silent name server must not cost 5 s
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
        "PYTHONWARNINGS": "ignore",  # megatron-core warns of optional packages, once per import
    }


class ForkServerEnded(RunError):
    """The fork server of this machine has ended, and its processes with it; other machines can continue."""


@dataclass(eq=False)
class WorkerProcess:
    """A worker's process.

    Attributes:
        pid: process id, reserved until `ForkServer.reap`; 0 until the server has answered.
        descriptor: pidfd, readable after the process has ended; -1 until the server has answered.
        code: exit code, once `poll` has seen the process end or its memory being freed.
    """

    pid: int = 0
    descriptor: int = -1
    code: int | None = None

    def poll(self) -> None:
        """Update `code`, from the last field of /proc/PID/stat, which needs a process of the same user."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/statm", "rb", buffering=0) as memory:
            if memory.read(2) == b"0 ":
                status = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b" ")[2]
                self.code = os.waitstatus_to_exitcode(int(status))

    def kill(self) -> None:
        """Kill the process and its group: what it has started, such as the script of a shell, and data loaders."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class ForkServer:
    """A handle on a fork server for one or more runs; `answers` is readable when `read_answers` has work.

    Args:
        kind: the job's kind of model, which selects the modules to import.
        threads: OMP threads of every forked process.
        modules: the user's modules, imported before the first worker is forked.
        folders: folders to find them in, before Python's own path.
        environment: further variables of the server.
    """

    def __init__(
        self,
        kind: str,
        threads: int = 1,
        modules: Sequence[str] = (),
        folders: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._pending, self._unsent = b"", b""
        self._unanswered: deque[WorkerProcess] = deque()
        self._imports = deque[object](
            [{"folders": [], "modules": PRELOADED[kind]}, {"folders": folders, "modules": modules}]
        )
        self._output = os.fdopen(os.memfd_create("forkserver"), "wb")  # until `log_to`
        self._logs = [_path_of(self._output.fileno())]
        variables = {**(environment or {}), **worker_environment(threads)}
        self._child = Child("recycle.exec.processes.forkserver", environment=variables, errors=self._output)
        self.answers = self._child.answers
        for pipe in (self.answers, self._child.requests):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def log_to(self, log: Path) -> None:
        self._logs.insert(0, log)
        self._send(str(log))

    def call(self, function: str, argument: str) -> tuple[int, str]:
        """Call `package.module:function` in a forked process; return its exit code and output after its end."""
        output = os.memfd_create("output")
        try:
            process = self._fork(function, argument, _path_of(output))
            if len(self._imports) > 1:
                self._send(self._imports.popleft())
            while process.code is None:
                wait([process.descriptor if process.pid else self.answers.fileno()], SEND_SECONDS)
                self.read_answers()
                process.poll()
            self.reap(process)
            return process.code, _path_of(output).read_text(errors="replace")
        finally:
            os.close(output)

    def fork(
        self, specification: str, log: Path, after: Sequence[WorkerProcess] = (), function: str = WORKER
    ) -> WorkerProcess:
        """Request a worker's process, which waits until the processes in `after` (not reaped) have ended.

        It calls the function, `WORKER` or `COMMAND`, with the specification.
        """
        while self._imports:
            self._send(self._imports.popleft())
        return self._fork(function, specification, log, after)

    def _fork(self, function: str, argument: str, log: Path, after: Sequence[WorkerProcess] = ()) -> WorkerProcess:
        self._send([function, argument, str(log), [process.pid for process in after]])
        self._unanswered.append(WorkerProcess())
        return self._unanswered[-1]

    def reap(self, process: WorkerProcess) -> None:
        """Free the id and the descriptor of a process that has ended."""
        os.close(process.descriptor)
        self._send(process.pid)

    def _send(self, *requests: object) -> None:
        """Writes only what the pipe accepts, so that a stopped server does not block the caller."""
        self._unsent += b"".join(json.dumps(request).encode() + b"\n" for request in requests)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._child.requests.fileno(), self._unsent) :]

    def read_answers(self) -> None:
        """Read the ids of new processes. Raises JobError for an unusable package, ForkServerEnded."""
        self._send()
        *lines, self._pending = (self._pending + (self.answers.read() or b"")).split(b"\n")
        for line in lines:
            process = self._unanswered.popleft()
            with contextlib.suppress(ProcessLookupError):  # the server has ended since, and its workers with it
                process.descriptor, process.pid = os.pidfd_open(int(line)), int(line)
        code = self._child.process.poll()
        if code == REFUSED:
            raise JobError(next(last for log in self._logs if (last := last_lines(log, 1))))
        if code is not None:
            tail = next(filter(None, map(last_lines, self._logs)), "")
            raise ForkServerEnded(f"the fork server {with_last_lines(as_clause(describe_exit(code)), tail)}")

    def close(self) -> None:
        self._child.close()
        self._output.close()


def _path_of(descriptor: int) -> Path:
    """Any process of this user can open the path."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def describe_exit(code: int) -> str:
    """Return an exit code as text: "killed by SIGKILL"."""
    if code == REFUSED:
        return REFUSED_THE_JOB
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def last_lines(log: Path, count: int = 8) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_END))
        return LINE_SEPARATOR.join(file.read(LOG_END).decode(errors="replace").splitlines()[-count:])
    return ""


def main(launcher: str) -> None:
    """Run the server until standard input ends."""
    requests, answers = serve(launcher)
    try:
        worker = importlib.import_module("recycle.exec.worker.worker")
        importlib.import_module("recycle.ir.plugins").load_plugins()
        worker.warm_up()
    except RecycleError as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(REFUSED)
    for request in map(json.loads, requests):
        match request:
            case int():
                os.waitpid(request, 0)
            case str():
                _print_to(request)
            case {"folders": folders, "modules": modules}:
                sys.path[:0] = folders
                # megatron-core imports it, which may initialize CUDA, and forks could not use it then.
                if importlib.util.find_spec("transformer_engine") is None:
                    _import(modules)
            case _:
                answers.write(b"%d\n" % _fork(*request))


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _fork(function: str, argument: str, log: str, after: list[int]) -> int:
    gc.collect()
    gc.freeze()  # keeps imported objects out of garbage collection, so that workers do not copy their pages
    torch = sys.modules.get("torch")
    uses_cuda = torch is not None and torch.cuda.is_initialized()
    is_forkable = len(os.listdir("/proc/self/task")) == 1 and not uses_cuda
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
        _redirect(log)
        if not is_forkable:
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            os.execv(sys.executable, [sys.executable, "-c", _CALL, function, argument])
        call(function, argument)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def call(function: str, argument: str) -> None:
    """Call `package.module:function` with this argument. A refusal is one line and exit code 1."""
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(argument)
    except RecycleError as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(1)


_CALL = """
import sys
from recycle.exec.processes.forkserver import call
from recycle.exec.worker.worker import warm_up
from recycle.ir.plugins import load_plugins
load_plugins()
warm_up()
call(*sys.argv[1:])
"""


def _redirect(log: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _print_to(log)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the server's stdin holds requests that it has read ahead


def _print_to(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
