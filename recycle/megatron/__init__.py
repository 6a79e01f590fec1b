"""Runs recycle's schedules in a training script of Megatron, with its loop, DDP, optimizer and launcher.

`forward_backward_func(schedule)` replaces megatron-core's `get_forward_backward_func()`. `as_stage` builds the chunks
of a placement that differs from Megatron's. Importing this package loads neither torch nor megatron-core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recycle.megatron.loop import ForwardBackward, forward_backward_func
    from recycle.megatron.own_loop import Session, session
    from recycle.megatron.placement import as_stage

__all__ = ["ForwardBackward", "Session", "as_stage", "forward_backward_func", "session"]

_HOMES = {
    **{"ForwardBackward": "loop", "forward_backward_func": "loop", "as_stage": "placement"},
    **{"Session": "own_loop", "session": "own_loop"},
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"recycle.megatron.{_HOMES[name]}"), name)
