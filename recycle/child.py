"""A Python process that answers: requests in on its standard input, answers out on its standard output, a line each.

The parent starts `python -m module` with a `Child`, the module calls `serve`. The child ends with its parent however
that ends, leaves Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 to it, and keeps standard output for answers: whatever else is
printed goes to standard error. A child that has ended is seen as the end of its answers; one that hangs is killed by
`kill`.
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
    """The parent's side of a child process, which is started at once.

    Args:
        module: run as `python -m module PARENT arguments...`; it calls `serve` with the first argument.
        environment: variables beside those of this process.
        errors: file for its standard error; that of this process when left out.
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
        """Its answers, a line each, until it ends."""
        return iter(self.answers)

    def kill(self) -> None:
        """End the process, if it has not ended, and wait until it has."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process and give its pipes back."""
        self.kill()
        for pipe in (self.requests, self.answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def serve(parent: str) -> tuple[BinaryIO, BinaryIO]:
    """In the child, first of all: (requests, answers). Prints go to standard error from here on.

    Args:
        parent: process id of whoever started this process, its first argument.
    """
    die_with_parent(int(parent))
    for left in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(left, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return sys.stdin.buffer, answers


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends; ends it at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")
