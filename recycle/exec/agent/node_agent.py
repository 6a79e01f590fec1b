"""The agent's part for its node: starts and watches processes, and passes messages between them and the leader.

`StandingOrders` keeps what a newcomer needs, `UnansweredMessages` what a new leader needs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from recycle.exec.gpus import GpuWatch
from recycle.exec.links import Hub, Link, is_own_user
from recycle.exec.members import members_of, split_member
from recycle.exec.processes.processes import LocalProcesses
from recycle.exec.protocol import (
    AgentProcess,
    Batch,
    Committed,
    Drain,
    EndAsked,
    Ended,
    EvaluationResult,
    FaultReached,
    FromWorker,
    GetKeys,
    Heartbeat,
    Hello,
    Join,
    Keys,
    Kill,
    LeaderMessage,
    Leave,
    Leaving,
    Order,
    Permit,
    ProcessMessage,
    Propose,
    Ready,
    Said,
    SavedPart,
    SetKey,
    Start,
    StateTensors,
    StepReport,
    Stop,
    Strike,
    Values,
)
from recycle.job.shape import Worker


class StandingOrders:
    """The leader's messages that a newly connected process or agent must receive.

    Attributes:
        keys: keys for forming the groups of the present and later generations.
    """

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self._of_generation: dict[object, LeaderMessage] = {}
        self._others: dict[object, LeaderMessage] = {}

    def take(self, message: LeaderMessage) -> None:
        match message:
            case Propose():
                self._of_generation = {"propose": message}
            case Permit():
                self._of_generation["permit", message.what] = message
                if message.what == "run":
                    self._forget_keys_before(message.generation)
            case Committed():
                step = message.commit.step
                self._of_generation["commit", step] = message
                self._of_generation.pop(("commit", step - 2), None)
            case EvaluationResult():
                self._of_generation["evaluated"] = message
            case Stop():
                self._of_generation["stop"] = message
            case Leave():
                self._others["leave", message.worker] = message
            case Strike():
                self._others["strike", message.fault] = message

    def _forget_keys_before(self, generation: int) -> None:
        first = f"generation{generation:08d}"
        for name in [name for name in self.keys if name.startswith("generation") and name < first]:
            del self.keys[name]

    def messages(self) -> list[LeaderMessage]:
        return [*self._others.values(), *self._of_generation.values()]


class UnansweredMessages:
    """The last messages of the node's processes that a new leader may still need."""

    def __init__(self) -> None:
        self._messages: dict[object, FromWorker] = {}

    def take(self, sent: FromWorker) -> None:
        match sent.message:
            case StepReport(step=step, report=report):
                key: tuple[object, ...] = (type(report).__name__, step)
            case SavedPart() as part:
                key = ("saved", part.step, part.stage)
                self._forget(lambda other: isinstance(other.message, SavedPart) and other.message.step < part.step - 1)
            case StateTensors() as layout:
                key = ("tensors", layout.number, layout.plan)
            case FaultReached(fault=fault):
                key = ("fault", fault)
            case _:
                key = (type(sent.message).__name__,)
        self._messages[(sent.member, *key)] = sent

    def _forget(self, is_old: Callable[[FromWorker], bool]) -> None:
        self._messages = {key: said for key, said in self._messages.items() if not is_old(said)}

    def drop_answered(self, message: LeaderMessage) -> None:
        if isinstance(message, Propose):
            record = message.record
            self._forget(lambda said: 0 < said.generation < record.generation)
            self._forget(lambda said: isinstance(said.message, SavedPart) and said.message.step > record.committed)
        elif isinstance(message, Committed):
            step = message.commit.step
            self._forget(lambda said: isinstance(said.message, StepReport) and said.message.step < step)

    def drop_processes(self, members: list[str]) -> None:
        """Drop the requests of processes that have ended, and their `Ready`."""
        gone = set(members)
        self._forget(lambda said: said.member in gone and isinstance(said.message, Ready | Leaving | EndAsked))

    def messages(self) -> list[FromWorker]:
        return list(self._messages.values())


