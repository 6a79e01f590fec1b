"""Stages that compute on the simulated accelerator: every call queues a kernel and returns.

The result of a call is full of NaN until its kernel has run. Calls that give the host a number or the state wait for
the device first, as a copy from a GPU does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch

from recycle.exec.model.stage import Stage
from recycle.job.shape import MicroBatch
from tests.exec.accelerator.device import Device


class QueuedStage:
    """A stage whose computations are kernels of a device."""

    def __init__(self, stage: Stage, device: Device) -> None:
        self._stage, self._device, self.index = stage, device, stage.index
        self.message_spec, self.gradient_buffers = stage.message_spec, stage.gradient_buffers
        self.tied_buffers, self.expect, self.gradient_bucket = stage.tied_buffers, stage.expect, stage.gradient_bucket

    def __getattr__(self, name: str) -> Any:
        """Any other attribute is read after the device is idle."""
        self._device.compute.drain()
        self._device.check()
        return getattr(self._stage, name)

    def begin_iteration(self, step: int) -> None:
        self._launch("begin_iteration", step)

    def forward(self, micro_batch: MicroBatch, activation: torch.Tensor | None) -> torch.Tensor | None:
        return self._message("forward", self._stage._is_last, micro_batch, activation)

    def redundant_forward(self, micro_batch: MicroBatch, activation: torch.Tensor | None) -> torch.Tensor | None:
        return self._message("redundant_forward", False, micro_batch, activation)

    def release(self, micro_batch: MicroBatch) -> None:
        self._launch("release", micro_batch)

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self._message("backward_input", self._stage._is_first, micro_batch, gradient)

    def backward_weight(self, micro_batch: MicroBatch, bucket: int = 0, buckets: int = 1) -> None:
        self._launch("backward_weight", micro_batch, bucket, buckets)

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self._message("backward", self._stage._is_first, micro_batch, gradient)

    def spoil_gradients(self) -> None:
        self._launch("spoil_gradients")

    def step(self, iteration: int, clip_factor: float) -> None:
        self._launch("step", iteration, clip_factor)

    def _launch(self, name: str, *arguments: Any) -> None:
        self._device.launch(lambda: getattr(self._stage, name)(*arguments), name)

    def _message(self, name: str, is_end: bool, *arguments: Any) -> torch.Tensor | None:
        if is_end:
            self._launch(name, *arguments)
            return None
        shape, dtype = self._stage.message_spec()
        message = torch.full(shape, torch.nan, dtype=dtype)
        self._device.launch(lambda: message.copy_(getattr(self._stage, name)(*arguments)), name)
        return message


def compute_on(device: Device) -> None:
    """Let stages that this process builds later compute on `device`."""
    for name in ("recycle.exec.worker.worker", "recycle.exec.launch.torchrun"):
        module: Any = sys.modules.get(name)
        if module is not None:
            module.build_stages = _queued(module.build_stages, device)


def _queued(build: Callable[..., dict[int, Stage]], device: Device) -> Callable[..., dict[int, Stage]]:
    def build_queued(*arguments: Any, **settings: Any) -> dict[int, Stage]:
        built = build(*arguments, **settings)
        return {index: cast(Stage, QueuedStage(stage, device)) for index, stage in built.items()}

    return build_queued
