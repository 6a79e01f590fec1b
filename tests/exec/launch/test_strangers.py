"""Strangers at the ports of a run change nothing, and nothing from the network is unpickled."""

import ast
import random
import socket
from pathlib import Path

import recycle
from recycle.exec.launch.trackers import Observer
from tests.exec.runs import calm_run, job, listening, of_kind, processes_writing_below

STEPS = 16


class _Stranger(Observer):
    """Connects to every port of launcher and workers, and sends what does not belong there."""

    def __init__(self, directory: Path):
        self._logs, self._noise = directory / "logs", random.Random(0)
        self._before = listening("self")  # of earlier tests
        self.ports = []
        self._open = []

    def committed(self, line: dict):
        if line["step"] not in (3, 12):
            return
        workers = processes_writing_below(str(self._logs))
        self.ports = [place for pid in ("self", *workers) for place in listening(pid) if place not in self._before]
        for place in self.ports:
            for content in (b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", self._noise.randbytes(4096)):
                try:
                    connection = socket.create_connection(place, timeout=5)
                    self._open.append(connection)
                    connection.sendall(content)
                except OSError:  # the run closed the port meanwhile, or the connection
                    continue

    def close(self):
        for connection in self._open:
            connection.close()


def test_garbage_at_any_port_of_the_run_changes_nothing(launch, tmp_path):
    slow = job(3, 2, 2, model={"seconds_per_unit": 0.01}, planner={"ahead": 1})
    stranger = _Stranger(tmp_path)
    run = launch(slow, STEPS, "kill:0.0@8", observer=stranger, directory=tmp_path)
    stranger.close()
    assert len(stranger.ports) >= 5
    assert {address for address, _ in stranger.ports} == {"127.0.0.1"}
    assert run.losses == calm_run(job(3, 2, 2), launch, STEPS).losses
    assert [event["worker"] for event in of_kind(run, "detected")] == ["0.0"]


def test_nothing_that_comes_over_the_network_is_unpickled():
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    calls = {"load", "broadcast_object_list", "all_gather_object", "recv_object_list", "gather_object", "rpc_sync"}
    for path in (Path(recycle.__file__).parent / "exec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.split(".")[0] for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not names & forbidden, path
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("torch", "dist")
            ):
                assert node.attr not in calls, path
