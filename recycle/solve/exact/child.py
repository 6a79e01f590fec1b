"""A solver in a child process, which is killed at its deadline: native solvers overshoot their limits.

The request travels as a pickle on standard input, answers come back as marked JSON lines on standard output, whatever
the solver prints between them. A child that is killed leaves the answers that it gave before.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_MARK = "answer: "


def ask(module: str, request: tuple[object, ...], seconds: float) -> list[Any]:
    """The answers that `python -m module` gives to one request.

    Args:
        module: calls `serve` when it is run.
        seconds: wall time after which the child is killed; starting it counts.
    """
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            command, input=pickle.dumps(request), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds
        )
        printed = done.stdout
    except subprocess.TimeoutExpired as killed:
        printed = killed.stdout or b""
    lines = printed.decode(errors="replace").split("\n")[:-1]  # the last may be cut short
    return [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]


def serve(work: Callable[..., None]) -> None:
    """In the child: `work(*request)`. Ctrl-C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work(*pickle.load(sys.stdin.buffer))


def answer(given: object) -> None:
    """In the child: hand over one answer now."""
    print(f"\n{_MARK}{json.dumps(given)}", flush=True)
