"""Processes forked from a server that has imported torch and megatron-core, instead of each importing them again.

A run starts two planners, a fork server is started per kind of model, and other tests need processes of their own:
hundreds in all, whose imports took more of the processor than what they do. The server is that of `multiprocessing`,
one per test process. Some agents, torchrun and the examples are started as users start them (docs/testing.md), and
tests/test_child.py starts `recycle.child.Child` itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from recycle import child

PRELOADED = (
    "recycle.exec.worker.main_loop",
    "recycle.exec.model.gpt",
    "recycle.exec.data.batches",
    "recycle.exec.launch.launcher",
    "recycle.exec.launch.agent",
    "recycle.solve.planner",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint.state_dict_loader",
    "safetensors.torch",
    "tests.warmed",
)


def warm_context() -> ForkServerContext:
    """The context of `multiprocessing` whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _address_of_server() -> str:
    """Where the server listens, for processes that are forked from it and start further ones."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running()
    address: str = server._forkserver_address
    return address


def _share_server(address: str) -> None:
    """Have this process ask the server that it was forked from; by itself it would start one of its own, and import."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server.ensure_running = address, lambda: None


def end_processes(members: Iterable[tuple[Any, Any]]) -> None:
    """End processes that end when None comes through their pipe; kill who does not within 10 s.

    Args:
        members: (process, this end of its pipe) each.
    """
    members = list(members)
    for _, pipe in members:
        with contextlib.suppress(OSError):
            pipe.send(None)
    for process, _ in members:
        process.join(10.0)
        if process.is_alive():
            process.kill()


class _Descriptor:
    """A file descriptor that reaches the process that is started with it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self._number),)


def _detach(passed: Any) -> int:
    return int(passed.detach())


class _WarmProcess:
    """What `recycle.child.Child` uses of `subprocess.Popen`, for `python -m module PARENT arguments...`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: Any,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        module, _, *arguments = command[2:]
        requests, to_requests = os.pipe()
        from_answers, answers = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        errors = 2 if stderr is None else nowhere if stderr == subprocess.DEVNULL else stderr.fileno()
        streams = [_Descriptor(number) for number in (requests, answers, errors)]
        self._process = warm_context().Process(
            target=_run, args=(_address_of_server(), module, arguments, streams, dict(env), os.getcwd()), daemon=True
        )
        self._process.start()
        for number in (requests, answers, nowhere):
            os.close(number)
        self.stdin, self.stdout = os.fdopen(to_requests, "wb"), os.fdopen(from_answers, "rb")
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


class WarmCommand:
    """The command line in a process of its own, with what tests use of `subprocess.Popen`.

    Args:
        arguments: of `recycle`.
        directory: to run in.
        output: takes standard output and standard error.

    Attributes:
        pid: of the process.
    """

    def __init__(self, arguments: Sequence[str], directory: Path, output: IO[bytes]) -> None:
        streams = [_Descriptor(output.fileno()) for _ in range(2)]
        self._process = warm_context().Process(
            target=_run_command,
            args=(_address_of_server(), list(arguments), streams, dict(os.environ), str(directory)),
            daemon=True,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("recycle", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_torchrun(arguments: Sequence[str], directory: Path, limit: float = 240.0) -> str:
    """What the processes of `torchrun *arguments` print: `--nproc-per-node N`, then a script or `-m MODULE`.

    Raises:
        AssertionError: one of them fails, or they take longer than `limit` seconds.
    """
    option, count, *command = arguments
    assert option == "--nproc-per-node"
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's own process has it
    context = warm_context()  # before the server is asked for its address, which starts it
    processes, outputs = [], []
    for rank in range(int(count)):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"},
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        outputs.append(tempfile.TemporaryFile())  # noqa: SIM115
        streams = [_Descriptor(outputs[-1].fileno()) for _ in range(2)]
        started = (_address_of_server(), list(command), streams, environment, str(directory))
        processes.append(context.Process(target=_run_python, args=started, daemon=True))
        processes[-1].start()
    ends = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, ends - time.monotonic()))
    printed = ""
    for process, output in zip(processes, outputs, strict=True):
        process.kill()
        output.seek(0)
        printed += output.read().decode()
        output.close()
    assert [process.exitcode for process in processes] == [0] * len(processes), printed[-4000:]
    return printed


def _run_python(
    server: str, command: list[str], streams: list[int], environment: dict[str, str], directory: str
) -> None:
    _share_server(server)
    _settle(streams, environment, directory, first=1)
    sys.argv = command[command[0] == "-m" :]
    if command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(directory, command[0]).parent))
        runpy.run_path(str(Path(directory, command[0])), run_name="__main__")


def _run_command(
    server: str, arguments: list[str], streams: list[int], environment: dict[str, str], directory: str
) -> None:
    _share_server(server)
    _settle(streams, environment, directory, first=1)
    from recycle.cli import main

    with warm_children():
        main(arguments)


def _settle(streams: list[int], environment: dict[str, str], directory: str, first: int) -> None:
    """What a process of its own has: its streams from number `first` on, variables, directory; it may have children."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for target, source in enumerate(streams, first):
        os.dup2(source, target)
        os.close(source)


def _run(
    server: str, module: str, arguments: list[str], streams: list[int], environment: dict[str, str], directory: str
) -> None:
    _share_server(server)
    _settle(streams, environment, directory, first=0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = [module, str(os.getppid()), *arguments]
    warnings.simplefilter("ignore", RuntimeWarning)  # the module may have been imported already
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _start(command: Sequence[str], **options: Any) -> Any:
    start: Any = _WarmProcess if command[0] == _PYTHON else subprocess.Popen
    return start(command, **options)


_PYTHON = sys.executable


@contextlib.contextmanager
def warm_children() -> Iterator[None]:
    """Meanwhile a `recycle.child.Child` is forked from the server."""
    child.subprocess = SimpleNamespace(Popen=_start, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    yield
    child.subprocess = subprocess
