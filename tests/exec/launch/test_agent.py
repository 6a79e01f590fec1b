"""Agents are killed while they train: the run continues to the same bits, also without its leader."""

import hashlib
import os
import re
import signal
import socket
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from recycle import Job, JobError, RunError
from recycle.cli.planner import plan_for_training
from recycle.exec.election import Election
from recycle.exec.launch.agent import own_address
from recycle.exec.launch.agreement import open_agreed_directory
from recycle.exec.launch.request import Findings, request_run
from recycle.exec.launch.run_address import drain
from recycle.exec.protocol import RunInfo
from recycle.job.endpoints import parse_endpoints
from tests.cli.command import Command
from tests.exec.agents import Cluster
from tests.exec.etcd_server import keys
from tests.exec.runs import Run, calm_run, job, processes_writing_below, varied
from tests.waiting import until
from tests.warm import start_recycle

pytestmark = pytest.mark.process

STEPS, UNHURRIED = 60, 0.7
"""Iterations, and seconds between them."""
MEMBERSHIP = {"dead_after": 8.0, "lease": 2, "transport": "tests.exec.paced:Paced"}
CALM = {"dead_after": 60.0, "transport": "auto"}


def small(kind="emulated", **sections: dict) -> Job:
    """Three nodes with a pipeline each."""
    given = {"membership": MEMBERSHIP, "cluster": {"workers_per_node": 2}, "train": {"checkpoint_every": 0}}
    return job(3, 2, 2, kind=kind, **given | sections)


@pytest.fixture
def start(etcd, tmp_path):
    """Start all agents of a job."""
    clusters = []

    def begin(config, steps=STEPS, nodes=3, faults=()):
        strikes = [option for fault in faults for option in ("--fault", fault)]
        cluster = Cluster(tmp_path, config, etcd, tmp_path.name, "--steps", str(steps), *strikes)
        cluster.slow_down(UNHURRIED)
        clusters.append(cluster)
        for node in range(nodes):
            cluster.start(node)
        return cluster

    yield begin
    for cluster in clusters:
        cluster.end()
    until(lambda: not processes_writing_below(str(tmp_path / "run")))


def assert_same_training(cluster: Cluster, launch: Run, steps: int = STEPS, of: Job | None = None):
    cluster.assert_trained_as(calm_run(varied(of or small(), membership=CALM), launch, steps))


def test_nodes_die_and_come_back_and_the_losses_stay_the_same(start, launch, etcd, tmp_path):
    """First a node that does not coordinate, which comes back; then the one that does."""
    before = keys(etcd)
    cluster = start(small())
    cluster.reach_step(3)
    first = cluster.coordinator()
    victim = (first + 1) % 3
    cluster.kill(victim)
    cluster.reach(lambda: bool(cluster.events("recovered")), "recovery")
    lost = {event["worker"]: event["cause"] for event in cluster.events("detected")}
    assert lost == {f"{victim}.{rank}": f"the agent of node {victim} is gone" for rank in (0, 1)}
    assert not cluster.events("coordinator")
    cluster.slow_down(3 * UNHURRIED)  # on a busy machine the agent takes a minute to start
    cluster.start(victim, as_user=True)
    cluster.reach(lambda: len(cluster.events("rejoined")) == 2, "the return of its workers")
    cluster.kill(first)
    cluster.finish()
    assert_same_training(cluster, launch)
    assert [event["node"] for event in cluster.events("coordinator")] == [cluster.coordinator()] != [first]
    assert {line["live_workers"] for line in cluster.lines("metrics")} - {5} == {4, 6}  # both at once, or one by one
    assert len(cluster.events("finished")[-1]["digests"]) == 4
    assert (tmp_path / "run" / "trace.json").exists()
    assert keys(etcd) <= before


