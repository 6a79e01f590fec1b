"""Run schedules: stages, transports, the interpreter, membership, recovery, the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recycle.exec.launcher import Observer, RunResult, train
    from recycle.exec.run import run

__all__ = ["Observer", "RunResult", "run", "train"]


def __getattr__(name: str) -> Any:
    """`run` and `train` load torch; importing `recycle.exec` alone does not."""
    from recycle.exec import launcher
    from recycle.exec.run import run

    found = {"run": run, "train": launcher.train, "Observer": launcher.Observer, "RunResult": launcher.RunResult}
    if name not in found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found[name]
