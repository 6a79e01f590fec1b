"""The leader's runtime sends no decision before it is written, and a connecting agent receives the current orders."""

from contextlib import ExitStack
from typing import Any, ClassVar

import msgspec
import pytest

from recycle import Worker
from recycle.exec.election import Election, RoleLost
from recycle.exec.etcd import created_at
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.launch.runtime import LeaderRuntime
from recycle.exec.launch.trackers import Observer
from recycle.exec.leader.actions import Persist
from recycle.exec.processes.processes import Waker
from recycle.exec.protocol import (
    AgentProcess,
    Alive,
    Batch,
    Commit,
    Committed,
    Cursor,
    Drain,
    Drained,
    GenerationRecord,
    Hello,
    Keys,
    Kill,
    Order,
    Permit,
    Propose,
    Refused,
    Rejected,
)
from tests.exec.runs import job

COMMIT = Commit(4, 1.5, 0.25, 1.0)
BOTH = ["0.0", "1.0"]
RECORD = GenerationRecord(
    3, BOTH, {name: name for name in BOTH}, "plan", periods={"barrier": 7.0}, committed=4, commit=COMMIT
)
RUNNING = Cursor(3, "running", committed=4, commit=COMMIT)
OF_TWO = job(2, 1, 1)


class Peer:
    """Keeps what is sent to an agent."""

    def __init__(self):
        self.orders = []

    def __call__(self, order: Order, body: bytes | None):
        if not isinstance(order, Alive):
            self.orders.append(order)


@pytest.fixture
def make(tmp_path):
    """A runtime of two workers on two nodes."""
    with ExitStack() as closing:

        def runtime(register=lambda action: None):
            directory = RunDirectory(tmp_path, OF_TWO, None)
            closing.callback(directory.close)
            waker = Waker()
            closing.callback(waker.close)
            results = LeaderRuntime(
                request=RunRequest(
                    job=OF_TWO,
                    steps=9,
                    schedule=None,
                    planner=None,
                    faults=[],
                    observer=Observer(),
                ),
                register=register,
                homes={Worker(0, 0): 0, Worker(1, 0): 1},
                directory=directory,
                waker=waker,
            )
            closing.callback(results.close)
            return results

        yield runtime


def hello(node: int) -> Hello:
    return Hello(node, "session", [AgentProcess(f"{node}.0", 0, 0)])


def test_unpersisted_decision_is_not_sent(make):
    """Another agent has the role by now."""

    def refuse(action):
        assert action.cursor.phase == "abandoned"
        raise RoleLost("another agent leads this run now")

    runtime, peer = make(refuse), Peer()
    with pytest.raises(RoleLost):
        runtime.take_over(1, RECORD, msgspec.structs.replace(RUNNING, phase="proposed"))
    runtime.connect_agent(peer, hello(0))
    assert peer.orders == [Propose(RECORD), Committed(3, COMMIT)]  # which was decided before


def test_register_is_written_on_the_condition_that_the_role_is_the_same():
    class Client:
        bodies: ClassVar[list[dict[str, Any]]] = []

        def call(self, path: str, body, patience: float | None = None):
            self.bodies.append(body)
            return {}

        def read(self, name: str, patience: float | None = None):
            return None

    election = Election(Client(), "run", OF_TWO.membership)
    for write in (lambda: election.persist(Persist(RUNNING, RECORD)), lambda: election.end(""), election.erase):
        with pytest.raises(RoleLost):
            write()
        assert created_at("/recycle/run/role", 0) in Client.bodies[-1]["compare"]


def test_connecting_agent_receives_standing_orders_and_keys(make):
    runtime, first, second = make(), Peer(), Peer()
    runtime.take_over(1, RECORD, RUNNING)
    runtime.connect_agent(first, hello(0))
    standing = [Propose(RECORD), Permit(3, "form"), Permit(3, "run"), Committed(3, COMMIT)]
    assert first.orders == standing
    runtime.take(0, Batch(keys={"generation00000003/a": b"1"}))
    runtime.connect_agent(second, hello(1))
    assert second.orders == [*standing, Keys({"generation00000003/a": b"1"})]
    runtime.take(1, Batch(keys={"b": b"2"}))
    assert (first.orders[4:], second.orders[5:]) == ([Keys({"b": b"2"})], [])


def test_node_has_one_agent_until_its_connection_is_gone(make):
    runtime, first, second = make(), Peer(), Peer()
    runtime.take_over(1, RECORD, RUNNING)
    assert runtime.connect_agent(first, hello(0))
    assert not runtime.connect_agent(second, hello(0))
    assert second.orders == [Rejected()]
    runtime.disconnect_agent(0, second)
    assert runtime.agents == {0: first}
    runtime.disconnect_agent(0, first)
    assert runtime.connect_agent(second, hello(0))
    assert runtime.agents == {0: second}


def test_order_goes_to_the_node_of_the_process(make):
    """The last leader had fenced worker 1.0."""
    runtime, first, second = make(), Peer(), Peer()
    runtime.take_over(1, msgspec.structs.replace(RECORD, live=["0.0"]), RUNNING)
    runtime.connect_agent(first, hello(0))
    runtime.connect_agent(second, hello(1))
    assert [order for order in second.orders if order not in first.orders] == [Kill("1.0", 0)]


def test_drain_names_the_workers_and_says_why_one_stays(make):
    runtime, answers = make(), []
    runtime.take_over(1, RECORD, RUNNING)
    for node in (0, 1):
        runtime.connect_agent(Peer(), hello(node))
    for target in ("0.0", "1", "7", "0.3"):
        runtime.drain(Drain(target), answers.append)
    runtime.tick()
    assert answers[:2] == [Drained(["0.0"]), Drained(["1.0"])]
    refused = [answer for answer in answers[2:] if isinstance(answer, Refused)]
    assert [answer.worker for answer in refused] == ["", "", "1.0"]
    assert refused[0].why.startswith("node 7: the job's workers are on nodes 0 to 1")
    assert refused[2].why.startswith("stage 0 has no other live host")
