"""A process's side of the protocol: generations, waits, messages and interrupts."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from recycle import RunError
from recycle.exec.links import Link, LinkClosed, listen_locally
from recycle.exec.protocol import (
    Commit,
    Committed,
    GenerationRecord,
    Heartbeat,
    Join,
    LeaderMessage,
    Permit,
    ProcessMessage,
    Propose,
    Ready,
    Stop,
    Strike,
)
from recycle.exec.worker.member import FormingKeys, GenerationOver, Member, MemberState
from tests.exec.keys import KeyServer
from tests.waiting import until

SOON = 10.0
COMMIT = Commit(3, 1.5, 0.25, 1.0)
_Value = TypeVar("_Value")


def propose(generation: int, *live: str) -> Propose:
    roles = {worker: worker for worker in live}
    return Propose(GenerationRecord(generation, list(live), roles, "plan", incarnations={"0.1": 2}))


def state_after(*messages: LeaderMessage, incarnation=2) -> MemberState:
    state = MemberState("0.1", incarnation)
    for message in messages:
        state.take(message)
    return state


def begun(state: MemberState) -> int | None:
    record = state.begin()
    return None if record is None else record.generation


def test_process_begins_its_last_generation_that_is_not_over():
    state = state_after(propose(1, "0.0", "0.1"), Stop(1))
    assert begun(state) is None
    state.take(propose(2, "0.0"))
    assert begun(state) is None
    state.take(propose(3, "0.0", "0.1"))
    assert begun(state) == 3
    assert begun(state) is None
    assert not state.is_over


def test_process_begins_no_generation_of_an_earlier_process():
    """A new leader may propose one before it learns that the worker has another process."""
    assert begun(state_after(propose(1, "0.1"), incarnation=3)) is None


class Agent:
    """The agent's end of a process's connection; records the messages."""

    def __init__(self):
        self._listener, self.address = listen_locally()
        self._heard = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        self.link = Link(self._listener.accept()[0], ProcessMessage)
        try:
            while True:
                for message in self.link.read():
                    with self._changed:
                        self._heard.append(message)
                        self._changed.notify_all()
        except LinkClosed:
            return

    def hear(self, choose: Callable[[Any], _Value | None]) -> _Value:
        """Wait for a message for which `choose` returns a value."""
        with self._changed:

            def chosen():
                return [value for value in map(choose, self._heard) if value is not None]

            assert self._changed.wait_for(chosen, SOON)
            return chosen()[0]

    def tell(self, *messages: LeaderMessage):
        self.hear(lambda m: True if isinstance(m, Join) else None)
        for message in messages:
            self.link.send(message)

    def close(self):
        self._listener.close()
        self.link.close()


class Process:
    """Process 0.1 and its agent; calls of the process may wait in threads."""

    def __init__(self):
        self.agent, self.interrupts, self.lost = Agent(), 0, threading.Event()
        self.member = Member(self.agent.address, "0.1", 2, 0.02, self._interrupt, lambda reason: self.lost.set())
        self._thread = ThreadPoolExecutor(4)

    def _interrupt(self):
        self.interrupts += 1

    def does(self, action: Callable[..., _Value], *arguments) -> Future[_Value]:
        return self._thread.submit(action, *arguments)

    def begin(self, generation: int, *live: str):
        self.agent.tell(propose(generation, *(live or ("0.1",))))
        record = self.does(self.member.next_record).result(SOON)
        assert record.generation == generation

    def await_interrupts(self, count: int):
        until(lambda: self.interrupts >= count)


@pytest.fixture
def process():
    process = Process()
    yield process
    process.agent.close()


def test_end_of_a_generation_interrupts_until_the_process_leaves_it(process):
    process.begin(1)
    assert not process.member.over.is_set()
    assert process.interrupts == 0
    process.agent.tell(Stop(1))
    process.await_interrupts(3)
    over = process.member.over
    assert over.is_set()
    process.begin(2)
    assert over.is_set()
    assert not process.member.over.is_set()
    after = process.interrupts
    time.sleep(0.1)
    assert process.interrupts == after


def test_wait_for_a_decision_ends_with_it_or_with_the_generation(process):
    process.begin(1)
    formed, decision = process.does(process.member.permitted, "form"), process.does(process.member.decision, 3)
    process.agent.tell(Permit(1, "form", stale=True), Committed(1, COMMIT))
    assert (formed.result(SOON), decision.result(SOON)) == (True, COMMIT)
    assert process.member.is_stale_anywhere()
    assert process.member.known_commit(4) is None
    waits = [process.does(process.member.decision, 4), process.does(process.member.evaluated, 3)]
    runs = process.does(process.member.permitted, "run")
    process.agent.tell(Stop(1))
    assert runs.result(SOON) is False
    for wait in waits:
        with pytest.raises(GenerationOver):
            wait.result(SOON)


def test_wait_for_a_commit_shows_in_heartbeats(process):
    """A process that is ahead of the commit does not hang."""
    process.begin(1)
    process.member.progress.set_waiting(False)
    count = process.member.progress.count
    decision = process.does(process.member.decision, 3)
    beat = process.agent.hear(lambda m: m if isinstance(m, Heartbeat) and m.waiting and m.progress > count else None)
    later = process.agent.hear(lambda m: m if isinstance(m, Heartbeat) and m.beats > beat.beats else None)
    assert later.waiting
    process.agent.tell(Committed(1, COMMIT))
    assert decision.result(SOON) == COMMIT
    assert not process.member.progress.waiting


def test_fault_of_a_pair_strikes_only_processes_that_had_joined(process):
    earlier, later = (process.does(process.member.await_strike, fault) for fault in (0, 1))
    process.agent.tell(Strike(0, "1.1"))
    process.begin(1)
    assert earlier.result(SOON) is False
    assert not later.done()
    process.agent.tell(Strike(1, "1.1"))
    assert later.result(SOON) is True


def test_process_notices_the_end_of_its_agent(process):
    process.agent.tell()
    process.agent.close()
    assert process.lost.wait(SOON)
    with pytest.raises(RunError, match="the agent of this node is gone"):
        process.member.send(Ready(2))


def test_keys_of_forming_groups_keep_every_byte():
    server = KeyServer()
    ours, theirs = FormingKeys(server.address), FormingKeys(server.address)
    ours.set("generation00000001/world/0", bytes(range(256)))
    ours.set("text", "é")
    assert theirs.get("generation00000001/world/0") == bytes(range(256))
    assert theirs.get("text") == "é".encode()
    assert theirs.check(["text", "generation00000001/world/0"])
    assert not theirs.check(["text", "another"])
    with pytest.raises(RuntimeError, match="another"):
        theirs.get("another")
    with ThreadPoolExecutor(8) as threads:  # each answer reaches the thread that requested it
        asked = [threads.submit(theirs.get, name) for name in ("text", "generation00000001/world/0") * 50]
        assert {len(answer.result(SOON)) for answer in asked} == {2, 256}
    server.close()
    with pytest.raises(RunError, match="the agent of this node is gone"):
        theirs.get("text")
