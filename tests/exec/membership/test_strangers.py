"""Who has no part in the present generation changes nothing: a worker back from the dead, a stranger at a port."""

from __future__ import annotations

import ast
import json
import os
import random
import signal
import socket
import uuid
from pathlib import Path

import pytest

import recycle
from recycle.exec.launch.contact import reach
from recycle.exec.launch.observer import Observer
from recycle.exec.membership.local_socket import Closed, receive, send
from recycle.exec.membership.relay_messages import Await, Delete, LauncherRequest, Put, Read, RelayAnswer, Swap
from recycle.exec.membership.schema import CommitKey, Folder, KillRequestKey, RegisterKey, ReportKey
from recycle.exec.membership.stores import open_store
from recycle.exec.processes.processes import LocalProcesses
from recycle.exec.protocol import VOID, Report
from recycle.job import Job
from recycle.sections import MembershipSection
from recycle.shape import Worker
from tests.exec.runs import Run, job, processes_writing_below

STEPS = 30
VICTIM = "1.1"


@pytest.fixture(params=["launcher", pytest.param("etcd", marks=pytest.mark.etcd)])
def of(request: pytest.FixtureRequest) -> Job:
    """A run on either store, slow enough that there is time to strike."""
    store = "launcher" if request.param == "launcher" else request.getfixturevalue("etcd").url
    return job(
        3, 2, 2, model={"seconds_per_unit": 0.01}, membership={"store": store, "dead_after": 2.0}, planner={"ahead": 1}
    )


_REFERENCE: list[list[float]] = []


def reference(launch: Run) -> list[float]:
    if not _REFERENCE:
        _REFERENCE.append(launch(job(3, 2, 2), STEPS).losses)
    return _REFERENCE[0]


class _Frozen(Observer):
    """Freezes a worker in the middle of the run, and lets it go on once the others do without it."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "logs" / f"{VICTIM}.log"
        self._pid: int | None = None
        self.unreachable = False
        self.back = False

    def committed(self, line: dict) -> None:
        if line["step"] == 3:
            (self._pid,) = processes_writing_below(str(self._log))
            self.unreachable = True
            os.kill(self._pid, signal.SIGSTOP)
        if self._pid is not None and line["step"] == STEPS - 2:
            self.back = "T" not in Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
            self.unreachable = False

    def event(self, event: dict) -> None:
        if event["kind"] == "recovered" and self._pid is not None:
            os.kill(self._pid, signal.SIGCONT)


def test_a_worker_that_comes_back_from_the_dead_has_no_part_any_more(
    of: Job, launch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever should have killed it could not reach it."""
    observer = _Frozen(tmp_path)
    kill = LocalProcesses.kill

    def unreachable(self: LocalProcesses, worker: Worker) -> None:
        if not (observer.unreachable and str(worker) == VICTIM):
            kill(self, worker)

    monkeypatch.setattr(LocalProcesses, "kill", unreachable)
    run = launch(of, STEPS, observer=observer, directory=tmp_path)
    assert observer.back
    assert [event["cause"] for event in run.events if event["kind"] == "detected"] == ["no heartbeat for 2 s"]
    assert run.losses == reference(launch)
    assert VICTIM not in run.digests
    rows = [json.loads(line) for line in (tmp_path / "logs" / f"{VICTIM}.trace.jsonl").read_text().splitlines()]
    assert {row["generation"] for row in rows} == {1}


