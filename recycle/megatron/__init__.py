"""Schedules of recycle inside a training script of Megatron's: its loop, its DDP, its optimizer, its launcher.

`forward_backward_func(schedule)` takes the place of megatron-core's `get_forward_backward_func()`; `as_stage` builds
the chunks of a placement that is not Megatron's own. Importing this package loads neither torch nor megatron-core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recycle.megatron.loop import ForwardBackward, forward_backward_func
    from recycle.megatron.placement import as_stage

__all__ = ["ForwardBackward", "as_stage", "forward_backward_func"]

_HOMES = {"ForwardBackward": "loop", "forward_backward_func": "loop", "as_stage": "placement"}


def __getattr__(name: str) -> Any:
    """The public names load torch and megatron-core; importing the package alone does not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"recycle.megatron.{_HOMES[name]}"), name)
