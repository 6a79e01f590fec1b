"""The client of etcd: fail-over, passwords, TLS and leases; strangers and addresses that cannot be are refused."""

import contextlib
import errno
import json
import os
import socket
import threading
import time
import urllib.request

import pytest

from recycle import Job, JobError, RunError
from recycle.exec.etcd import EtcdClient, Lease, LeaseEnded, created_at, open_client, put
from recycle.job.endpoints import parse_endpoints
from recycle.job.sections import MembershipSection
from tests.exec.etcd_server import EtcdServer
from tests.exec.runs import job


def connect(server: EtcdServer, **settings) -> EtcdClient:
    return open_client(server.url, MembershipSection(**settings))


def write(client: EtcdClient, name: str, value: str, lease: str | None = None) -> bool:
    """Write a key that does not exist."""
    body = {"compare": [created_at(name, 0)], "success": [put(name, value, lease)]}
    return bool(client.call("/kv/txn", body).get("succeeded"))


def read(client: EtcdClient, name: str) -> str | None:
    pair = client.read(name)
    return None if pair is None else pair.value.decode()


def test_client_reads_what_another_one_wrote_first(etcd):
    first, second = connect(etcd), connect(etcd)
    name = f"/test/{os.urandom(4).hex()}"
    assert read(first, name) is None
    assert write(first, name, "first")
    assert not write(second, name, "second")
    assert read(second, name) == "first"


def test_client_waits_for_a_killed_store_until_the_timeout(own_etcd):
    client, impatient = connect(own_etcd), connect(own_etcd, store_timeout=0.5)
    assert write(client, "/held", "value")
    own_etcd.kill()
    with pytest.raises(RunError, match=rf"^etcd://127\.0\.0\.1:{own_etcd.port} does not answer"):
        impatient.read("/held")
    threading.Timer(0.5, own_etcd.start_again).start()
    assert read(client, "/held") == "value"


def test_json_of_another_server_is_not_an_answer():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")

        threading.Thread(target=answer, daemon=True).start()
        url = f"etcd://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RunError, match="its answer is not etcd's"):
            open_client(url, MembershipSection(store_timeout=0.1))
        other.shutdown(socket.SHUT_RDWR)


