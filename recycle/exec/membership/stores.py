"""Which store a run's membership is on: the one place that knows them all."""

from __future__ import annotations

import uuid

from recycle.exec.membership import launcher_store, relay_messages
from recycle.exec.membership.launcher_store import LauncherStore
from recycle.exec.membership.relay_store import RelayStore, SocketStore
from recycle.exec.membership.store import RunStore, Store
from recycle.sections import MembershipSection

LAUNCHER = "launcher"


def host_store(settings: MembershipSection) -> tuple[RunStore, str, str]:
    """The store of a launcher's new run: (store, its URL, name of the run in it). Raises JobError, RunError."""
    if settings.store == LAUNCHER:
        store, url = LauncherStore.host()
        return store, url, ""
    from recycle.exec.membership.etcd_store import EtcdStore

    name = f"train-{uuid.uuid4().hex[:12]}"
    return EtcdStore.connect(settings.store, name, settings, "coordinator"), settings.store, name


def open_store(url: str, run: str, settings: MembershipSection) -> Store:
    """A worker's client of the store at `url`. Raises JobError, RunError."""
    scheme, _, place = url.partition("://")
    if scheme == relay_messages.SCHEME:
        return RelayStore.connect(place)
    if scheme == launcher_store.SCHEME:
        return SocketStore(place)
    from recycle.exec.membership.etcd_store import EtcdStore

    return EtcdStore.connect(url, run, settings)
