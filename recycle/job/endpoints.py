"""Addresses of etcd, `etcd://host:port[,host:port...]` or `etcds://` for TLS, and of the run's metrics."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import NamedTuple

from recycle.errors import JobError

_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


class Endpoints(NamedTuple):
    """The members of an etcd cluster; `str` returns the text that was parsed."""

    tls: bool
    members: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        hosts = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members)
        return f"{'etcds' if self.tls else 'etcd'}://{','.join(hosts)}"

    @property
    def loopback(self) -> bool:
        return all(_is_loopback(host) for host, _ in self.members)


def parse_endpoints(text: str) -> Endpoints:
    scheme, separator, address = text.partition("://")
    members = [_HOST.fullmatch(part) for part in address.split(",")]
    if not separator or scheme not in ("etcd", "etcds") or not all(members):
        raise JobError(f"{text!r} is not a store: write etcd://host:port, or etcds://host:port for TLS")
    addresses = [(match["host"].strip("[]"), int(match["port"])) for match in members if match is not None]
    if any(not 0 < port < 65536 for _, port in addresses):
        raise JobError(f"{text!r}: a port is a number from 1 to 65535")
    return Endpoints(scheme == "etcds", tuple(addresses))


def parse_listening(where: int | str) -> tuple[str, int]:
    """Return (address, port) of a port of the loopback interface, or of "ADDRESS:PORT". Raises JobError."""
    match = _HOST.fullmatch(f"127.0.0.1:{where}" if isinstance(where, int) else where)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise JobError(f'{where!r} is not a port from 1 to 65535, nor an address with a port, such as "0.0.0.0:9464"')
    return match["host"].strip("[]"), int(match["port"])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
