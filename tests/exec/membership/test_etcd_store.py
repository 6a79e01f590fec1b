"""Membership on a real etcd: the same training, also through short outages; strangers and lost roles are refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from recycle import Job, JobError, RunError
from recycle.endpoints import parse_endpoints
from recycle.exec.launch.observer import Observer
from recycle.exec.membership import etcd_mirror
from recycle.exec.membership.etcd_client import EtcdClient, Lease, LeaseEnded, put
from recycle.exec.membership.etcd_store import EtcdStore, RoleLost
from recycle.exec.membership.schema import CommitKey, CoordinatorKey, OutcomeKey, TroubleKey, generation_folder
from recycle.exec.protocol import VOID, Commit
from recycle.sections import MembershipSection
from tests.exec.etcd_server import EtcdServer
from tests.exec.runs import Run, job, kinds, processes_writing_below

STEPS = 7
COMMIT = Commit(0, 1.5, 0.25, 1.0)
OLD, NEW = (f"{generation_folder(generation)}/world/0" for generation in (1, 2))


def connect(server: EtcdServer, run: str, **settings: object) -> EtcdStore:
    section = MembershipSection(**settings)  # type: ignore[arg-type]
    return EtcdStore.connect(server.url, run, section, "coordinator")


def keys(server: EtcdServer) -> set[str]:
    """All keys there are. Those of agents that an earlier test killed vanish when their leases run out."""
    client = EtcdClient(parse_endpoints(server.url), MembershipSection(), None)
    return set(client.range("\0", "\0")[0])


@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_a_run_on_etcd_trains_through_a_kill_and_a_rejoin_as_on_the_launchers_store(
    kind: str, etcd: EtcdServer, launch: Run
) -> None:
    before = keys(etcd)
    reference = launch(job(3, 2, 2, kind=kind), STEPS)
    run = launch(job(3, 2, 2, kind=kind, membership={"store": etcd.url}), STEPS, "kill:1.1@2", "rejoin:1.1@5")
    assert run.losses == reference.losses
    assert run.digests == reference.digests
    assert [line["live_workers"] for line in run.metrics] in ([6] * n + [5] * (5 - n) + [6, 6] for n in (1, 2, 3))
    assert [kind for kind in kinds(run) if kind != "undone"] == [
        *("generation", "fault", "detected", "generation", "recovered", "generation", "rejoined")
    ]
    assert keys(etcd) <= before


class _Restart(Observer):
    """Kills the store after a step and brings it back a moment later."""

    def __init__(self, server: EtcdServer, after: int, back: bool) -> None:
        self._server, self._after, self._back = server, after, back

    def committed(self, line: dict) -> None:
        if line["step"] == self._after:
            self._server.kill()
            if self._back:
                threading.Timer(1.0, self._server.start_again).start()


def test_a_store_that_is_away_for_a_moment_costs_no_worker(own_etcd: EtcdServer, launch: Run) -> None:
    of = job(2, 2, 2, membership={"store": own_etcd.url, "dead_after": 1.0})
    run = launch(of, STEPS, observer=_Restart(own_etcd, 2, back=True))
    assert run.losses == launch(job(2, 2, 2), STEPS).losses
    assert "detected" not in kinds(run)


def test_a_store_that_stays_away_ends_the_run_with_one_line(own_etcd: EtcdServer, launch: Run, tmp_path: Path) -> None:
    of = job(2, 2, 2, membership={"store": own_etcd.url, "store_timeout": 1.0})
    directory = tmp_path / "run"
    with pytest.raises(RunError, match=rf"etcd://127\.0\.0\.1:{own_etcd.port} does not answer"):
        launch(of, STEPS, observer=_Restart(own_etcd, 2, back=False), directory=directory)
    assert not processes_writing_below(str(directory))


def test_a_client_reads_what_it_wrote_and_follows_what_others_write(etcd: EtcdServer) -> None:
    one, two = connect(etcd, "follow"), connect(etcd, "follow")
    for n in range(20):
        one.set(OutcomeKey(), str(n))
        assert one.read(OutcomeKey()) == str(n)
    assert two.compare_set(CommitKey(1, 0), None, COMMIT)
    assert not one.compare_set(CommitKey(1, 0), None, VOID)
    assert one.read(CommitKey(1, 0)) == COMMIT
    one.delete([CommitKey(1, 0)])
    assert one.read(CommitKey(1, 0)) is None
    one.erase()


def test_a_wait_ends_when_the_key_is_written_and_costs_no_request(etcd: EtcdServer) -> None:
    one, two = connect(etcd, "wait"), connect(etcd, "wait")
    before = one.client.requests
    threading.Timer(0.3, two.compare_set, (CommitKey(1, 0), None, COMMIT)).start()
    assert one.wait(CommitKey(1, 0), 30) == COMMIT
    assert one.client.requests == before
    one.erase()


def test_a_frozen_store_is_waited_for(own_etcd: EtcdServer) -> None:
    store = connect(own_etcd, "frozen")
    own_etcd.freeze()
    threading.Timer(1.0, own_etcd.thaw).start()
    started = time.monotonic()
    store.set(OutcomeKey(), "one")
    assert time.monotonic() - started > 0.9
    assert store.read(OutcomeKey()) == "one"


def test_a_member_that_hangs_is_left_for_another(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel takes connections and requests, and nobody ever answers; clients begin at either."""
    monkeypatch.setattr(etcd_mirror, "WATCH_SECONDS", 0.5)
    writer = connect(etcd, "hangs")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as hung:
        url = f"etcd://127.0.0.1:{hung.getsockname()[1]},127.0.0.1:{etcd.port}"
        for step in range(2):
            store = EtcdStore.connect(url, "hangs", MembershipSection(dead_after=1.0))
            assert writer.compare_set(CommitKey(1, step), None, COMMIT)
            assert store.wait(CommitKey(1, step), 30) == COMMIT
            store.clone().set(TroubleKey(step), "text")
            assert writer.wait(TroubleKey(step), 30) == "text"
            store.close()
    writer.erase()


