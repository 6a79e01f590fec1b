"""Simulated accelerators that something happens to, or that ask for more: plug-ins that a job names by `named`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from recycle.errors import RunError
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.lanes import LaneTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.instruction import Instruction
from recycle.job.shape import Worker
from tests.exec.accelerator.device import QUEUE, Device, Kernel
from tests.exec.accelerator.transport import Simulated, SimulatedTransport

STRUCK = Worker(1, 1)
STRUCK_AT = 3
COPY_SECONDS = 1.0
SLOW_SECONDS, SLOW_KERNELS = 0.25, 12


def named(plugin: type[Simulated]) -> str:
    """What `[membership] transport` says."""
    return f"{plugin.__module__}:{plugin.__name__}"


class Lazy(Simulated):
    """Kernels are loaded at their first use, when the device is idle."""

    @classmethod
    def make(cls) -> Device:
        return Device(eager=False)


class Full(Simulated):
    """Launch queues that are soon full, as with thousands of kernels per stage, behind a device that is slow once."""

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        device = self.take()
        device.compute.length = QUEUE if groups.role == STRUCK else 1
        return _at(super().open(groups), groups.role, lambda: _slow_down(device))


def _slow_down(device: Device) -> None:
    """Each of the next computations takes a while, none of them too long."""
    launch, left = device.launch, SLOW_KERNELS

    def launch_slow(kernel: Kernel, name: str = "") -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            device.launch = launch  # type: ignore[method-assign]
        launch(lambda: (time.sleep(SLOW_SECONDS), kernel()), name)

    device.launch = launch_slow  # type: ignore[method-assign]


class Stuck(Simulated):
    """A kernel of one worker never ends, while its host gives the device all that follows."""

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        never = threading.Event()
        return _at(super().open(groups), groups.role, lambda: self.take().launch(never.wait))


class Demanding(Simulated):
    """Refuses a process that lacks what the transport says its environment must have, as NCCL's does."""

    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        missing = [name for name, value in self.environment.items() if os.environ.get(name) != value]
        if missing:
            raise RunError(f"not in the environment: {missing}")


class Failing(Simulated):
    """A kernel of one worker fails in one iteration."""

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        return _at(super().open(groups), groups.role, lambda: self.take().launch(lambda: [].pop()))


def _at(transport: GroupTransport, role: Worker, strike: Callable[[], None]) -> GroupTransport:
    """Strike as the iteration STRUCK_AT of the worker STRUCK begins."""
    begin = transport.begin

    def begin_struck(program: Sequence[Instruction], iteration: int) -> None:
        begin(program, iteration)
        if (role, iteration) == (STRUCK, STRUCK_AT):
            strike()

    transport.begin = begin_struck  # type: ignore[method-assign]
    return transport


class SlowCopies(Simulated):
    """The state for a worker that joins takes a while to come."""

    def _form(self, groups: GroupsOfGeneration) -> LaneTransport:
        return _SlowCopies(self.settings, groups, self.communicators, self.take())


class _SlowCopies(SimulatedTransport):
    def send_state(self, peer: Worker, tensors: Sequence[torch.Tensor]) -> None:
        self._accelerator.launch(lambda: time.sleep(COPY_SECONDS))
        super().send_state(peer, tensors)
