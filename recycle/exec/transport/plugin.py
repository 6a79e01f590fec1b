"""What a transport is to everything outside of this folder: `TransportPlugin`, one subclass per transport.

A worker process has one plug-in object, which opens the groups of each generation in turn. To add a transport: a
subclass in a file of its own, and its line in transports.py; docs/transports.md has an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from recycle.exec.device.clock import Clock, clock_of
from recycle.exec.device.device_progress import DeviceProgress, DeviceState
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.paced_links import PacedLinks
from recycle.job import Job
from recycle.job.sections import MembershipSection
from recycle.job.shape import Worker


@dataclass(frozen=True)
class TransportSettings:
    """What a plug-in knows of the process that it moves tensors for.

    Attributes:
        store: a torch store client that groups form on.
        device: that the stages of this process compute on.
        address: of this machine, by which peers reach it.
        tensor: tensor rank of this process, and T. Lanes and sums are between processes of one tensor rank.
        kept_addresses: (address, port) of connections that are not the transport's and may be made at any time.
        links: what makes messages take longer; None for nothing. Of a plug-in that has `paces_links`.
        limits: seconds of a wait (`transport_timeout`, the last resort), of forming groups (`form_timeout`), and of a
            connection without an answer, whose peer is out of reach then (`dead_after`).
    """

    store: Any
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)
    address: str = "127.0.0.1"
    tensor: tuple[int, int] = (0, 1)
    kept_addresses: Collection[tuple[str, int]] = ()
    limits: MembershipSection = MembershipSection()  # noqa: RUF009  (immutable)
    links: PacedLinks | None = None


class TransportPlugin(ABC):
    """A transport. What is asked before any process runs are class methods; an object belongs to one process.

    Attributes:
        paces_links: whether its messages are held back as `TransportSettings.links` says, and their times told.
        has_shards: whether its `GroupTransport` has the sums and gathers of a sharded optimizer.
        progress: of the device that the process computes on.
    """

    has_shards: ClassVar[bool] = False
    paces_links: ClassVar[bool] = False
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that a worker process sets first of all; torch is imported by then."""

    def __init__(self, settings: TransportSettings) -> None:
        self.settings = settings
        self.progress = DeviceProgress(self.clock())
        self._standing: GroupTransport | None = None

    @classmethod
    @abstractmethod
    def refusal(cls, job: Job) -> str | None:
        """Why it cannot move what the stages of `job` make on this machine; None when it can."""

    @classmethod
    def require_machine(cls, processes: int) -> None:
        """Raise JobError when it cannot connect so many processes of this machine; most can connect any number."""
        return

    @classmethod
    def device(cls, local_index: int) -> torch.device:
        """The device that the process with this number on its machine computes on."""
        return torch.device("cpu")

    def offer(self, generation: str, process: Worker) -> None:
        """Tell the others what this process could keep for a generation, whose name this is; before it acknowledges it.

        Args:
            process: the position that this process started in.

        Raises:
            RunError: the agent does not answer.
        """
        return

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        """Form a generation's groups. Raises TransportError when they do not form."""
        self._standing = self._form(groups)
        self._standing.form()
        return self._standing

    @abstractmethod
    def _form(self, groups: GroupsOfGeneration) -> GroupTransport:
        """The transport of a generation, whose groups have not formed yet."""

    def wake(self) -> None:
        """Let whoever waits for a peer in this process wake up with TransportError, and peers that wait for it too.

        Called from another thread, again and again until the main thread has left its generation, which may not go on
        meanwhile: so it returns at once. It releases the groups unless a subclass has another way.
        """
        if (standing := self._standing) is not None:
            standing.release()

    def clock(self) -> Clock:
        """The clock of the device that this process computes on; asked once, when the device is known."""
        return clock_of(self.settings.device)

    def device_state(self) -> DeviceState:
        """How far the device of this process is; asked by the heartbeat's thread."""
        standing = self._standing
        waits = standing is not None and standing.waits_for_peer()
        return replace(self.progress.state(), waits=waits)

    def end(self) -> None:
        """This process leaves its generation, whether its groups had formed or not.

        Raises:
            RunError: its device has failed for good.
        """
        self.wake()
        if self._standing is not None:
            self._standing.close()
            self._standing = None
        self.progress.forget()


def gpu_or_cpu(local_index: int = 0) -> torch.device:
    """The GPU with this number on its machine, in turn where there are fewer; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_index % torch.cuda.device_count())


def computes_on_gpu(job: Job) -> bool:
    """Whether the job's stages compute on GPUs here."""
    return job.model.kind != "emulated" and torch.cuda.device_count() > 0
