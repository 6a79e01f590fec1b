"""The examples of a cluster as users run them: nodes in namespaces, Slurm's script, and Kubernetes' manifests."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recycle import Job
from recycle.exec import run
from recycle.ir.families import one_f_one_b
from tests import ROOT
from tests.exec.agents import Cluster
from tests.exec.etcd_server import ETCD, EtcdServer
from tests.exec.network import Network
from tests.exec.paced import SLOWLY
from tests.exec.runs import events_of, job, lines_of

pytestmark = [pytest.mark.process, pytest.mark.etcd]

STEPS = 400
"""More than the script would take: on a busy machine agents take a minute to start."""
FOLDER = ROOT / "examples" / "cluster"


@pytest.fixture
def recycle(tmp_path):
    """The command, whatever environment the tests run in."""
    if ETCD is None:
        pytest.skip("no etcd: install Debian's etcd-server")
    start = f"exec {sys.executable} -c 'from recycle.cli import main; main()' \"$@\""
    return write_command(tmp_path / "bin", "recycle", start)


def write_command(folder: Path, name: str, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    command = folder / name
    command.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    command.chmod(0o755)
    return command


@pytest.mark.soak
def test_nodes_lose_power_and_network_and_return(recycle, tmp_path):
    try:
        Network(1).end()
    except PermissionError as refusal:
        pytest.skip(f"no networks of nodes on this machine: {refusal}")
    environment = {
        "STEPS": f"{STEPS}",
        "RECYCLE": str(recycle),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(FOLDER.parents[1]),
    }
    script = subprocess.Popen(
        [FOLDER / "try_here.sh"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, complaints = script.communicate(timeout=900)
    finally:
        script.terminate()  # it cleans up
        script.wait()
    assert script.returncode == 0, output + complaints
    events = re.findall(r"^\S+ step \d+: (.+)$", output, flags=re.MULTILINE)
    assert events == [
        "node 1 loses power",
        "the others go on without its workers",
        "node 1 is switched on again",
        "its workers have joined again",
        "node 2 is cut off",
        "the others go on without its workers",
        "node 2 has its cable back",
        "its workers have joined again",
    ]
    assert output.splitlines()[-1] == f"{STEPS} losses, identical to the last bit: yes"
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"recycle\d+node", namespaces)


def test_the_jobs_of_the_examples_can_be_read():
    for path in FOLDER.glob("*.toml"):
        Job.load(path).profile()


class SlurmJob:
    """`slurm.sh` with stand-ins for Slurm's commands, on two nodes that are this machine.

    Args:
        folder: with `bin/recycle` and `job.toml`; the run directory is `run` there.
    """

    def __init__(self, folder: Path):
        self.folder, self.directory = folder, folder / "run"
        write_command(
            folder / "bin",
            "srun",
            'while [[ "$1" == --* ]]; do shift; done',
            'echo "$RECYCLE_ETCD_PASSWORD" >password; rm -f pids; code=0',
            'for node in 0 1; do SLURM_NODEID=$node "$@" & echo $! >>pids; done',
            'for pid in $(<pids); do wait "$pid" || code=$?; done; exit $code',
        )
        write_command(folder / "bin", "scancel", '[ "$*" = "--signal=TERM 7.0" ] && kill -TERM $(<pids)')
        for name, after in ("scontrol", ""), ("etcdctl", f'exec {shutil.which("etcdctl")} "$@"'):
            write_command(folder / "bin", name, f'echo "$*" >>{name}.calls', after)

    def start(self) -> subprocess.Popen[bytes]:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("RECYCLE_", "SLURM"))},
            **{"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURMD_NODENAME": "127.0.0.1"},
            **{"JOB": "job.toml", "RUN": str(self.directory), "PYTHONPATH": str(FOLDER.parents[1])},
            **{"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(self.folder)},
        }
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                ["bash", FOLDER / "slurm.sh"],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def reach(self, condition: Callable[[], object], script: subprocess.Popen[bytes]):
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline, (self.folder / "output").read_text()
            assert script.poll() is None, (self.folder / "output").read_text()
            time.sleep(0.1)


def test_killed_slurm_job_resumes_and_ends_at_its_time_limit(recycle, tmp_path):
    membership = {"transport": "tests.exec.paced:Paced", "etcd_user": "root", "store": "etcd://127.0.0.1:2379"}
    sections = {"cluster": {"workers_per_node": 1}, "train": {"checkpoint_every": 4}}
    trained = job(2, 1, 2, membership=membership, **sections)
    (tmp_path / "job.toml").write_text(trained.to_toml())
    (tmp_path / SLOWLY).touch()
    slurm = SlurmJob(tmp_path)
    scripts = [slurm.start()]
    try:
        slurm.reach(lambda: events_of(slurm.directory, "checkpoint"), scripts[0])
        os.killpg(scripts[0].pid, signal.SIGKILL)
        scripts[0].wait()
        scripts.append(slurm.start())
        slurm.reach(lambda: events_of(slurm.directory, "restored"), scripts[1])
        (restored,) = events_of(slurm.directory, "restored")
        slurm.reach(lambda: len(lines_of(slurm.directory, "metrics")) > restored["step"], scripts[1])
        scripts[1].send_signal(signal.SIGUSR1)  # as Slurm signals the batch script, 120 s before the time limit
        code = scripts[1].wait(240)
    finally:
        for script in scripts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    assert code == 128 + signal.SIGTERM, (tmp_path / "output").read_text()
    assert (tmp_path / "scontrol.calls").read_text() == "requeue 7\n"
    assert len(events_of(slurm.directory, "stopped")) == 1
    assert restored["step"] >= 4
    losses = [line["loss"] for line in lines_of(slurm.directory, "metrics")]
    assert losses == run(one_f_one_b(trained.shape), trained, steps=len(losses)).losses
    assert (tmp_path / "password").read_text().strip() not in (tmp_path / "etcdctl.calls").read_text()


@pytest.mark.parametrize(("code", "requeues"), [(0, False), (1, False), (75, True)])
def test_slurm_requeues_your_own_script_after_the_loss_of_a_stage(code, requeues, tmp_path):
    write_command(tmp_path / "bin", "srun", f'echo "$@" >called; exit {code}')
    write_command(tmp_path / "bin", "scontrol", 'echo "$*" >requeued')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_JOB_ID": "7", "RECYCLE_STORE": "etcd://head:2379"}
    command = ["bash", FOLDER / "slurm.sh", "--", "python", "a b.py"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False, timeout=60).returncode == code
    assert (tmp_path / "called").read_text().endswith(f"--run {tmp_path}/runs/7 --resume -- python a b.py\n")
    assert (tmp_path / "requeued").exists() == requeues


@pytest.mark.soak
def test_spare_takes_the_place_of_a_lost_node(recycle, tmp_path):
    etcd = EtcdServer(tmp_path)
    membership = {"transport": "tests.exec.paced:Paced", "rejoin_deadline": 300}
    cluster = Cluster(tmp_path, job(2, 1, 2, membership=membership), etcd, "spares", "--steps", "30")
    spare = None
    try:
        for node in range(2):
            cluster.start(node)
        cluster.reach_step(2)
        options = ["--store", etcd.url, "--id", "spares", "--address", "127.0.0.4", "--steps", "30"]
        spare = subprocess.Popen(
            [sys.executable, FOLDER / "spare.py", "job.toml", "--run", "run", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1]), "RECYCLE_SPARE_PATIENCE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        cluster.reach_step(4)
        assert spare.poll() is None
        cluster.kill(1)
        cluster.reach(lambda: bool(cluster.events("rejoined")), "the spare's worker")
        cluster.finish()
        output, _ = spare.communicate(timeout=120)
    finally:
        cluster.end()
        etcd.end()
        if spare is not None:
            spare.kill()
            spare.wait()
    assert spare.returncode == 0
    assert output.startswith("spare: takes the place of node 1\n")
    assert [event["worker"] for event in cluster.events("rejoined")] == ["1.0"]
    assert cluster.lines("metrics")[-1]["live_workers"] == 2
