"""`TransportPlugin`, the interface of transports to other folders, and the table of transports.

A worker process has one plug-in object, which opens the groups of each generation in turn. To add a transport, write a
subclass in a new file and add it to `TRANSPORTS`; docs/guides/transports.md has an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, TypeGuard

import torch

from recycle.errors import JobError
from recycle.exec.device import Clock, DeviceProgress, DeviceState, clock_of
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.outgoing import PacedLinks
from recycle.ir.plugins import TRANSPORTS_GROUP, entry_points, import_failure, load_entry_point, refusal_of
from recycle.job import Job
from recycle.job.sections import MembershipSection
from recycle.job.shape import Worker


@dataclass(frozen=True)
class TransportSettings:
    """Settings of a plug-in, from the process that uses it.

    Attributes:
        store: a torch store client that groups form on.
        tensor: tensor rank of this process, and T. Lanes and sums connect processes of one tensor rank.
        links: delays of messages; None for no delays. For plug-ins with `paces_links`.
        limits: timeouts in seconds: of a wait (`transport_timeout`, the last resort), of forming groups
            (`form_timeout`), and of a connection without an answer (`dead_after`).
    """

    store: Any
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)
    address: str = "127.0.0.1"
    tensor: tuple[int, int] = (0, 1)
    limits: MembershipSection = MembershipSection()  # noqa: RUF009  (immutable)
    links: PacedLinks | None = None


class TransportPlugin(ABC):
    """A transport. Class methods need no process; an object belongs to one process.

    Attributes:
        paces_links: whether `TransportSettings.links` delays its messages, and it reports their times.
        takes_gpus: whether a process computes on a GPU of its machine, if there are any.
        has_shards: whether its `GroupTransport` has the sums and gathers of a sharded optimizer.
    """

    takes_gpus: ClassVar[bool] = False
    has_shards: ClassVar[bool] = False
    paces_links: ClassVar[bool] = False
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that a worker process sets at the start, after importing torch."""

    def __init__(self, settings: TransportSettings) -> None:
        self.settings = settings
        self.progress = DeviceProgress(self.clock())
        self._transport: GroupTransport | None = None

    @classmethod
    @abstractmethod
    def refusal(cls, job: Job) -> str | None:
        """Why this transport cannot move the tensors of `job` on this machine; None if it can."""

    @classmethod
    def require_machine(cls, processes: int) -> None:
        """Raise JobError if the transport cannot connect so many processes of this machine."""
        return

    @classmethod
    def device(cls, local_index: int) -> torch.device:
        """The device of a process by its place on the machine; a GPU becomes the current one, for libraries."""
        device = gpu_or_cpu(local_index) if cls.takes_gpus else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    @classmethod
    def gpus(cls) -> list[str]:
        """UUIDs of the GPUs of this machine, in the order in which `device` counts them; [] if it takes none."""
        return visible_gpus() if cls.takes_gpus else []

    def offer(self, generation: str, process: Worker) -> None:
        """Publish what this process can reuse in a generation, before acknowledging it. May raise RunError."""
        return

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        """Form a generation's groups. Raises TransportError on failure."""
        self._transport = self._form(groups)
        self._transport.form()
        return self._transport

    @abstractmethod
    def _form(self, groups: GroupsOfGeneration) -> GroupTransport:
        """Create the transport of a generation, without forming its groups."""

    def wake(self) -> None:
        """Interrupt waits for peers in this process with TransportError, and waits of peers for it.

        Called from another thread, repeatedly until the main thread has left its generation, so it must return at once.
        """
        if (transport := self._transport) is not None:
            transport.release()

    def clock(self) -> Clock:
        """The clock of the device that this process computes on; called once."""
        return clock_of(self.settings.device)

    def device_state(self) -> DeviceState:
        transport = self._transport
        waits = transport is not None and transport.waits_for_peer()
        return replace(self.progress.state(), waits=waits)

    def end(self) -> None:
        """Leave the generation. Raises RunError if the device has failed permanently."""
        self.wake()
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self.progress.forget()


def gpu_or_cpu(local_index: int = 0) -> torch.device:
    """The GPU with this index, modulo their number; the CPU without GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_index % torch.cuda.device_count())


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this process sees, in the order of their numbers."""
    return [f"GPU-{torch.cuda.get_device_properties(place).uuid}" for place in range(torch.cuda.device_count())]


def computes_on_gpu(job: Job) -> bool:
    return job.model.kind != "emulated" and torch.cuda.device_count() > 0


TRANSPORTS = {
    "nccl": "recycle.exec.transport.nccl:Nccl",
    "gloo": "recycle.exec.transport.gloo:Gloo",
    "staged": "recycle.exec.transport.staged:Staged",
}
"""Name -> `module:class`; "auto" takes the first that fits. Entry points of other packages add names."""


def transport_named(name: str) -> type[TransportPlugin]:
    """The plug-in of this name, or at this `package.module:Class`. Raises JobError if there is none."""
    entries = {entry.name: entry for entry in entry_points(TRANSPORTS_GROUP, ("auto", *TRANSPORTS))}
    if name in entries:
        value = load_entry_point(entries[name])
        if not _is_plugin(value):
            raise JobError(refusal_of(entries[name], f"{entries[name].value} does not derive from TransportPlugin"))
        return value
    module, _, attribute = TRANSPORTS.get(name, name).partition(":")
    try:
        value = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        value = None
    except Exception as error:
        raise JobError(f'[membership] transport: "{name}": {import_failure(error, module)}') from None
    if not _is_plugin(value):
        names = ", ".join(f'"{known}"' for known in ("auto", *entries, *TRANSPORTS))
        raise JobError(
            f'[membership] transport: "{name}" is not a known transport; give one of {names}, or "package.module:Class"'
        )
    return value


def name_of(plugin: type[TransportPlugin]) -> str:
    """The name by which `transport_named` finds the plug-in."""
    place = f"{plugin.__module__}:{plugin.__qualname__}"
    return next((name for name, known in TRANSPORTS.items() if known == place), place)


def _is_plugin(value: Any) -> TypeGuard[type[TransportPlugin]]:
    return isinstance(value, type) and issubclass(value, TransportPlugin)


def transport_of(job: Job) -> type[TransportPlugin]:
    """The transport that `[membership] transport` selects here. Raises JobError if none fits the job."""
    names = [job.membership.transport]
    if names == ["auto"]:
        names = [name for name in TRANSPORTS if name != "nccl" or computes_on_gpu(job)]
    plugins = [transport_named(name) for name in names]
    refusals = [plugin.refusal(job) or _shards_refusal(plugin, job) for plugin in plugins]
    for plugin, refusal in zip(plugins, refusals, strict=True):
        if refusal is None:
            return plugin
    raise JobError(refusals[0] or "")


def _shards_refusal(plugin: type[TransportPlugin], job: Job) -> str | None:
    if job.train.sharded_optimizer and not plugin.has_shards:
        return f"[train] sharded_optimizer: the transport {plugin.__name__} does not have it yet; set it to false"
    return None
