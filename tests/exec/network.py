"""Nodes with their own addresses on one machine, whose links can be cut, made to lose packets, and made slow.

Each node is a network namespace (`ip netns`), joined to the others by a bridge in another namespace. A cable is pulled
at the bridge, so that nothing gets through and no process is notified. Packets are lost by netem where the kernel has
it; otherwise a filter picks them at random and sends them to an interface that is down. A slow link has few bytes per
second, and packets queue on it. Needs root, iproute2 and Linux.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recycle.exec.ports import kernel_ports

IP, TC = (shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") for name in ("ip", "tc"))
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_RANDOM = 0xFFFFF000 + 56
"""Where a socket filter reads a random number: SKF_AD_OFF + SKF_AD_RANDOM of linux/filter.h."""


@dataclass(frozen=True)
class Node:
    """Where processes run.

    Attributes:
        address: by which the others reach it.
        namespace: of its network; None for the machine's own.
    """

    address: str
    namespace: str | None = None

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` there."""
        return list(words) if self.namespace is None else [str(IP), "netns", "exec", self.namespace, *words]

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """This thread's new sockets are the node's."""
        if self.namespace is None:
            yield
            return
        with Path("/proc/thread-self/ns/net").open() as own, (_NAMESPACES / self.namespace).open() as other:
            _enter(other.fileno())
            try:
                yield
            finally:
                _enter(own.fileno())

    def free_port(self) -> int:
        """A port that stays free until it is used: the kernel gives connections of other processes others."""
        low, high = kernel_ports()
        outside = [*range(10_000, low), *range(high + 1, 65_536)] or range(low, high + 1)
        with self.network():
            while True:
                with contextlib.suppress(OSError), socket.create_server((self.address, secrets.choice(outside))) as own:
                    return int(own.getsockname()[1])


class Network:
    """Nodes joined by a bridge.

    Args:
        count: how many.

    Raises:
        PermissionError: this process may not make them, or lacks the tools.
    """

    def __init__(self, count: int):
        if IP is None or TC is None:
            raise PermissionError("no ip and tc: install Debian's iproute2")
        prefix = f"recycle{os.getpid()}"
        self._bridge = f"{prefix}bridge"
        self.nodes = [Node(f"10.77.0.{number + 1}", f"{prefix}node{number}") for number in range(count)]
        try:
            self._build()
        except PermissionError:
            self.end()
            raise

    def _build(self):
        _run("netns", "add", self._bridge)
        self._ip("link", "add", "bridge", "type", "bridge")
        self._ip("link", "set", "bridge", "up")
        for number, node in enumerate(self.nodes):
            port, name = self._port(number), str(node.namespace)
            _run("netns", "add", name)
            self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            self._ip("link", "set", port, "master", "bridge", "up")
            _run("-n", name, "address", "add", f"{node.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("-n", name, "link", "set", link, "up")

    def cut(self, number: int):
        """Pull the node's cable."""
        self._ip("link", "set", self._port(number), "down")

    def lose(self, number: int, percent: int):
        """Lose so many of the packets that the node sends, and as many of those that it is sent."""
        ends = ((str(self.nodes[number].namespace), "eth0"), (self._bridge, self._port(number)))
        for name, link in ends:
            if _tc(name, "qdisc", "add", "dev", link, "root", "netem", "loss", f"{percent}%") == "":
                continue
            with contextlib.suppress(PermissionError):  # there since the last time
                _run("-n", name, "link", "add", "nowhere", "type", "ifb")
            program = [
                (0x20, 0, 0, _RANDOM),
                (0x94, 0, 0, 100),
                (0x35, 1, 0, percent),
                (6, 0, 0, 0xFFFFFFFF),
                (6, 0, 0, 0),
            ]
            code = ",".join([str(len(program)), *(" ".join(map(str, line)) for line in program)])
            drop = ("action", "mirred", "egress", "redirect", "dev", "nowhere")
            error = _tc(name, "qdisc", "add", "dev", link, "clsact") or _tc(
                name, "filter", "add", "dev", link, "egress", "bpf", "bytecode", code, *drop
            )
            if error:
                raise PermissionError(f"no way to lose packets: {error}")

    def slow(self, number: int, bytes_per_second: int):
        """Let so little through in each direction; what does not fit waits for up to a minute."""
        for name, link in ((str(self.nodes[number].namespace), "eth0"), (self._bridge, self._port(number))):
            rate = ("rate", f"{8 * bytes_per_second}bit", "burst", "3000", "latency", "60s")
            if error := _tc(name, "qdisc", "add", "dev", link, "root", "tbf", *rate):
                raise PermissionError(f"no way to slow a link down: {error}")

    def mend(self, number: int):
        """Plug the cable in; nothing is lost or slow any more."""
        self._ip("link", "set", self._port(number), "up")
        for name, link in ((str(self.nodes[number].namespace), "eth0"), (self._bridge, self._port(number))):
            for kind in ("root", "clsact"):
                _tc(name, "qdisc", "del", "dev", link, kind)

    def power_off(self, number: int):
        """Everything there ends at once, and sends no farewell."""
        self.cut(number)
        _kill(str(self.nodes[number].namespace))

    def end(self):
        """End what runs on the nodes, and forget them."""
        for name in (*(str(node.namespace) for node in self.nodes), self._bridge):
            if (_NAMESPACES / name).exists():
                _kill(name)
                _run("netns", "delete", name)

    def _port(self, number: int) -> str:
        return f"port{number}"

    def _ip(self, *words: str):
        _run("-n", self._bridge, *words)


def _run(*words: str) -> str:
    """Run `ip`; its output. Raises PermissionError with what it says."""
    done = subprocess.run([str(IP), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _kill(namespace: str):
    """End all processes of a namespace, and those that they start meanwhile."""
    while pids := _run("netns", "pids", namespace).split():
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _tc(namespace: str, *words: str) -> str:
    """Run `tc`; returns its error message, empty if it succeeded."""
    done = subprocess.run([str(TC), "-n", namespace, *words], capture_output=True, text=True, check=False)
    return (done.stderr.strip() or "failed") if done.returncode else ""


def _enter(namespace: int):
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
