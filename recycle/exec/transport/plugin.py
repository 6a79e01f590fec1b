"""What a transport is to everything outside of this folder, `TransportPlugin`, and which there are.

A worker process has one plug-in object, which opens the groups of each generation in turn. To add a transport: a
subclass in a file of its own, and its line in `TRANSPORTS`; docs/guides/transports.md has an example.
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
    """What a plug-in knows of the process that it moves tensors for.

    Attributes:
        store: a torch store client that groups form on.
        device: that the stages of this process compute on.
        address: of this machine, by which peers reach it.
        tensor: tensor rank of this process, and T. Lanes and sums are between processes of one tensor rank.
        links: what makes messages take longer; None for nothing. Of a plug-in that has `paces_links`.
        limits: seconds of a wait (`transport_timeout`, the last resort), of forming groups (`form_timeout`), and of a
            connection without an answer, whose peer is out of reach then (`dead_after`).
    """

    store: Any
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)
    address: str = "127.0.0.1"
    tensor: tuple[int, int] = (0, 1)
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


TRANSPORTS = {
    "nccl": "recycle.exec.transport.nccl:Nccl",
    "gloo": "recycle.exec.transport.gloo:Gloo",
}
"""Name -> `module:class` of its plug-in; "auto" takes the first that can move what the job's stages make. Entry points
of other packages add names."""
ANYWHERE = "gloo"
"""The transport that needs nothing of a machine: what links are measured over."""


def transport_named(name: str) -> type[TransportPlugin]:
    """The plug-in with this name, or at this `package.module:Class`. Raises JobError when there is none."""
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
        raise JobError(f'[membership] transport: "{name}" is none of {names}, nor the "package.module:Class" of one')
    return value


def _is_plugin(value: Any) -> TypeGuard[type[TransportPlugin]]:
    return isinstance(value, type) and issubclass(value, TransportPlugin)


def transport_of(job: Job) -> type[TransportPlugin]:
    """The transport that `[membership] transport` asks for on this machine.

    Raises:
        JobError: there is none, or it cannot move what the stages make.
    """
    wanted = job.membership.transport
    plugins = [transport_named(name) for name in (TRANSPORTS if wanted == "auto" else [wanted])]
    refusals = [plugin.refusal(job) or _shards_refusal(plugin, job) for plugin in plugins]
    for plugin, refusal in zip(plugins, refusals, strict=True):
        if refusal is None:
            return plugin
    raise JobError(refusals[0] or "")


def _shards_refusal(plugin: type[TransportPlugin], job: Job) -> str | None:
    """Why it cannot do what the job's optimizer needs; None when it can."""
    if job.train.sharded_optimizer and not plugin.has_shards:
        return f"[train] sharded_optimizer: the transport {plugin.__name__} does not have it yet; set it to false"
    return None
