"""The transport plug-in of the simulated accelerator: the code that NCCL runs on, over communicators like NCCL's.

Named in a job, `[membership] transport = "tests.exec.accelerator.transport:Simulated"`.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.lanes import LanePlugin, LaneTransport
from recycle.exec.transport.nccl import Nccl
from recycle.exec.transport.plugin import TransportSettings
from recycle.job import Job
from tests.exec.accelerator.communicator import Communicator, abort_group
from tests.exec.accelerator.device import Device, DeviceClock, Stream
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

    def draw_stream(self) -> Stream:
        return self.take().draw()

    def _form(self, groups: GroupsOfGeneration) -> LaneTransport:
        return SimulatedTransport(self, groups, self.take())


class OwnDevice(Simulated):
    """For threads of one process, with a device each."""

    def __init__(self, settings: TransportSettings, device: Device):
        self.device_of_thread = device
        super().__init__(settings)

    def take(self) -> Device:
        return self.device_of_thread


class SimulatedTransport(LaneTransport):
    """One generation of it."""

    def __init__(self, plugin: LanePlugin, groups: GroupsOfGeneration, accelerator: Device):
        self._accelerator = accelerator
        super().__init__(plugin, groups)

    def _make(self, name: str, rank: int, size: int, ctas: int | None):
        seconds = self._settings.limits.form_timeout
        store = PrefixStore(name, self._store)
        return Communicator(self._accelerator, store, rank, size, self._settings.address, seconds, ctas)

    def _has_failed(self, backend) -> bool:
        return bool(backend.has_failed())

    def _multiprocessors(self) -> int:
        return self._accelerator.limits.multiprocessors

    def _abort(self, groups):
        abort_group(groups)

    def _mark(self) -> Callable[[], bool]:
        return self._accelerator.reached().is_set

    def _synchronize(self):
        self._accelerator.synchronize()
