"""Simulated accelerators that something happens to, or that ask for more: plug-ins that a job names by `named`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from recycle.errors import RunError
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.lanes import LaneTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.instruction import Instruction
from recycle.shape import Worker
from tests.exec.accelerator.device import Device
from tests.exec.accelerator.transport import Simulated, SimulatedTransport

STRUCK = Worker(1, 1)
FAILS_AT = 3
COPY_SECONDS = 1.0


def named(plugin: type[Simulated]) -> str:
    """What `[membership] transport` says."""
    return f"{plugin.__module__}:{plugin.__name__}"


class Lazy(Simulated):
    """Kernels are loaded at their first use, when the device is idle."""

    @classmethod
    def make(cls) -> Device:
        return Device(eager=False)


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
        transport = super().open(groups)
        begin = transport.begin

        def fail(program: Sequence[Instruction], iteration: int) -> None:
            begin(program, iteration)
            if (groups.role, iteration) == (STRUCK, FAILS_AT):
                self.take().launch(lambda: [].pop())

        transport.begin = fail  # type: ignore[method-assign]
        return transport


class SlowCopies(Simulated):
    """The state for a worker that joins takes a while to come."""

    def _form(self, groups: GroupsOfGeneration) -> LaneTransport:
        return _SlowCopies(self.settings, groups, self.take())


class _SlowCopies(SimulatedTransport):
    def send_state(self, peer: Worker, tensors: Sequence[torch.Tensor]) -> None:
        self._accelerator.launch(lambda: time.sleep(COPY_SECONDS))
        super().send_state(peer, tensors)
