"""A real etcd on free ports of the loopback interface: one server, or a cluster of several members."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from recycle.exec.etcd import EtcdClient, decoded, span
from recycle.job.endpoints import parse_endpoints
from recycle.job.sections import MembershipSection
from tests.exec.network import Node

LOOPBACK = [Node("127.0.0.1")] * 3
ETCD = shutil.which("etcd") or shutil.which("etcd", path="/usr/bin:/usr/sbin")

ATTEMPTS = 3


class EtcdServer:
    """One server with one data directory; may be killed and started again."""

    def __init__(self, directory: Path, address: str = "127.0.0.1") -> None:
        self._directory = directory
        self.address = address
        for attempt in range(ATTEMPTS):
            self.port, self._peer = _free_ports(address)
            try:
                self.process = self._start()
                return
            except AssertionError:  # somebody else may have taken a port meanwhile
                if attempt == ATTEMPTS - 1:
                    raise

    @property
    def url(self) -> str:
        return f"etcd://{self.address}:{self.port}"

    def _start(self) -> subprocess.Popen[bytes]:
        client, peer = f"http://{self.address}:{self.port}", f"http://{self.address}:{self._peer}"
        process = _started(self._directory, "test", client, peer, f"test={peer}")
        _await_health(process, client, self._directory)
        return process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        self.process = self._start()

    def freeze(self) -> None:
        freeze(self.process)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.thaw()
            self.kill()


class EtcdCluster:
    """Three members, each of which may be killed and started again, or all stopped.

    Args:
        nodes: where each runs; all on the machine's loopback interface when left out.
    """

    def __init__(self, directory: Path, nodes: Sequence[Node] = LOOPBACK) -> None:
        self._directory, self._nodes = directory, nodes
        ports = []
        for node in nodes:
            with node.network():
                ports.append((node.address, *_free_ports(node.address)))
        self._clients = [f"http://{address}:{client}" for address, client, _ in ports]
        self._peers = [f"http://{address}:{peer}" for address, _, peer in ports]
        self.url = "etcd://" + ",".join(f"{address}:{client}" for address, client, _ in ports)
        self.members = [self._start(member) for member in range(len(nodes))]
        for member in range(len(nodes)):
            self._await(member)

    def _start(self, member: int) -> subprocess.Popen[bytes]:
        folder = self._directory / f"member{member}"
        folder.mkdir(exist_ok=True)
        initial = ",".join(f"member{number}={peer}" for number, peer in enumerate(self._peers))
        of = (folder, f"member{member}", self._clients[member], self._peers[member], initial)
        return _started(*of, self._nodes[member])

    def _await(self, member: int) -> None:
        with self._nodes[member].network():
            _await_health(self.members[member], self._clients[member], self._directory / f"member{member}")

    def leader(self) -> int:
        """The member that leads."""
        for member, process in enumerate(self.members):
            if process.poll() is None:
                request = urllib.request.Request(f"{self._clients[member]}/v3/maintenance/status", b"{}")
                with self._nodes[member].network(), urllib.request.urlopen(request, timeout=10) as answer:
                    status = json.loads(answer.read())
                if status["leader"] == status["header"]["member_id"]:
                    return member
        raise AssertionError("no member leads")

    def kill(self, member: int) -> None:
        self.members[member].kill()
        self.members[member].wait()

    def start_again(self, member: int) -> None:
        self.members[member] = self._start(member)
        self._await(member)

    def freeze(self) -> None:
        """Stop all members."""
        for process in self.members:
            freeze(process)

    def thaw(self) -> None:
        for process in self.members:
            process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        for process in self.members:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def freeze(process: subprocess.Popen[bytes]) -> None:
    """Stop a process; returns when all its threads stand still."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def _started(
    directory: Path, name: str, client: str, peer: str, initial: str, node: Node = LOOPBACK[0]
) -> subprocess.Popen[bytes]:
    assert ETCD is not None
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            node.command(
                ETCD,
                *("--name", name, "--data-dir", str(directory / "data"), "--unsafe-no-fsync"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", initial, "--log-level", "error"),
            ),
            stdout=log,
            stderr=log,
            env={**os.environ, "GOMAXPROCS": "2"},
            start_new_session=True,
        )


def _await_health(process: subprocess.Popen[bytes], client: str, directory: Path) -> None:
    """Wait until a server says that it is well; it is ended when it does not."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{client}/health", timeout=1) as answer:
                if b"true" in answer.read():
                    return
        except OSError:
            time.sleep(0.02)
    process.kill()
    process.wait()
    raise AssertionError(f"etcd did not start; see {directory / 'log'}")


def _free_ports(address: str) -> tuple[int, int]:
    with socket.create_server((address, 0)) as one, socket.create_server((address, 0)) as other:
        return int(one.getsockname()[1]), int(other.getsockname()[1])


def keys(server: EtcdServer) -> set[str]:
    """All keys there are. Those of agents that an earlier test killed vanish when their leases run out."""
    client = EtcdClient(parse_endpoints(server.url), MembershipSection(), None)
    return {decoded(pair["key"]).decode() for pair in client.call("/kv/range", span("\0", "\0")).get("kvs", [])}
