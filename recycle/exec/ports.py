"""Listening ports within the range of `[membership] ports`.

gloo and NCCL let the kernel choose a port, from the range of the system's setting `net.ipv4.ip_local_port_range`. gloo
opens devices until the kernel has chosen a port within the job's range. NCCL can only be refused.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from recycle.errors import RunError

Ports = tuple[int, int]
"""First and last port."""
MOST_CHOICES = 64
"""Most ports, on average, that the kernel may choose until one is within the range; each costs 8 ms to close."""
_SETTING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def listen_within(ports: Ports | None, address: str, backlog: int) -> socket.socket:
    """Listen on a free port of the range, or on any free port. Raises RunError if all ports are in use."""
    candidates = [0] if ports is None else random.sample(range(ports[0], ports[1] + 1), ports[1] + 1 - ports[0])
    for port in candidates:
        try:
            return socket.create_server((address, port), backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise exhausted(ports)


def exhausted(ports: Ports | None) -> RunError:
    return RunError(f"[membership] ports: no port of {ports} is free; choose a larger range")


def kernel_ports() -> Ports:
    """First and last port that the kernel chooses from."""
    low, high = map(int, _SETTING.read_text().split())
    return low, high


def refusal_of_gloo(ports: Ports | None) -> str | None:
    """Return why gloo cannot listen within the range, or only after too many attempts; None if it can.

    The kernel chooses from the lower half of its ports if one is free there, as gloo's sockets have SO_REUSEADDR
    (inet_csk_find_open_port in Linux).
    """
    if ports is None:
        return None
    low, high = kernel_ports()
    end = low + ((high + 1 - low) >> 2 << 1)
    within = max(0, min(end - 1, ports[1]) + 1 - max(low, ports[0]))
    if end - low <= MOST_CHOICES * within:
        return None
    least = -(-(end - low) // MOST_CHOICES)
    return (
        f"[membership] ports: gloo cannot listen on ports {ports[0]} to {ports[1]} here; choose at least {least} ports"
        f" of {low} to {end - 1}, or run sysctl -w net.ipv4.ip_local_port_range='{ports[0]} {ports[1]}'"
    )


def refusal_of_nccl(ports: Ports | None) -> str | None:
    """Return why NCCL cannot be kept to the range; None if it can."""
    if ports is None or ports[0] <= kernel_ports()[0] <= kernel_ports()[1] <= ports[1]:
        return None
    return (
        f"[membership] ports: NCCL listens on the ports that the kernel chooses, {kernel_ports()[0]} to"
        f" {kernel_ports()[1]}; run sysctl -w net.ipv4.ip_local_port_range='{ports[0]} {ports[1]}'"
    )