HOLD_SECONDS = 0.005
"""Seconds that reports wait for those from the node's other processes, so that a node sends one batch."""


class NodeAgent:
    """Serves the processes of a node.

    Args:
        session: name of this agent's session.
        heartbeat: seconds between heartbeats of a process.
        listener: socket that processes connect to.
        drain: called with the connection and message of a client that asks to drain workers.
        watch: of the GPUs of the node; a worker with a defective one is asked to leave, and not started on it.

    Attributes:
        is_holding: the last `batch` call held back reports, for at most `HOLD_SECONDS`.
    """

    def __init__(
        self,
        node: int,
        session: str,
        hub: Hub,
        heartbeat: float,
        tensor_parallel: int,
        listener: socket.socket,
        processes: LocalProcesses,
        drain: Callable[[Link, Drain], None] = lambda link, message: None,
        watch: GpuWatch | None = None,
    ) -> None:
        self._watch = watch or GpuWatch({}, 0.0, lambda: None)
        self._places: dict[Worker, str] = {}
        self.node, self.session, self._hub = node, session, hub
        self._pause, self._tensor_parallel, self._drain = heartbeat, tensor_parallel, drain
        self._processes = processes
        self._links: dict[str, Link] = {}
        self._standing, self._unanswered = StandingOrders(), UnansweredMessages()
        self._started: dict[Worker, AgentProcess] = {}
        self._to_start: dict[Worker, Start] = {}
        self._to_kill: dict[Worker, int] = {}
        self._asked_to_leave: dict[Worker, int] = {}
        self._beats: dict[str, Heartbeat] = {}
        self._beats_due = 0.0
        self.is_holding = False
        self._forget_batch()
        hub.listen(listener, self._accept)

    def _forget_batch(self) -> None:
        self._messages: list[FromWorker] = []
        self._held_since = 0.0
        self._ended: list[Ended] = []
        self._fresh_keys: dict[str, bytes] = {}

    # Processes.

    def _accept(self, connection: socket.socket) -> None:
        if not is_own_user(connection):
            connection.close()
            return
        link = Link(connection, ProcessMessage | Drain)
        link.owner = self.take
        self._hub.add(link)

    def take(self, link: Link, messages: list[Any] | None) -> None:
        for message in messages or ():
            match message:
                case Said() if link.name:
                    self._take_message(link.name, message)
                case Heartbeat() if link.name:
                    self._beats[link.name] = message
                case SetKey(name=name, value=value):
                    self._standing.keys[name] = self._fresh_keys[name] = value
                    self._hub.send(link, Values())
                case GetKeys(names=names):
                    self._hub.send(link, Values([self._standing.keys.get(name) for name in names]))
                case Join():
                    self._join(link, message)
                case Drain():
                    self._drain(link, message)

    def _join(self, link: Link, message: Join) -> None:
        worker = Worker.parse(split_member(message.member)[0])
        if self._incarnation(worker) != message.incarnation:
            return  # a killed process that has not noticed
        link.name = message.member
        self._links[message.member] = link
        for order in self._standing.messages():
            self._hub.send(link, order)

    def _incarnation(self, worker: Worker) -> int:
        started = self._started.get(worker)
        return -1 if started is None else started.incarnation

    def _take_message(self, member: str, said: Said) -> None:
        received = FromWorker(member, said.message, said.generation)
        self._held_since = self._held_since or time.monotonic()
        self._messages.append(received)
        self._unanswered.take(received)

    def leave(self) -> bool:
        """Tell the leader that all processes of the node leave; return whether none is left."""
        running = [worker for worker in self._started if self._processes.running(worker)]
        for worker in running:
            self._ask_to_leave(worker)
        return not running

    def _ask_to_leave(self, worker: Worker, reason: str = "") -> None:
        number = self._incarnation(worker)
        if self._asked_to_leave.get(worker) != number:
            self._asked_to_leave[worker] = number
            self._take_message(str(worker), Said(Leaving(number, reason)))

    # The leader.

    def hello(self) -> Hello:
        self._forget_batch()
        self._beats_due = 0.0  # the leader has heard none since the connection was lost
        self._fresh_keys = dict(self._standing.keys)
        return Hello(self.node, self.session, list(self._started.values()), self._unanswered.messages())

    def batch(self, hold: bool = False) -> Batch | None:
        """Return the events since the last call, or None; with `hold`, reports may wait for other processes."""
        self._collect_ends()
        for worker, place in self._places.items():
            if (defect := self._watch.defect(place)) and self._processes.running(worker):
                self._ask_to_leave(worker, defect)
        now = time.monotonic()
        is_due = now >= self._beats_due and bool(self._beats)
        is_urgent = bool(self._ended or self._fresh_keys or is_due)
        self.is_holding = hold and not is_urgent and self._may_hold(now)
        if self.is_holding or not (self._messages or is_urgent):
            return None
        beats = dict[str, Heartbeat]()
        if is_due:
            self._beats_due = now + self._pause
            beats, self._beats = self._beats, beats
        batch = Batch(self._messages, beats, self._ended, self._fresh_keys)
        self._forget_batch()
        return batch

    def _may_hold(self, now: float) -> bool:
        reports = sum(isinstance(said.message, StepReport) for said in self._messages)
        return 0 < reports == len(self._messages) < len(self._links) and now < self._held_since + HOLD_SECONDS

    def _kill_requested(self) -> None:
        for worker, number in list(self._to_kill.items()):
            if self._processes.running(worker) and self._incarnation(worker) <= number:
                self._processes.kill(worker)
            else:
                del self._to_kill[worker]

    def _collect_ends(self) -> None:
        self._kill_requested()
        gone = self._processes.take_ends()
        if gone:
            self._watch.check()  # before the leader starts them again
        while gone and self._hub.dispatch():
            pass  # their last messages count, and precede their end
        for worker, (how, lines) in gone.items():
            number = self._incarnation(worker)
            self._started[worker] = msgspec.structs.replace(self._started[worker], how=how, lines=lines)
            members = members_of([worker], self._tensor_parallel)
            self._unanswered.drop_processes(members)
            for member in members:
                self._beats.pop(member, None)
                if (link := self._links.pop(member, None)) is not None:
                    link.name = ""  # another process of the worker has ended, and this process is being killed
            self._ended.append(Ended(str(worker), number, how, lines))
        for worker, start in list(self._to_start.items()):
            if not (self._processes.running(worker) or self._watch.is_checking):
                del self._to_start[worker]
                self._start(start)

    def obey(self, order: Order, body: bytes | None = None) -> None:
        """Carry out a leader's order, or pass it to the processes; `body` is the encoded order."""
        match order:
            case Start(worker=name):
                worker = Worker.parse(name)
                if order.incarnation <= self._incarnation(worker):
                    return
                if self._processes.running(worker) or self._watch.is_checking:
                    self._to_kill[worker] = order.incarnation - 1
                    self._to_start[worker] = order
                else:
                    self._start(order)
            case Kill(worker=name, incarnation=incarnation):
                self._to_kill[Worker.parse(name)] = incarnation
                self._kill_requested()
            case Keys(keys=keys):
                self._standing.keys.update(keys)
            case _:
                self._pass_on(order, body)

    def _start(self, order: Start) -> None:
        worker = Worker.parse(order.worker)
        self._started[worker] = started = AgentProcess(order.worker, order.incarnation, order.generation)
        self._places[worker] = order.place
        if (defect := self._watch.defect(order.place)) is None:
            self._processes.start(order)
            return
        how = f"was not started: {defect}"
        self._started[worker] = msgspec.structs.replace(started, how=how)
        self._ended.append(Ended(order.worker, order.incarnation, how))

    def _pass_on(self, message: Any, body: bytes | None) -> None:
        if not isinstance(message, LeaderMessage):
            return
        self._standing.take(message)
        self._unanswered.drop_answered(message)
        body = body or msgspec.msgpack.encode(message)
        only = message.worker if isinstance(message, Leave) else None
        for member, link in self._links.items():
            if only is None or split_member(member)[0] == only:
                self._hub.send(link, body)
