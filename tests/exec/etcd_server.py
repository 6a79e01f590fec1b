"""A real etcd on free ports: one member, or several on as many nodes."""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from recycle.exec.etcd import EtcdClient, decoded, span
from recycle.job.endpoints import parse_endpoints
from recycle.job.sections import MembershipSection
from tests.exec.network import Node

LOOPBACK = Node("127.0.0.1")
ETCD = shutil.which("etcd") or shutil.which("etcd", path="/usr/bin:/usr/sbin")

ATTEMPTS = 3


class EtcdServer:
    """A member per node, each of which may be killed and started again with its data, or all stopped.

    Args:
        nodes: where the members run.
    """

    def __init__(self, directory: Path, nodes: Sequence[Node] = (LOOPBACK,)):
        self._directory, self._nodes = directory, nodes
        for attempt in range(ATTEMPTS):
            self._ports = [(node.free_port(), node.free_port()) for node in nodes]
            self.members = [self._started(member) for member in range(len(nodes))]
            try:
                for member in range(len(nodes)):
                    self._await(member)
                return
            except AssertionError:  # another process may have taken the port
                self.end()
                if attempt == ATTEMPTS - 1:
                    raise

    @property
    def url(self) -> str:
        """Of all members."""
        return "etcd://" + ",".join(
            f"{node.address}:{client}" for node, (client, _) in zip(self._nodes, self._ports, strict=True)
        )

    @property
    def port(self) -> int:
        """Of the first member."""
        return self._ports[0][0]

    def _client(self, member: int) -> str:
        return f"http://{self._nodes[member].address}:{self._ports[member][0]}"

    def _peer(self, member: int) -> str:
        return f"http://{self._nodes[member].address}:{self._ports[member][1]}"

    def _started(self, member: int) -> subprocess.Popen[bytes]:
        folder = self._directory / f"member{member}"
        folder.mkdir(parents=True, exist_ok=True)
        client, peer = self._client(member), self._peer(member)
        initial = ",".join(f"member{number}={self._peer(number)}" for number in range(len(self._nodes)))
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                self._nodes[member].command(
                    ETCD,
                    *("--name", f"member{member}", "--data-dir", str(folder / "data"), "--unsafe-no-fsync"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", initial, "--log-level", "error"),
                ),
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMAXPROCS": "2"},
                start_new_session=True,
            )

    def _await(self, member: int):
        """Wait until a member says that it is well."""
        process, deadline = self.members[member], time.monotonic() + 30
        with self._nodes[member].network():
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    with urllib.request.urlopen(f"{self._client(member)}/health", timeout=1) as answer:
                        if b"true" in answer.read():
                            return
                except OSError:
                    time.sleep(0.02)
        raise AssertionError(f"etcd did not start; see {self._directory}/member{member}/log")

    def leader(self) -> int:
        """The member that leads."""
        for member, process in enumerate(self.members):
            if process.poll() is None:
                request = urllib.request.Request(f"{self._client(member)}/v3/maintenance/status", b"{}")
                with self._nodes[member].network(), urllib.request.urlopen(request, timeout=10) as answer:
                    status = json.loads(answer.read())
                if status["leader"] == status["header"]["member_id"]:
                    return member
        raise AssertionError("no member leads")

    def kill(self, member=0):
        self.members[member].kill()
        self.members[member].wait()

    def start_again(self, member=0):
        self.members[member] = self._started(member)
        self._await(member)

    def freeze(self):
        """Stop all members; returns when all their threads stand still."""
        for process in self.members:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self):
        for process in self.members:
            process.send_signal(signal.SIGCONT)

    def end(self):
        self.thaw()
        for member in range(len(self.members)):
            self.kill(member)


def keys(server: EtcdServer) -> set[str]:
    """All keys; leases of agents that an earlier test killed may still run."""
    client = EtcdClient(parse_endpoints(server.url), MembershipSection(), None)
    return {decoded(pair["key"]).decode() for pair in client.call("/kv/range", span("\0", "\0")).get("kvs", [])}