def test_a_lease_is_lost_when_etcd_says_so_and_not_before(own_etcd: EtcdServer) -> None:
    settings = MembershipSection(lease=2, dead_after=1.0)
    client = EtcdClient(parse_endpoints(own_etcd.url), settings, None)
    lost = threading.Event()
    lease = Lease(client.clone(), settings, lost.set)
    assert client.call("/kv/txn", {"success": [put("/held", "here", lease.id)]})["succeeded"]
    own_etcd.freeze()
    assert not lost.wait(4.0)
    assert lease.failures > 0
    own_etcd.thaw()
    assert lost.wait(30)
    assert client.range("/held")[0] == {}
    with pytest.raises(LeaseEnded):
        client.call("/kv/txn", {"success": [put("/held", "here", lease.id)]})
    lease.close()
    with contextlib.closing(Lease(client.clone(), settings, lost.clear)) as another:
        assert client.call("/kv/txn", {"success": [put("/held", "here", another.id)]})["succeeded"]
    assert client.range("/held")[0] == {}


def test_what_somebody_without_the_role_writes_is_refused(etcd: EtcdServer) -> None:
    store = connect(etcd, "role")
    lease = store.client.call("/lease/grant", {"TTL": 30})["ID"]
    created = store.create(CoordinatorKey(), "agent 0", lease)
    assert created is not None
    assert store.create(CoordinatorKey(), "agent 1", lease) is None
    old = store.coordinating(CoordinatorKey(), created)
    old.set(OutcomeKey(), "one")
    store.client.call("/lease/revoke", {"ID": lease})
    later = store.client.call("/lease/grant", {"TTL": 30})["ID"]
    new = store.create(CoordinatorKey(), "agent 1", later)
    assert new is not None
    for change in (
        lambda: old.set(OutcomeKey(), "two"),
        lambda: old.compare_set(CommitKey(1, 0), None, COMMIT),
        lambda: old.delete([OutcomeKey()]),
    ):
        with pytest.raises(RoleLost):
            change()
    assert store.read(OutcomeKey()) == "one"
    assert store.read(CommitKey(1, 0)) is None
    assert store.coordinating(CoordinatorKey(), new).compare_set(CommitKey(1, 0), None, COMMIT)
    store.erase()


