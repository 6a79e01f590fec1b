"""Stages that compute on the simulated accelerator: every call queues a kernel and returns.

The result of a call is full of NaN until its kernel has run. Calls that give the host a number or the state wait for
the device first, as a copy from a GPU does.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch

from recycle.exec.model.stage import Stage, on_host
from tests.exec.accelerator.device import Device

KERNELS = ("begin_iteration", "release", "backward_weight", "spoil_gradients", "step")
"""Calls without a result."""
MESSAGES = {"forward": "_is_last", "redundant_forward": "", "backward_input": "_is_first", "backward": "_is_first"}
"""Calls that return a message -> attribute of stages that return none."""
HOST = ("message_spec", "gradient_buffers", "tied_buffers", "expect", "gradient_bucket")
"""Attributes that need no device."""


class QueuedStage:
    """A stage whose computations are kernels of a device."""

    def __init__(self, stage: Stage, device: Device):
        self._stage, self._device, self.index = stage, device, stage.index

    def __getattr__(self, name: str):
        if name in KERNELS:
            return partial(self._launch, name)
        if name in MESSAGES:
            return partial(self._message, name)
        if name not in HOST:
            self._device.compute.drain()
            self._device.check()
        return getattr(self._stage, name)

    def _launch(self, name: str, *arguments):
        self._device.launch(lambda: getattr(self._stage, name)(*arguments), name)

    def _message(self, name: str, *arguments) -> torch.Tensor | None:
        if MESSAGES[name] and getattr(self._stage, MESSAGES[name]):
            self._launch(name, *arguments)
            return None
        shape, dtype = self._stage.message_spec()
        message = torch.full(shape, torch.nan, dtype=dtype)
        self._device.launch(lambda: message.copy_(getattr(self._stage, name)(*arguments)), name)
        return message


def compute_on(device: Device):
    """Let stages that this process builds later compute on `device`."""
    for name in ("recycle.exec.worker.worker", "recycle.exec.launch.torchrun"):
        module = sys.modules.get(name)
        if module is not None:
            module.build_stages = _queued(module.build_stages, device)
    for name in ("recycle.exec.hooks.saver", "recycle.exec.worker.step_state"):
        pinning = sys.modules.get(name)
        if pinning is not None:
            pinning.on_host = partial(_pinned, device)


def _pinned(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    device.pin(tensor.nbytes)
    return on_host(tensor)


def _queued(build: Callable[..., dict[int, Stage]], device: Device) -> Callable[..., dict[int, Stage]]:
    def build_queued(*arguments, **settings):
        built = build(*arguments, **settings)
        return {index: QueuedStage(stage, device) for index, stage in built.items()}

    return build_queued
