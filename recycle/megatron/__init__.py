"""Runs recycle in a training script of Megatron, with the script's model, DDP, optimizer, data and checkpoints.

    own loop, no failures   loop.py           `forward_backward_func(schedule)` in place of megatron-core's function
                            order.py          the program of a rank
                            lanes.py          transfers between the ranks of a pipeline
                            placement.py      `as_stage`: model chunks of other placements
    session                 own_loop.py       `session()`: what a script calls; advances the worker's main loop
                            script.py         model, optimizer and data of the script, as stages of a worker
                            micro_batches.py  the data of any micro-batch
                            live.py           groups of torch.distributed whose members may die and return
                            peers.py          the live processes of a generation
                            transfer.py       nested values with tensors between two of them
                            pretrain.py       Megatron-LM's `pretrain()` in a session
    both                    chunk.py          F, B, I and W of a model chunk
                            gradient_sync.py  when DDP sums gradients
                            without_gpu.py    megatron-core on CPUs
    checkpoints             torch_dist.py, conversion.py, arguments.py

A session is a worker of `recycle train` (`recycle.exec.worker`) with other stages: generations, plans, the interpreter,
reports, commits, steps and roll-forward, copies to a returning worker, heartbeats and faults are that package's. It may
import all of `recycle.exec` but the launcher and the leader. Begin with own_loop.py. Importing this package loads
neither torch nor megatron-core.
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
