"""All transports by name: the one place that knows which there are."""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeGuard

from recycle.errors import JobError
from recycle.exec.transport.plugin import TransportPlugin
from recycle.ir.plugins import TRANSPORTS_GROUP, entry_points, import_failure, load_entry_point, refusal_of
from recycle.job import Job

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