def test_member_that_hangs_is_left_for_another(etcd):
    """Its kernel takes connections and requests, and no process answers; clients start at either member."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as hung:
        url = f"etcd://127.0.0.1:{hung.getsockname()[1]},127.0.0.1:{etcd.port}"
        for _ in range(2):
            client, name = open_client(url, MembershipSection(dead_after=1.0)), f"/test/{os.urandom(4).hex()}"
            assert write(client, name, "value")
            seconds = []
            for _ in range(5):
                started = time.monotonic()
                assert read(client, name) == "value"
                seconds.append(time.monotonic() - started)
            assert min(seconds) < 0.4  # it stays at the member that answers


def test_a_lease_is_lost_when_etcd_says_so_and_not_before(own_etcd):
    settings = MembershipSection(lease=2, dead_after=1.0)
    client = EtcdClient(parse_endpoints(own_etcd.url), settings, None)
    lost = threading.Event()
    lease = Lease(client.clone(), settings, lost.set)
    assert client.call("/kv/txn", {"success": [put("/held", "here", lease.id)]})["succeeded"]
    own_etcd.freeze()
    assert not lost.wait(4.0)
    own_etcd.thaw()
    assert lost.wait(30)
    assert client.read("/held") is None
    with pytest.raises(LeaseEnded):
        client.call("/kv/txn", {"success": [put("/held", "here", lease.id)]})
    lease.close()
    with contextlib.closing(Lease(client.clone(), settings, lost.clear)) as another:
        assert client.call("/kv/txn", {"success": [put("/held", "here", another.id)]})["succeeded"]
    assert client.read("/held") is None


@pytest.fixture
def locked(own_etcd):
    """A server that lets in root with the password "secret" only."""
    add = {"name": "root", "password": "secret"}
    for path, body in (("user/add", add), ("user/grant", {"user": "root", "role": "root"}), ("enable", {})):
        # Not by our client, which repeats what a busy machine did not answer in time: these cannot be repeated.
        request = urllib.request.Request(f"http://127.0.0.1:{own_etcd.port}/v3/auth/{path}")
        urllib.request.urlopen(request, json.dumps(body).encode(), timeout=60).close()
    return own_etcd


def test_a_password_from_a_file_or_the_environment_opens_the_store(locked, tmp_path, monkeypatch):
    (tmp_path / "password").write_text("secret\n")
    client = connect(locked, etcd_user="root", etcd_password_file=str(tmp_path / "password"))
    assert write(client, "/first", "1")
    locked.kill()
    locked.start_again()  # it has forgotten the tokens that it gave out
    assert write(client, "/second", "2")
    monkeypatch.setenv("RECYCLE_ETCD_PASSWORD", "secret")
    assert read(connect(locked, etcd_user="root"), "/second") == "2"


def test_a_stranger_is_refused_at_once(locked, tmp_path, monkeypatch):
    with pytest.raises(RunError, match=r"refuses: .*user name is empty"):
        connect(locked)
    monkeypatch.setenv("RECYCLE_ETCD_PASSWORD", "guess")
    with pytest.raises(RunError, match=r"refuses: .*authentication failed"):
        connect(locked, etcd_user="root")
    monkeypatch.delenv("RECYCLE_ETCD_PASSWORD")
    with pytest.raises(JobError, match=r"etcd_user: no password; give etcd_password_file or set \$RECYCLE_ETCD_PASS"):
        connect(locked, etcd_user="root")
    with pytest.raises(JobError, match=r"etcd_password_file: .*nowhere: No such file"):
        connect(locked, etcd_user="root", etcd_password_file=str(tmp_path / "nowhere"))


def test_a_store_on_another_machine_needs_a_secret():
    with pytest.raises(JobError, match=r"reached over the network without a secret"):
        open_client("etcd://10.0.0.1:2379", MembershipSection())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, os.strerror(errno.ECONNREFUSED)),
        (b"", "connection was closed"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not etcd's"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "not etcd's"),
    ],
)
def test_a_store_that_never_answered_is_named_whole_with_the_reason(answer, reason):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"etcd://127.0.0.1:{listener.getsockname()[1]}"
        if answer is None:
            listener.close()
        else:
            threading.Thread(target=_answer_all, args=(listener, answer), daemon=True).start()
        with pytest.raises(RunError, match=f"^{url} does not answer \\(.*{reason}") as refusal:
            open_client(url, MembershipSection(store_timeout=0.2))
    assert len(str(refusal.value)) < 120


def test_an_answer_that_comes_in_drops_ends_with_the_timeout():
    """Each part comes in time, the whole never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer_all, args=(listener, b"", 0.1), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(RunError, match="no answer in time"):
            open_client(f"etcd://127.0.0.1:{listener.getsockname()[1]}", MembershipSection(store_timeout=0.2))
        assert time.monotonic() - began < 5.0


def _answer_all(listener: socket.socket, answer: bytes, pause=0.0):
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                while pause:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    time.sleep(pause)
                connection.sendall(answer)


def test_a_file_for_tls_that_cannot_be_used_is_an_error_of_the_job(tmp_path):
    (tmp_path / "text").write_text("text")
    for name, reason in (("text", "not a certificate or key in PEM"), ("missing", os.strerror(errno.ENOENT))):
        path = str(tmp_path / name)
        for files in ({"etcd_ca": path}, {"etcd_certificate": path, "etcd_key": path}):
            with pytest.raises(JobError, match=rf"etcd_ca, etcd_certificate, etcd_key: {reason}$"):
                open_client("etcds://127.0.0.1:1", MembershipSection(**files))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tcp://here:1", "is not a store: write etcd://host:port"),
        ("etcd://here", "is not a store"),
        ("etcd://here:70000", "a port is a number from 1 to 65535"),
        ("etcd://", "is not a store"),
    ],
)
def test_an_address_that_cannot_be_is_refused_in_the_job(text, says):
    with pytest.raises(JobError, match=rf"\[membership\] store: .*{says}"):
        job(1, 1, 1, membership={"store": text})


def test_secrets_are_not_part_of_the_job_that_a_run_keeps(tmp_path):
    (tmp_path / "password").write_text("hunter2")
    (tmp_path / "job.toml").write_text(
        '[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n[membership]\netcd_user = "me"\n'
        'etcd_password_file = "password"\n'
    )
    loaded = Job.load(tmp_path / "job.toml")
    assert loaded.membership.etcd_password_file == str(tmp_path / "password")
    assert "hunter2" not in loaded.to_toml()
