"""Simulated accelerators with faults or further requirements: plug-ins that a job names by `named`."""

import os
import threading
import time
from collections.abc import Callable
from random import Random

from recycle import Job, RunError, Worker
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.communicators import share_communicators
from tests.exec.accelerator.device import QUEUE, Device, Limits
from tests.exec.accelerator.transport import Simulated
from tests.jobs import varied

STRUCK = Worker(1, 1)
STRUCK_AT, STUCK_AT = 3, 6
SLOW_SECONDS, SLOW_KERNELS = 0.25, 12
PIN_SECONDS = 5e-6
"""Per byte: a quarter of a second for the largest tensor of a stage of a test, two seconds for all."""
FEW_LANES, FEW_STREAMS, FEW_MULTIPROCESSORS, HANGS = 3, 16, 40, 0.02


def named(plugin: type[Simulated]) -> str:
    """The value of `[membership] transport`."""
    return f"{plugin.__module__}:{plugin.__name__}"


def over(plugin: type[Simulated], job: Job, **membership: float) -> Job:
    """The same job on simulated accelerators."""
    return varied(job, membership={"transport": named(plugin)} | membership)


def _slow_down(device: Device):
    """Slow down each of the next computations."""
    launch, remaining = device.launch, SLOW_KERNELS

    def launch_slow(kernel, name=""):
        nonlocal remaining
        remaining -= 1
        if remaining <= 0:
            device.launch = launch
        launch(lambda: (time.sleep(SLOW_SECONDS), kernel()), name)

    device.launch = launch_slow


class Stuck(Simulated):
    """One worker's device is slow for a while, and later one of its kernels never ends; its host queues more work.

    The others have short launch queues, as with thousands of kernels per stage.
    """

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        device, never = self.take(), threading.Event()
        device.compute.length = QUEUE if groups.role == STRUCK else 1
        transport = _at(super().open(groups), groups.role, lambda: _slow_down(device))
        return _at(transport, groups.role, lambda: device.launch(never.wait), STUCK_AT)


class Demanding(Simulated):
    """Refuses a process without the environment that the transport requires, as NCCL's does."""

    def __init__(self, settings: TransportSettings):
        super().__init__(settings)
        missing = [name for name, value in self.environment.items() if os.environ.get(name) != value]
        if missing:
            raise RunError(f"not in the environment: {missing}")


class Unplugged(Simulated):
    """All links of one worker break in one iteration; no process ends, and no call raises an error."""

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        def unplug():
            for communicator in self.communicators.held().values():
                communicator.backend.break_link()

        return _at(super().open(groups), groups.role, unplug)


class Pinning(Simulated):
    """Pinned memory takes long to allocate."""

    @classmethod
    def make(cls) -> Device:
        return Device(limits=Limits(pin_seconds=PIN_SECONDS))


class Waiting(Simulated):
    """The host waits for each transfer, because it computes itself: for models that are not on the accelerator."""

    @classmethod
    def make(cls) -> Device:
        return _WaitingDevice()


class _WaitingDevice(Device):
    def wait(self, event: threading.Event):
        event.wait()


class Hostile(Simulated):
    """Everything that makes communicators scarce and slow, with few streams, multiprocessors and lanes."""

    @classmethod
    def make(cls) -> Device:
        share_communicators.__defaults__ = (FEW_LANES,)
        random = Random(os.getpid())
        return Device(limits=Limits(FEW_STREAMS, FEW_MULTIPROCESSORS, hangs=HANGS, pin_seconds=1e-7, random=random))


class Failing(Simulated):
    """A kernel of one worker fails in one iteration."""

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        return _at(super().open(groups), groups.role, lambda: self.take().launch(lambda: [].pop()))


def _at(transport: GroupTransport, role: Worker, strike: Callable[[], None], step=STRUCK_AT) -> GroupTransport:
    """Strike when worker STRUCK begins an iteration."""
    begin = transport.begin

    def begin_struck(program, iteration):
        begin(program, iteration)
        if (role, iteration) == (STRUCK, step):
            strike()

    transport.begin = begin_struck
    return transport