@pytest.mark.soak
def test_signalled_leader_node_hands_over_and_leaves_without_repeated_work(start, launch, etcd, tmp_path):
    """The coordinator's, by SIGTERM to its agent, and it comes back; then a worker of another, which stays out."""
    before = keys(etcd)
    cluster = start(small())
    cluster.reach_step(3)
    first = cluster.coordinator()
    cluster.agents[first].send_signal(signal.SIGTERM)
    cluster.reach_end(first, 128 + signal.SIGTERM)
    assert {event["worker"] for event in cluster.events("drained")} == {f"{first}.0", f"{first}.1"}
    assert [event["generation"] for event in cluster.events("generation")] == [1, 2]  # of the hand-over none
    assert [event["generation"] for event in cluster.events("coordinator")] == [1]
    cluster.start(first)
    cluster.reach(lambda: len(cluster.events("rejoined")) == 2, "the return of its workers")
    reported = []
    drain(tmp_path / "run", f"{(first + 1) % 3}.1", None, reported.append)
    assert reported[-1].startswith(f"worker {(first + 1) % 3}.1 has left after ")
    step = len(cluster.lines("metrics"))
    cluster.reach_step(step + 4)
    cluster.finish()
    assert_same_training(cluster, launch)
    assert cluster.lines("metrics")[-1]["live_workers"] == 5
    assert not {"detected", "undone", "recovered"} & {event["kind"] for event in cluster.lines("events")}
    assert keys(etcd) <= before


@pytest.mark.soak
def test_signalled_agents_write_a_checkpoint_and_resume_after_a_restart(start, launch, etcd):
    before = keys(etcd)
    cluster = start(small())
    cluster.reach_step(3)
    for node, number in enumerate((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)):
        cluster.agents[node].send_signal(number)
    for node in range(3):
        cluster.reach_end(node, 128 + signal.SIGTERM)
    (stopped,) = cluster.events("stopped")
    assert stopped["checkpoint"] == f"step-{stopped['step']:08d}"
    assert len(cluster.lines("metrics")) == stopped["step"] + 1
    for node in range(3):
        cluster.start(node)
    cluster.reach(lambda: bool(cluster.events("restored")), "the way on from the checkpoint")
    cluster.finish()
    assert_same_training(cluster, launch)
    assert not cluster.events("undone")
    assert keys(etcd) <= before


