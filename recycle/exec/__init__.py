"""Runs schedules: stages, transports, the interpreter, the leader and agents, recovery, the launcher."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recycle.exec.launch.launcher import RunResult, train
    from recycle.exec.launch.standalone import run
    from recycle.exec.launch.trackers import Observer
    from recycle.exec.model.state.rules import Optimizer

__all__ = ["Observer", "Optimizer", "RunResult", "run", "train"]

_HOMES = {
    "Observer": "launch.trackers",
    "Optimizer": "model.state.rules",
    "RunResult": "launch.launcher",
    "train": "launch.launcher",
    "run": "launch.standalone",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, because public names import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"recycle.exec.{_HOMES[name]}"), name)