def listening(pid: int | str) -> list[tuple[str, int]]:
    """Addresses that a process listens on over IPv4."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, _, port = fields[1].partition(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


class _Stranger(Observer):
    """Connects to every port of launcher and workers, and sends what does not belong there."""

    def __init__(self, directory: Path) -> None:
        self._logs, self._noise = directory / "logs", random.Random(0)
        self._before = set(listening("self"))  # of earlier tests; nobody need accept there any more
        self.ports: list[tuple[str, int]] = []
        self._open: list[socket.socket] = []

    def committed(self, line: dict) -> None:
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

    def close(self) -> None:
        for connection in self._open:
            connection.close()


def test_garbage_at_any_port_of_the_run_changes_nothing(of: Job, launch: Run, tmp_path: Path) -> None:
    stranger = _Stranger(tmp_path)
    run = launch(of, STEPS, "kill:0.0@8", observer=stranger, directory=tmp_path)
    stranger.close()
    assert len(stranger.ports) >= 5
    assert {address for address, _ in stranger.ports} == {"127.0.0.1"}
    assert run.losses == reference(launch)
    assert [event["worker"] for event in run.events if event["kind"] == "detected"] == ["0.0"]


class _Late(Observer):
    """Presents reports of a generation that is over, for iterations that are not."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.presented = 0

    def committed(self, line: dict) -> None:
        if line["generation"] < 2 or line["step"] % 5:
            return
        _, store = reach(self._directory)
        for step in range(line["step"], line["step"] + 4):
            for worker in ("0.0", "1.0", VICTIM):
                store.set(ReportKey(1, step, worker), Report({0: [1e9], 1: [1e9]}, 1e9))
                store.compare_set(CommitKey(1, step), None, VOID)
                self.presented += 1


def test_reports_of_an_old_generation_change_nothing(launch: Run, tmp_path: Path) -> None:
    of = job(3, 2, 2, model={"seconds_per_unit": 0.01}, planner={"ahead": 1})
    late = _Late(tmp_path)
    run = launch(of, STEPS, f"kill:{VICTIM}@4", observer=late, directory=tmp_path)
    assert late.presented
    assert run.losses == reference(launch)
    assert [event["worker"] for event in run.events if event["kind"] == "detected"] == [VICTIM]


def requests() -> list[LauncherRequest]:
    """Reads, writes and deletions of keys that a run has, and of their whole folders."""
    report = ReportKey(1, 4, VICTIM)
    text = report.encode(Report({0: [1e9], 1: [1e9]}, 1e9))
    names = [RegisterKey().name, report.name, f"{Folder.REGISTER}/", ""]
    return [
        Read(names),
        Await(RegisterKey().name, 0.1),
        Put(report.name, text.encode()),
        Put(KillRequestKey(Worker.parse(VICTIM)).name, b"1"),
        Swap(CommitKey(1, 4).name, None, CommitKey(1, 4).encode(VOID)),
        Delete(names),
    ]


class _OtherUser(Observer):
    """Another user of the machine, who knows where the store is."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.statuses: list[int] = []

    def committed(self, line: dict) -> None:
        if line["step"] not in (3, 12):
            return
        _, own = reach(self._directory)
        assert own.read(RegisterKey()) is not None
        name = json.loads((self._directory / "store").read_text())["url"].partition("://")[2]
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.setuid(65534)
                status = self._attack(name)
            finally:
                os._exit(status)
        self.statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    @staticmethod
    def _attack(name: str) -> int:
        """0 where no request is answered."""
        for request in requests():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(30)
                connection.connect(f"\0{name}")
                try:
                    send(connection, request)
                    receive(connection, RelayAnswer)
                except (Closed, BrokenPipeError, ConnectionResetError):
                    continue
                return 2
        try:
            open_store(f"local://{name}", "", MembershipSection())
        except recycle.RunError:
            return 0
        return 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_neither_reads_nor_writes_in_a_launchers_store(launch: Run, tmp_path: Path) -> None:
    of = job(3, 2, 2, model={"seconds_per_unit": 0.01}, membership={"dead_after": 2.0}, planner={"ahead": 1})
    stranger = _OtherUser(tmp_path)
    run = launch(of, STEPS, observer=stranger, directory=tmp_path)
    assert stranger.statuses == [0, 0]
    assert run.losses == reference(launch)
    assert not [event for event in run.events if event["kind"] == "detected"]


@pytest.mark.process
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_nobody_is_told_anything_by_another_user_who_took_the_sockets_name() -> None:
    name, (told, says) = f"recycle-{uuid.uuid4().hex}", os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setuid(65534)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0{name}")
            listener.listen()
            os.write(says, b"!")
            listener.accept()[0].recv(1)
        finally:
            os._exit(0)
    assert os.read(told, 1) == b"!"
    for scheme in ("local", "agent"):
        with pytest.raises(recycle.RunError, match="another user"):
            open_store(f"{scheme}://{name}", "", MembershipSection())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(told)
    os.close(says)


def test_nothing_that_comes_over_the_network_is_unpickled() -> None:
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
