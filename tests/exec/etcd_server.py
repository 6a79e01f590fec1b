"""A real etcd on free ports of the loopback interface."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

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
        assert ETCD is not None
        client, peer = f"http://{self.address}:{self.port}", f"http://{self.address}:{self._peer}"
        with (self._directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [
                    ETCD,
                    *("--name", "test", "--data-dir", str(self._directory / "data"), "--unsafe-no-fsync"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"test={peer}", "--log-level", "error"),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMAXPROCS": "2"},
                start_new_session=True,
            )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(f"{client}/health", timeout=1) as answer:
                    if b"true" in answer.read():
                        return process
            except OSError:
                time.sleep(0.02)
        process.kill()
        process.wait()
        raise AssertionError(f"etcd did not start; see {self._directory / 'log'}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        self.process = self._start()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)  # until all its threads stand still

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.thaw()
            self.kill()


def _free_ports(address: str) -> tuple[int, int]:
    with socket.create_server((address, 0)) as one, socket.create_server((address, 0)) as other:
        return int(one.getsockname()[1]), int(other.getsockname()[1])
