"""Lets megatron-core's loop and DDP run without a GPU, to try a script; by itself they make tensors on "cuda" only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from recycle.megatron_versions import complete_local_layers


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:  # its optimizers accept "torch.cuda" only
            return str(function(*args)).replace("torch.", "torch.cuda.")
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)


class _NoStream:
    """Of this process, where nothing runs on a stream."""

    wait_stream = record_event = synchronize = lambda self, *_: self


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Every tensor that is asked for on a GPU is on the CPU inside this block."""
    complete_local_layers()
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_: None
    stream = _NoStream()
    cuda.Stream = cuda.current_stream = lambda *_, **__: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state = lambda *_, **__: torch.zeros(0), lambda *_, **__: None
    with _CudaMeansCpu():
        yield
