"""A solver in a process of its own, which is killed at its deadline: native solvers overshoot their limits.

Requests travel as pickles on standard input, answers come back as JSON lines on standard output, whatever the solver
prints between them. A child answers one request after the other, as starting one and loading a solver takes most of
a second; one that is killed leaves the answers that it gave before, and the next request starts another. A child
whose parent is gone finds the end of its input.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

from recycle.solve.deadline import Deadline

_MARK, _DONE = b"answer: ", b"all answered"
_POLL_SECONDS = 0.1


class Child:
    """`python -m module`, started with the first request; ends with the `with` block."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def ask(
        self, request: tuple[object, ...], seconds: float, deadline: Deadline | None = None
    ) -> tuple[list[Any], str]:
        """(answers to the request, "done", "killed" or "solver failed").

        Args:
            seconds: wall time after which the child is killed; starting it counts.
            deadline: once it is over, the child is killed as well.
        """
        end = time.monotonic() + seconds
        process = self._process = self._process or _start(self.module)
        stdin, stdout = _pipes(process)
        left, printed = memoryview(pickle.dumps(request)), b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stdin, selectors.EVENT_WRITE)
            while not printed.endswith(b"\n" + _DONE + b"\n"):
                wait = min(_POLL_SECONDS, end - time.monotonic())
                if wait <= 0 or (deadline and deadline.is_over):
                    self.kill()
                    return _answers(printed), "killed"
                for key, _ in selector.select(wait):
                    if key.fileobj is stdout:
                        chunk = os.read(stdout.fileno(), 1 << 16)
                        printed += chunk
                        if not chunk:
                            self.kill()
                            return _answers(printed), "solver failed"
                    else:
                        try:
                            left = left[os.write(stdin.fileno(), left) :]
                        except BrokenPipeError:
                            left = left[:0]
                        if not left:
                            selector.unregister(stdin)
        return _answers(printed), "done"

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in _pipes(process):
                pipe.close()


def ask(module: str, request: tuple[object, ...], seconds: float) -> tuple[list[Any], str]:
    """`Child.ask` of a child for this request alone."""
    with Child(module) as child:
        return child.ask(request, seconds)


def serve(work: Callable[..., None]) -> None:
    """In the child: `work(*request)` for one request after the other. Ctrl-C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        work(*request)
        print(f"\n{_DONE.decode()}", flush=True)


def answer(given: object) -> None:
    """In the child: hand over one answer now."""
    print(f"\n{_MARK.decode()}{json.dumps(given)}", flush=True)


def _start(module: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    os.set_blocking(_pipes(process)[0].fileno(), False)
    return process


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _answers(printed: bytes) -> list[Any]:
    lines = printed.split(b"\n")[:-1]  # the last may be cut short
    return [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