def test_groups_form_on_what_others_wrote(etcd: EtcdServer) -> None:
    one, two = (EtcdStore.connect(etcd.url, "groups", MembershipSection()) for _ in range(2))
    one.torch_store.set(OLD, b"\x00\xff")
    assert not two.torch_store.check([OLD, f"{generation_folder(1)}/world/1"])
    two.torch_store.set(f"{generation_folder(1)}/world/1", b"there")
    assert two.torch_store.check([OLD, f"{generation_folder(1)}/world/1"])
    assert two.torch_store.get(OLD) == b"\x00\xff"
    two.torch_store.set(NEW, b"new")
    connect(etcd, "groups").forget_before(2)
    deadline = time.monotonic() + 10
    while two.torch_store.check([OLD]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not two.torch_store.check([OLD])
    assert two.torch_store.check([NEW])
    one.erase()


@pytest.fixture
def locked(own_etcd: EtcdServer) -> EtcdServer:
    """A server that lets in root with the password "secret" only."""
    add = {"name": "root", "password": "secret"}
    for path, body in (("user/add", add), ("user/grant", {"user": "root", "role": "root"}), ("enable", {})):
        # Not by our client, which repeats what a busy machine did not answer in time: these cannot be repeated.
        request = urllib.request.Request(f"http://{own_etcd.address}:{own_etcd.port}/v3/auth/{path}")
        urllib.request.urlopen(request, json.dumps(body).encode(), timeout=60).close()
    return own_etcd


def test_a_password_from_a_file_or_the_environment_opens_the_store(
    locked: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("secret\n")
    store = connect(locked, "a", etcd_user="root", etcd_password_file=str(tmp_path / "password"))
    store.set(OutcomeKey(), "one")
    locked.kill()
    locked.start_again()  # it has forgotten the tokens that it gave out
    store.set(OutcomeKey(), "two")
    monkeypatch.setenv("RECYCLE_ETCD_PASSWORD", "secret")
    assert connect(locked, "a", etcd_user="root").read(OutcomeKey()) == "two"


def test_a_stranger_is_refused_at_once(locked: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"refuses: .*user name is empty"):
        connect(locked, "a")
    monkeypatch.setenv("RECYCLE_ETCD_PASSWORD", "guess")
    with pytest.raises(RunError, match=r"refuses: .*authentication failed"):
        connect(locked, "a", etcd_user="root")
    monkeypatch.delenv("RECYCLE_ETCD_PASSWORD")
    with pytest.raises(JobError, match=r"etcd_user: no password; give etcd_password_file or set \$RECYCLE_ETCD_PASS"):
        connect(locked, "a", etcd_user="root")
    with pytest.raises(JobError, match=r"etcd_password_file: .*nowhere: No such file"):
        connect(locked, "a", etcd_user="root", etcd_password_file=str(tmp_path / "nowhere"))


def test_a_store_on_another_machine_needs_a_secret() -> None:
    with pytest.raises(JobError, match=r"reached over the network without a secret"):
        EtcdStore.connect("etcd://10.0.0.1:2379", "a", MembershipSection())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, os.strerror(errno.ECONNREFUSED)),
        (b"", "connection was closed"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not one of etcd"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "not one of etcd"),
    ],
)
def test_a_store_that_never_answered_is_named_whole_with_the_reason(answer: bytes | None, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"etcd://127.0.0.1:{listener.getsockname()[1]}"
        if answer is None:
            listener.close()
        else:
            threading.Thread(target=_answer_all, args=(listener, answer), daemon=True).start()
        with pytest.raises(RunError, match=f"^{url} does not answer \\(.*{reason}") as refusal:
            EtcdStore.connect(url, "a", MembershipSection(store_timeout=0.2))
    assert len(str(refusal.value)) < 120


def _answer_all(listener: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)


@pytest.mark.parametrize(("header", "connections"), [("keep-alive", 1), ("close", 3)])
def test_requests_use_one_connection_for_as_long_as_the_server_keeps_it(header: str, connections: int) -> None:
    ports = []

    class Gateway(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            ports.append(self.client_address[1])
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Connection", header)
            self.send_header("Content-Length", "29")
            self.end_headers()
            self.wfile.write(b'{"header": {"revision": "7"}}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        client = EtcdClient(parse_endpoints(f"etcd://127.0.0.1:{server.server_port}"), MembershipSection(), None)
        revisions = [client.range("/")[1] for _ in range(3)]
        server.shutdown()
    assert revisions == [7, 7, 7]
    assert (len(ports), len(set(ports)), client.requests) == (3, connections, 3)


def test_a_file_for_tls_that_cannot_be_used_is_an_error_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for name, reason in (("text", "not a certificate or key in PEM"), ("missing", os.strerror(errno.ENOENT))):
        path = str(tmp_path / name)
        for files in ({"etcd_ca": path}, {"etcd_certificate": path, "etcd_key": path}):
            with pytest.raises(JobError, match=rf"etcd_ca, etcd_certificate, etcd_key: {reason}$"):
                EtcdStore.connect("etcds://127.0.0.1:1", "a", MembershipSection(**files))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tcp://here:1", "is not a store: write etcd://host:port"),
        ("etcd://here", "is not a store"),
        ("etcd://here:70000", "a port is a number from 1 to 65535"),
        ("etcd://", "is not a store"),
    ],
)
def test_an_address_that_cannot_be_is_refused_in_the_job(text: str, says: str) -> None:
    with pytest.raises(JobError, match=rf"\[membership\] store: .*{says}"):
        job(1, 1, 1, membership={"store": text})


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("etcd://127.0.0.1:2379", True),
        ("etcds://[::1]:2379", True),
        ("etcd://localhost:1,127.0.0.3:2", True),
        ("etcd://localhost:1,10.0.0.1:2", False),
        ("etcd://node-1.cluster:2379", False),
    ],
)
def test_endpoints_print_as_written_and_know_whether_they_leave_the_machine(text: str, loopback: bool) -> None:
    assert str(parse_endpoints(text)) == text
    assert parse_endpoints(text).loopback is loopback


def test_secrets_are_not_part_of_the_job_that_a_run_keeps(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2")
    (tmp_path / "job.toml").write_text(
        '[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n[membership]\netcd_user = "me"\n'
        'etcd_password_file = "password"\n'
    )
    loaded = Job.load(tmp_path / "job.toml")
    assert loaded.membership.etcd_password_file == str(tmp_path / "password")
    assert "hunter2" not in loaded.to_toml()
