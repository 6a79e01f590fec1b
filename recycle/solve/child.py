"""A solver in a process of its own, which is killed at its deadline: native solvers overshoot their limits.

The request travels as a pickle on standard input, answers come back as JSON lines on standard output, whatever the
solver prints between them; a child that is killed leaves the answers that it gave before.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_MARK = "answer: "


def ask(module: str, request: object, seconds: float) -> tuple[list[Any], str]:
    """(answers of `python -m module` to the request, "done", "killed" or "solver failed")."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", module],
            input=pickle.dumps(request),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return _answers(expired.stdout or b""), "killed"
    return _answers(child.stdout), "solver failed" if child.returncode else "done"


def serve(work: Callable[..., None]) -> None:
    """In the child: `work(*request)`."""
    work(*pickle.load(sys.stdin.buffer))


def answer(given: object) -> None:
    """In the child: hand over one answer now."""
    print(f"\n{_MARK}{json.dumps(given)}", flush=True)


def _answers(printed: bytes) -> list[Any]:
    lines = printed.decode(errors="replace").split("\n")[:-1]  # the last may be cut short
    return [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
