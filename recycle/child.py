"""Child processes that answer requests: one JSON line per request on standard input, one per answer on standard output.

The parent starts `python -m module` with a `Child`; the module calls `serve`. The child ends with its parent in all
cases, ignores Ctrl-C, SIGTERM, SIGHUP and SIGUSR1, and redirects other output to standard error. The answers of a child
that ended reach end-of-file; `kill` ends a child that hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import BinaryIO, cast

import msgspec

_PR_SET_PDEATHSIG = 1


class Child:
    """The parent's side of a child process, which the constructor starts.

    Args:
        module: run as `python -m module PARENT arguments...`; it calls `serve` with the first argument.
        environment: variables added to the environment of this process.
        errors: file for the child's standard error; that of this process when left out.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        errors: BinaryIO | int | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.requests = cast(BinaryIO, self.process.stdin)
        self.answers = cast(BinaryIO, self.process.stdout)

    def send(self, request: object) -> None:
        """Write a request as a line of JSON. A child that has ended is noticed when its answers are read."""
        with contextlib.suppress(BrokenPipeError):
            self.requests.write(msgspec.json.encode(request) + b"\n")
            self.requests.flush()

    def lines(self) -> Iterator[bytes]:
        """Iterate over the answers, one line each, until the child ends."""
        return iter(self.answers)

    def kill(self) -> None:
        """End the process if it runs, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process and close its pipes."""
        self.kill()
        for pipe in (self.requests, self.answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def serve(parent: str) -> tuple[BinaryIO, BinaryIO]:
    """Set up the child's side and return (requests, answers); call it first. Later prints go to standard error."""
    die_with_parent(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return sys.stdin.buffer, answers


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` ends; exit at once if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")
