"""Which store a run's membership is on: the one place that knows them all."""

from __future__ import annotations

import uuid

from recycle.exec.membership.launcher_store import LauncherStore
from recycle.exec.membership.relay_messages import SCHEME
from recycle.exec.membership.relay_store import RelayStore
from recycle.exec.membership.store import RunStore, Store
from recycle.sections import MembershipSection

LAUNCHER = "launcher"


def host_store(settings: MembershipSection) -> tuple[RunStore, str, str]:
    """The store of a launcher's new run: (store, its URL, name of the run in it). Raises JobError, RunError."""
    if settings.store == LAUNCHER:
        store, port = LauncherStore.host()
        return store, f"tcp://127.0.0.1:{port}", ""
    from recycle.exec.membership.etcd_store import EtcdStore

    name = f"train-{uuid.uuid4().hex[:12]}"
    return EtcdStore.connect(settings.store, name, settings, "coordinator"), settings.store, name


def open_store(url: str, run: str, settings: MembershipSection) -> Store:
    """A worker's client of the store at `url`. Raises JobError, RunError."""
    scheme, _, place = url.partition("://")
    if scheme == SCHEME:
        return RelayStore.connect(place)
    if scheme == "tcp":
        address, _, port = place.rpartition(":")
        return LauncherStore.connect(address, int(port))
    from recycle.exec.membership.etcd_store import EtcdStore

    return EtcdStore.connect(url, run, settings)