@pytest.mark.soak
def test_loss_of_a_stage_or_of_all_nodes_restores_the_checkpoint(start, launch, tmp_path):
    cluster = start(small(train={"checkpoint_every": 4}))
    cluster.reach_step(9)
    pids = [processes_writing_below(str(tmp_path / "run" / "logs" / f"{k}.1.log"))[0] for k in range(3)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    cluster.reach(lambda: bool(cluster.events("recovered")), "recovery")
    cluster.reach_step(30)
    for node in range(3):
        cluster.kill(node)
    for node in range(3):
        cluster.start(node)
    cluster.finish()
    assert_same_training(cluster, launch)
    restored, again = cluster.events("restored")
    assert again["step"] >= 24
    assert restored["step"] % 4 == again["step"] % 4 == 0
    assert restored["step"] >= 8
    assert restored["live"] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert len(cluster.events("finished")[-1]["digests"]) == 6


@pytest.mark.soak
def test_faults_strike_under_agents_and_the_losses_stay_the_same(start, launch):
    """A kill in an evaluation, a connection cut between two nodes, and a worker's fault on itself.

    Of the connection each of the nodes silences its end.
    """
    faults = ["kill:1.1@3.evaluation", "cut=0.0:2.0@8", "exception:0.1@12"]
    config = small(membership=MEMBERSHIP | {"dead_after": 3.0}, eval={"every": 4, "batches": 2})
    cluster = start(config, faults=[*faults, "rejoin:1.1@6"])
    cluster.reach(lambda: {"0.1", "1.1", "2.0"} <= rejoined(cluster).keys(), "the return of all three")
    cluster.finish()
    assert_same_training(cluster, launch, of=config)
    assert [event["fault"] for event in cluster.events("fault")] == faults
    detected = {event["worker"]: re.split("[;:]", event["cause"])[0] for event in cluster.events("detected")}
    assert detected == {
        "1.1": "killed by SIGKILL",
        "2.0": "cut off from worker 0.0",
        "0.1": "ended with exit code 1 (RuntimeError",
    }
    assert rejoined(cluster)["1.1"] == 6  # not as soon as its agent can start it again
    assert set(rejoined(cluster)) == {"0.1", "1.1", "2.0"}


def rejoined(cluster: Cluster) -> dict[str, int]:
    """The step in which each worker that came back did so, the last time."""
    return {event["worker"]: event["step"] for event in cluster.events("rejoined")}


def test_the_way_to_any_member_tells_the_address_of_a_node(monkeypatch):
    resolve = socket.getaddrinfo

    def resolved(host, *options, **more):
        if host == "gone":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *options, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert own_address(parse_endpoints("etcd://gone:2379,127.0.0.1:2379")) == "127.0.0.1"
    with pytest.raises(
        RunError, match=r"cannot be reached from this machine \(Name or service not known\); give --address"
    ):
        own_address(parse_endpoints("etcd://gone:2379"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--node", "3"), "node 3: the job's 6 workers are on nodes 0 to 2"),
        ((), "--node: give the number of this node"),
        (("--node", "0", "--nodes", "2"), "--nodes 2: the job's 6 workers are placed on 3 nodes"),
        (("--node", "0", "--store", "launcher"), "agents need an etcd"),
        (("--node", "0", "--store", "tcp://here"), "--store: [membership] store: 'tcp://here' is not a store"),
        (("--node", "0", "--store", "etcd://10.9.8.7:1"), "reached over the network without a secret"),
        (("--node", "0", "--id", "a/b"), "--id a/b: write letters"),
        (
            ("--node", "0", "--store", "etcd://127.0.0.1:1", "--address", "192.0.2.1"),
            "address 192.0.2.1: this machine cannot listen on it (Cannot assign requested address)",
        ),
        (("--node", "0", "--fault", "rejoin:1.1@5"), "fault rejoin:1.1@5: worker 1.1 is alive at step 5"),
    ],
)
def test_a_request_that_cannot_work_is_refused_in_one_line(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "job.toml").write_text(job(3, 2, 2, cluster={"workers_per_node": 2}).to_toml())
    assert Command(capsys)("agent", "job.toml", *options).refused(says)
    assert not (tmp_path / "runs").exists()


def test_agent_started_after_the_end_of_the_run_exits_at_once(tmp_path, monkeypatch, capsys):
    """It needs no store for that; a directory of another job or with fewer steps is for the store to judge."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    keys = {"cluster": {"workers_per_node": 2}, "membership": {"store": "etcd://127.0.0.1:1"}}
    config = job(3, 2, 2, **keys)
    (tmp_path / "job.toml").write_text(config.to_toml())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.toml").write_text(config.to_toml())
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / "events.jsonl").write_text('{"time": 1.0, "kind": "finished", "step": 4, "digests": {}}\n')
    options = ("agent", "job.toml", "--node", "0", "--run", "run")
    outcome = Command(capsys)(*options, "--steps", "5")
    assert outcome.status == 0
    assert outcome.out == "node 0: the run in run has ended already, after step 4; give another --run for a new one\n"
    monkeypatch.setattr(Election, "connect", lambda *_: (_ for _ in ()).throw(RunError("asked the store")))
    assert "asked the store" in Command(capsys)(*options, "--steps", "6").err
    (tmp_path / "job.toml").write_text(job(3, 2, 3, **keys).to_toml())
    assert "asked the store" in Command(capsys)(*options, "--steps", "5").err


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ({"transport": "nccl"}, "run 'mine' uses the transport nccl, this node selects gloo"),
        ({"schedule": "other"}, "run 'mine' has another --schedule"),
        ({"script_restarts": 0}, "run 'mine' has another number of --restarts, or recycle's own trainer"),
    ],
    ids=["transport", "schedule", "script"],
)
def test_agent_with_another_request_than_the_first_is_refused(differs, says, tmp_path):
    request = request_run(small(), planner=plan_for_training)
    request = replace(request, findings=Findings(transport="gloo"))
    digest = hashlib.sha256(request.job.to_toml().encode()).hexdigest()
    same = RunInfo(identity="", job=digest, steps=request.steps, faults=[], started=0.0, transport="gloo")
    info = msgspec.structs.replace(same, **differs)
    election = SimpleNamespace(run=lambda: info)
    with pytest.raises(JobError, match=f"node 1: {says}"):
        open_agreed_directory(request, election, node=1, run="mine", path=tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("before", [None, "another run\n"])
def test_agent_with_a_directory_of_its_own_is_refused(before, tmp_path):
    """As on a node whose directory is not on the shared file system."""
    request = request_run(small(), planner=plan_for_training)
    digest = hashlib.sha256(request.job.to_toml().encode()).hexdigest()
    info = RunInfo(identity="mine", job=digest, steps=request.steps, faults=[], started=0.0)
    if before is not None:
        (tmp_path / "run").write_text(before)
    with pytest.raises(JobError, match="do not use this directory"):
        open_agreed_directory(
            request, SimpleNamespace(run=lambda: info), node=1, run="mine", path=tmp_path, resume=False
        )
    assert not (tmp_path / "job.toml").exists()


def test_agent_does_not_begin_a_run_that_has_ended_while_it_started(tmp_path):
    """The run of a script, whose checkpoint only the script can judge."""
    request = request_run(small(), planner=plan_for_training, command=["python", "script.py"])
    (tmp_path / "job.toml").write_text(request.job.to_toml())
    (tmp_path / "metrics.jsonl").write_text("")
    ended = {"time": 1.0, "kind": "finished", "step": request.steps - 1, "digests": {}}
    (tmp_path / "events.jsonl").write_bytes(msgspec.json.encode(ended) + b"\n")
    with pytest.raises(JobError, match="has ended after step"):
        open_agreed_directory(
            request,
            SimpleNamespace(run=lambda: None, outcome=lambda: None),
            node=1,
            run="mine",
            path=tmp_path,
            resume=True,
        )


def test_agent_of_another_job_or_a_second_agent_of_a_node_is_refused(start, etcd, tmp_path):
    cluster = start(small(), nodes=1)
    cluster.reach(lambda: "waiting for agents of nodes 1 2" in cluster.output(0).read_text(), "the first agent")
    (tmp_path / "other.toml").write_text(small(train={"warmup": 3}).to_toml())
    config = ("--steps", str(STEPS), "--store", etcd.url, "--id", tmp_path.name, "--run", "run")
    refused = (
        ("job.toml", "--node", "0"),
        ("other.toml", "--node", "1"),
        ("job.toml", "--node", "1", "--fault", "kill:1.1@5"),
    )
    outputs = [(tmp_path / f"refused{number}.out").open("w+b") for number in range(len(refused))]
    agents = [
        start_recycle(["agent", *options, *config], tmp_path, output)
        for options, output in zip(refused, outputs, strict=True)
    ]
    codes = [agent.wait(100) for agent in agents]
    messages = []
    for output in outputs:
        output.seek(0)
        messages.append(output.read().decode().strip())
        output.close()
    assert messages == [
        f"recycle: node 0 already has an agent in run '{tmp_path.name}' [job-error]",
        f"recycle: node 1: run '{tmp_path.name}' has another job file; give another --id [job-error]",
        f"recycle: node 1: run '{tmp_path.name}' has other faults; give another --id [job-error]",
    ]
    assert codes == [2, 2, 2]
