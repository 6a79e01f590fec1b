"""Two streams of a device, on which the halves of an overlapped pair run at the same time.

A forward and a backward fill a device better together than in turn: DualPipe's pair hides the tensor-parallel and
expert-parallel communication of the one behind the products of the other (DeepSeek-V3, arXiv 2412.19437, section 3.2).
The host launches both; that they run together is for the device.

autograd runs a backward on the stream that its forward ran on, so a pair's forward goes to the stream on which the
pair's backward does not run. What is launched beside begins after all that was launched before, and what comes after
the pair after both halves. So memory that one stream gives back is not written by the other while it is still read;
only what an instruction is handed, which comes from the first stream, has to be told of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Streams(Protocol):
    """The stream on which everything runs, and one beside it."""

    def on_other_stream(self, tensors: Sequence[torch.Tensor | None]) -> AbstractContextManager[object]:
        """What is launched inside, with these tensors, runs on the other stream, after all that was launched before."""

    def join(self) -> None:
        """What is launched from now on runs after what was launched beside."""


class CudaStreams:
    """Those of a GPU. Not yet run on one.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def on_other_stream(self, tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._side)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where the host computes, one instruction after the other."""
    return CudaStreams(device) if device.type == "cuda" else None
