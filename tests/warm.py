"""Processes forked from a server that has imported torch and megatron-core, instead of each importing them again.

A run starts two planners, a fork server is started per kind of model, and other tests need processes, too:
hundreds in all, whose imports took more of the processor than what they do. The server is that of `multiprocessing`,
one per test process. What users start in another way is started that way once (docs/measurements/testing.md), and
tests/test_child.py starts `recycle.child.Child` itself.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, Self

from recycle import child

PRELOADED = (
    "recycle.exec.worker.main_loop",
    "recycle.exec.model.gpt",
    "recycle.exec.data.batches",
    "recycle.exec.launch.launcher",
    "recycle.exec.launch.agent",
    "recycle.solve.planner",
    "safetensors.torch",
    "torch._dynamo",
    "tests.warmed",
)
ANSWER_SECONDS = 240.0
ABANDONED_SECONDS = 1200.0
"""After which a process of a pool ends, whatever it does."""


def warm_context() -> ForkServerContext:
    """The context of `multiprocessing` whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _address_of_server() -> str:
    """Where the server listens, for processes that are forked from it and start further ones."""
    server = forkserver._forkserver
    warm_context()
    server.ensure_running()
    return server._forkserver_address


def _share_server(address: str):
    """Have this process ask the server that it was forked from; by itself it would start another one, and import."""
    server = forkserver._forkserver
    server._forkserver_address, server.ensure_running = address, lambda: None


class _Descriptor:
    """A file descriptor that reaches the process that is started with it."""

    def __init__(self, number: int):
        self._number = number

    def __reduce__(self):
        return _detach, (reduction.DupFd(self._number),)


def _detach(passed) -> int:
    return int(passed.detach())


