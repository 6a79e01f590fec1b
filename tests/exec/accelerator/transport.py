"""The transport plug-in of the simulated accelerator: the code that NCCL runs on, over communicators like NCCL's.

Named in a job, `[membership] transport = "tests.exec.accelerator.transport:Simulated"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from recycle.exec.transport.communicators import Communicators
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.lanes import LanePlugin, LaneTransport
from recycle.exec.transport.nccl import Nccl
from recycle.exec.transport.plugin import TransportSettings
from recycle.job import Job
from tests.exec.accelerator.communicator import Communicator, abort_group
from tests.exec.accelerator.device import Device, DeviceClock
from tests.exec.accelerator.stage import compute_on

SIMULATED = f"{__name__}:Simulated"


class Simulated(LanePlugin):
    """Between processes with a simulated accelerator each."""

    has_shards = True
    environment: ClassVar[Mapping[str, str]] = Nccl.environment
    accelerator: ClassVar[Device | None] = None
    """Of this process."""

    @classmethod
    def refusal(cls, job: Job) -> str | None:
        return None

    @classmethod
    def device(cls, local_index: int) -> torch.device:
        """Called once, by a worker process before it builds its stages."""
        compute_on(cls.take())
        return torch.device("cpu")

    @classmethod
    def take(cls) -> Device:
        """The accelerator of this process."""
        if Simulated.accelerator is None:
            Simulated.accelerator = cls.make()
        return Simulated.accelerator

    @classmethod
    def make(cls) -> Device:
        """A fresh accelerator."""
        return Device()

    def clock(self) -> DeviceClock:
        return DeviceClock(self.take())

    def _form(self, groups: GroupsOfGeneration) -> LaneTransport:
        return SimulatedTransport(self.settings, groups, self.communicators, self.take())


class SimulatedTransport(LaneTransport):
    """One generation of it."""

    def __init__(
        self,
        settings: TransportSettings,
        groups: GroupsOfGeneration,
        communicators: Communicators,
        accelerator: Device,
    ) -> None:
        super().__init__(settings, groups, communicators)
        self._accelerator = accelerator

    def _make(self, name: str, rank: int, size: int) -> Any:
        seconds = self._settings.limits.form_timeout
        store = PrefixStore(name, self._store)
        return Communicator(self._accelerator, store, rank, size, self._settings.address, seconds)

    def _abort(self, groups: Sequence[Any]) -> None:
        abort_group(groups)

    def _mark(self) -> Callable[[], bool]:
        return self._accelerator.reached().is_set

    def _synchronize(self) -> None:
        self._accelerator.synchronize()
