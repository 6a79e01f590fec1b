"""An agent passes messages between its processes and the leader, in order, and starts and kills processes."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from recycle import Worker
from recycle.exec.agent import node_agent
from recycle.exec.agent.node_agent import HOLD_SECONDS, NodeAgent
from recycle.exec.links import Hub, Link, LinkClosed, connect_locally, listen_locally
from recycle.exec.protocol import (
    AgentMessage,
    Batch,
    Drain,
    Ended,
    FromWorker,
    GenerationRecord,
    GetKeys,
    Heartbeat,
    Join,
    Keys,
    Kill,
    Leave,
    Leaving,
    Permit,
    Propose,
    Ready,
    Report,
    Said,
    SetKey,
    Start,
    StepReport,
    Stop,
    Trouble,
    Values,
)
from tests.exec.test_links import as_another_user, is_answered, needs_root
from tests.waiting import ManualTime

SOON = 60.0
HEARTBEAT = 0.1
A, B = Worker(0, 0), Worker(0, 1)


class Processes:
    """Stands for the processes of a node; a test says which of them end."""

    def __init__(self):
        self.alive = set()
        self.killed = []
        self.started = []
        self._gone = {}

    def start(self, order: Start):
        worker = Worker.parse(order.worker)
        assert worker not in self.alive
        self.alive.add(worker)
        self.started.append(order)

    def ends(self, worker: Worker, how: str):
        self.alive.discard(worker)
        self._gone[worker] = how, f"log of {worker}"

    def take_ends(self) -> dict[Worker, tuple[str, str]]:
        gone, self._gone = self._gone, {}
        return gone

    def kill(self, worker: Worker):
        self.killed.append(worker)

    def running(self, worker: Worker) -> bool:
        return worker in self.alive


class Watch:
    """Stands for the checks of GPUs; a test says which are defective, and when a check ends."""

    def __init__(self):
        self.defects = {}
        self.is_checking, self.checks = False, 0

    def check(self):
        self.checks += 1

    def defect(self, place: str) -> str | None:
        return self.defects.get(place)


class Node:
    """An agent with the processes 0.0 and 0.1 of two workers, each in its first incarnation."""

    def __init__(self, tensor_parallel: int):
        self.hub, self.processes, self.drained = Hub(), Processes(), []
        listener, self.address = listen_locally()
        self.watch = Watch()
        self.agent = NodeAgent(
            3, "session", self.hub, HEARTBEAT, tensor_parallel, listener, self.processes, self._drain, self.watch
        )
        for worker in (A, B):
            self.agent.obey(Start(str(worker), 0, str(worker), 0))

    def _drain(self, link: Link, message: Drain):
        self.drained.append(message)

    def connect(self) -> Link:
        link = connect_locally(self.address, AgentMessage, "the agent")
        link.socket.settimeout(SOON)
        return link

    def join(self, member: str, incarnation=0) -> Link:
        link = self.connect()
        link.send(Join(member, incarnation))
        self.serve()
        return link

    def serve(self):
        while self.hub.dispatch(0.02):
            pass

    def ask(self, link: Link, *requests: SetKey | GetKeys) -> list[Values]:
        for request in requests:
            link.send(request)
        self.serve()
        return link.read()

    def batch(self) -> Batch:
        """All that has come until now."""
        self.serve()
        return self.agent.batch()

    def told(self, link: Link):
        """What has been sent on a link."""
        link.socket.settimeout(0.02)
        try:
            return link.read()
        except LinkClosed:
            return []


@pytest.fixture
def node():
    node = Node(1)
    yield node
    node.hub.close()


def propose(generation: int) -> Propose:
    return Propose(GenerationRecord(generation, ["0.0"], {"0.0": "0.0"}, "plan"))


def beat(count: int) -> Heartbeat:
    return Heartbeat(count, count, False, "1F", 0.5)


def test_a_worker_is_not_started_on_a_defective_gpu(node):
    node.processes.ends(A, "killed by SIGKILL")
    assert [ended.how for ended in node.batch().ended] == ["killed by SIGKILL"]
    assert node.watch.checks == 1
    node.watch.is_checking = True
    node.agent.obey(Start("0.0", 1, "0.0", 4))
    assert node.agent.batch() is None
    assert [order.incarnation for order in node.processes.started] == [0, 0], "it waits for the check"
    node.watch.is_checking, node.watch.defects = False, {"0.0": "GPU-a is lost"}
    assert node.batch().ended == [Ended("0.0", 1, "was not started: GPU-a is lost")]
    assert [order.incarnation for order in node.processes.started] == [0, 0]
    assert node.agent.hello().processes[0].how == "was not started: GPU-a is lost"
    node.agent.obey(Start("0.0", 2, "0.1", 4))  # at another place
    assert [order.incarnation for order in node.processes.started] == [0, 0, 2]


def test_a_worker_whose_gpu_becomes_defective_is_asked_to_leave_once(node):
    node.watch.defects = {"0.1": "GPU-b is lost"}
    assert node.batch().said == [FromWorker("0.1", Leaving(0, "GPU-b is lost"), 0)]
    assert node.agent.batch() is None


def test_messages_of_a_process_arrive_in_order_before_its_end(node):
    link = node.join("0.0")
    for number in range(40):
        link.send(Said(Trouble(str(number)), 1))
    link.close()
    node.processes.ends(A, "ended with exit code 1")
    batch = node.agent.batch()  # the end is seen first
    assert batch.said == [FromWorker("0.0", Trouble(str(number)), 1) for number in range(40)]
    assert batch.ended == [Ended("0.0", 0, "ended with exit code 1", "log of 0.0")]
    assert node.agent.batch() is None


def test_process_of_an_old_incarnation_is_ignored(node):
    node.processes.ends(A, "killed by SIGKILL")
    node.batch()
    node.agent.obey(Start("0.0", 1, "0.0", 4))
    old, new = node.join("0.0", 0), node.join("0.0", 1)
    for link in (old, new):
        link.send(beat(5))
        link.send(Said(Ready(1 if link is new else 0)))
    batch = node.batch()
    assert (batch.said, batch.beats) == ([FromWorker("0.0", Ready(1))], {"0.0": beat(5)})
    node.agent.obey(Stop(1))
    assert (node.told(old), node.told(new)) == ([], [Stop(1)])


def test_processes_of_a_worker_of_which_one_has_ended_are_not_heard_any_more():
    node = Node(2)
    first, second = node.join("0.0"), node.join("0.0t1")
    first.send(Said(Trouble("before"), 1))
    node.processes.ends(A, "tensor rank 0 killed by SIGKILL")
    assert node.batch().said == [FromWorker("0.0", Trouble("before"), 1)]
    second.send(Said(Trouble("after"), 1))
    second.send(beat(1))
    node.serve()
    assert node.agent.batch() is None
    node.hub.close()


def test_reports_wait_for_other_processes_without_delaying_other_messages(node, monkeypatch):
    clock = ManualTime()
    monkeypatch.setattr(node_agent, "time", clock)
    links = [node.join("0.0"), node.join("0.1")]
    messages = [FromWorker(member, StepReport(4, Report({0: [1.0]}, None)), 1) for member in ("0.0", "0.1")]
    for link, report in zip(links, messages, strict=True):
        link.send(Said(report.message, 1))
        while not node.hub.dispatch(SOON):
            pass
        batch = node.agent.batch(hold=True)
        assert node.agent.is_holding == (report is messages[0])
    assert batch == Batch(messages)
    links[0].send(Said(messages[0].message, 1))
    links[0].send(Said(Trouble("broke"), 1))
    node.serve()
    assert node.agent.batch(hold=True) == Batch([messages[0], FromWorker("0.0", Trouble("broke"), 1)])
    links[0].send(Said(messages[0].message, 1))
    node.serve()
    assert node.agent.batch(hold=True) is None
    clock.now += HOLD_SECONDS
    assert node.agent.batch(hold=True) == Batch(messages[:1])


def test_departures_reach_their_worker_only(node):
    links = [node.join("0.0"), node.join("0.1")]
    for order in (Leave("0.1", 0), Stop(4)):
        node.agent.obey(order)
    assert node.told(links[0]) == [Stop(4)]
    assert node.told(links[1]) == [Leave("0.1", 0), Stop(4)]


def test_keys_are_shared_with_other_nodes_and_forgotten_once_a_later_generation_runs(node):
    old, new = "generation00000003/world/0", "generation00000004/world/0"
    link = node.connect()
    assert node.ask(link, SetKey(old, b"\xff\0")) == [Values()]
    assert node.batch().keys == {old: b"\xff\0"}
    assert node.agent.batch() is None
    node.agent.obey(Keys({new: b"there", "other": b"kept"}))
    assert node.ask(link, GetKeys([new, old, "missing"])) == [Values([b"there", b"\xff\0", None])]
    node.agent.obey(Permit(4, "form"))
    assert node.ask(link, GetKeys([old])) == [Values([b"\xff\0"])]
    node.agent.obey(Permit(4, "run"))
    assert node.ask(link, GetKeys([new, old, "other"])) == [Values([b"there", None, b"kept"])]


def test_worker_that_still_runs_is_killed_before_its_next_process_starts(node):
    order = Start("0.0", 1, "0.1", 4, restored=7)
    for _ in range(2):
        node.agent.obey(order)
        node.agent.batch()
    assert set(node.processes.killed) == {A}
    assert len(node.processes.started) == 2
    node.processes.ends(A, "killed by SIGKILL")
    assert node.batch().ended == [Ended("0.0", 0, "killed by SIGKILL", "log of 0.0")]
    assert node.processes.started[2:] == [Start(str(A), 1, str(B), 4, 7)]
    killed = len(node.processes.killed)
    for late in (order, Start("0.0", 0, "0.0", 0), Kill("0.0", 0)):
        node.agent.obey(late)
        node.agent.batch()
    assert (len(node.processes.killed), len(node.processes.started)) == (killed, 3)
    node.agent.obey(Kill("0.0", 1))
    assert len(node.processes.killed) > killed


@needs_root
@pytest.mark.process
@pytest.mark.parametrize("request_", [Join("0.0", 0), SetKey("name", b"x"), GetKeys(["name"]), Drain("0.0")])
def test_another_user_of_the_machine_is_neither_heard_nor_answered(node, request_):
    node.agent.obey(propose(4))
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(as_another_user, partial(is_answered, node.address, request_, AgentMessage))
        while not asked.done():
            node.hub.dispatch(0.02)
    assert asked.result() is False
    assert (node.agent.batch(), node.drained) == (None, [])
    assert node.told(node.join("0.0")) == [propose(4)]