class WarmProcess:
    """A process with its session and streams, with what tests use of `subprocess.Popen`.

    Args:
        function: is called with `arguments`.
        streams: the process's descriptor -> that of this process.
        directory, environment: of this process when left out.

    Attributes:
        pid: of the process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments,
        streams: Mapping[int, int],
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        passed = {target: _Descriptor(source) for target, source in streams.items()}
        settings = _address_of_server(), passed, str(directory or Path.cwd()), dict(environment or os.environ)
        self._process = warm_context().Process(target=_run, args=(*settings, function, *arguments), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the server has reaped it since
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _run(
    server: str,
    streams: dict[int, int],
    directory: str,
    environment: dict[str, str],
    function: Callable[..., object],
    *arguments,
):
    _share_server(server)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for target, source in streams.items():
        os.dup2(source, target)
        os.close(source)
    warm_children()
    function(*arguments)


def run_recycle(*arguments: str):
    """The command line."""
    from recycle.cli import main

    main(list(arguments))


def run_python(*command: str):
    """What Python does with a script, or `-m` and a module, and arguments."""
    sys.argv = list(command[command[0] == "-m" :])
    if command[0] == "-m":
        warnings.simplefilter("ignore", RuntimeWarning)  # the module may have been imported already
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command[0]).parent.absolute()))
        runpy.run_path(command[0], run_name="__main__")


def start_recycle(arguments: Sequence[str], directory: Path, output: IO[bytes]) -> WarmProcess:
    """Start the command line; `output` takes standard output and standard error."""
    return WarmProcess(run_recycle, *arguments, streams=dict.fromkeys((1, 2), output.fileno()), directory=directory)


def outputs_of_scripts(command: Sequence[str], directory: Path, variables: Sequence[Mapping[str, str]] = ({},)) -> str:
    """What Python processes print: one for each of these variables, all with the same command.

    Raises:
        AssertionError: one of them fails, or they take longer than `ANSWER_SECONDS`.
    """
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in variables]
        processes = [
            WarmProcess(
                *(run_python, *command),
                streams=dict.fromkeys((1, 2), output.fileno()),
                directory=directory,
                environment={**os.environ, **own},
            )
            for output, own in zip(outputs, variables, strict=True)
        ]
        ends = time.monotonic() + ANSWER_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(max(0.0, ends - time.monotonic()))
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
        printed = ""
        for output in outputs:
            output.seek(0)
            printed += output.read().decode()
    assert codes == [0] * len(codes), printed[-4000:]
    return printed


def run_torchrun(arguments: Sequence[str], directory: Path) -> str:
    """What the processes of `torchrun *arguments` print: `--nproc-per-node N`, then a script or `-m MODULE`."""
    option, count, *command = arguments
    assert option == "--nproc-per-node"
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's own process has it
    common = {
        **{"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)},
        **{"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(int(count))]
    return outputs_of_scripts(command, directory, ranks)


class _WarmChild(WarmProcess):
    """What `recycle.child.Child` uses of `subprocess.Popen`, for `python -m module PARENT arguments...`."""

    def __init__(self, command: Sequence[str], *, stderr, env: Mapping[str, str], **_):
        module, _parent, *arguments = command[2:]
        requests, to_requests = os.pipe()
        from_answers, answers = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        errors = 2 if stderr is None else nowhere if stderr == subprocess.DEVNULL else stderr.fileno()
        super().__init__(_run_child, module, *arguments, streams={0: requests, 1: answers, 2: errors}, environment=env)
        for number in (requests, answers, nowhere):
            os.close(number)
        self.stdin, self.stdout = os.fdopen(to_requests, "wb"), os.fdopen(from_answers, "rb")


def _run_child(module: str, *arguments: str):
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    run_python("-m", module, str(os.getppid()), *arguments)


_PYTHON = sys.executable


def _start(command: Sequence[str], **options):
    start = _WarmChild if command[0] == _PYTHON else subprocess.Popen
    return start(command, **options)


def warm_children():
    """From now on a `recycle.child.Child` is forked from the server."""
    child.subprocess = SimpleNamespace(Popen=_start, PIPE=subprocess.PIPE)


class Failure(NamedTuple):
    """An error in a process of a pool."""

    text: str


class WarmPool:
    """Processes that answer one request after another; use as a context manager.

    Args:
        count: how many.
        make: importable; in each process it is called with the store, the number of the process and `arguments`, and
            returns what is called with each request.

    Attributes:
        store: of torch, which all share.
    """

    def __init__(self, count: int, make: Callable[..., Callable[..., Any]], *arguments):
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._arguments = make, self.store.port, arguments
        self._members = [self._start(rank) for rank in range(count)]

    def _start(self, rank: int) -> tuple[Any, Any]:
        context = warm_context()
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_answer, args=(child_end, rank, *self._arguments), daemon=True)
        process.start()
        child_end.close()
        return process, parent_end

    def await_end(self, rank: int):
        """Wait until a process has ended by itself, and start another in its place."""
        process, _ = self._members[rank]
        process.join(ANSWER_SECONDS)
        assert process.exitcode is not None, f"process {rank} does not end"
        self._members[rank] = self._start(rank)

    def send(self, rank: int, *request):
        self._members[rank][1].send(request)

    def receive(self, rank: int):
        """A process's answer, or its `Failure`."""
        pipe = self._members[rank][1]
        assert pipe.poll(ANSWER_SECONDS), f"process {rank} hangs"
        return pipe.recv()

    def ask(self, count: int, *request):
        """The answers of the first `count` processes to the same request. Raises RuntimeError where one failed."""
        assert count <= len(self._members), "too few processes were started"
        for rank in range(count):
            self.send(rank, *request)
        answers = [self.receive(rank) for rank in range(count)]
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failure):
                raise RuntimeError(f"process {rank}: {answer.text}")
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        for _, pipe in self._members:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, _ in self._members:
            process.join(10.0)
            if process.is_alive():
                process.kill()


def _answer(pipe, rank: int, make: Callable[..., Callable[..., Any]], port: int, arguments):
    import torch
    from torch.distributed import TCPStore

    faulthandler.dump_traceback_later(ABANDONED_SECONDS, exit=True)
    torch.set_num_threads(1)
    answer = make(TCPStore("127.0.0.1", port, is_master=False), rank, *arguments)
    with contextlib.suppress(EOFError):
        while (request := pipe.recv()) is not None:
            try:
                pipe.send(answer(*request))
            except Exception as error:
                pipe.send(Failure(f"{type(error).__name__}: {error}"))
    os._exit(0)  # to leave torch's groups in order would wait for processes that are gone
