"""The agents of the simulated world, as those of recycle/exec/launch/agent.py are, and their connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from recycle.exec.agent.standing import LastWords, StandingOrders
from recycle.exec.leader.leader import Leader
from recycle.exec.protocol import (
    AgentProcess,
    Batch,
    Ended,
    FromWorker,
    Hello,
    Kill,
    Leave,
    Leaving,
    Order,
    Rejected,
    Start,
)
from recycle.job.shape import Worker
from tests.exec.leader.process import KILLED, Process

if TYPE_CHECKING:
    from tests.exec.leader.world import World

LOOK_SECONDS = 0.2


class Connection:
    """A connection of an agent to a leader. What is under way when it breaks is lost.

    Args:
        world: that it is in.
        agent: its end.
        leader: the other end.

    Attributes:
        is_cut: nothing arrives any more.
    """

    def __init__(self, world: World, agent: Agent, leader: Leader) -> None:
        self.agent, self.leader, self.is_cut = agent, leader, False
        self._world = world

    def up(self, message: Hello | Batch) -> None:
        """The agent says something."""

        def arrive() -> None:
            if not self.is_cut:
                self._world.receive(self, message)

        self._world.in_order((self, "up"), arrive)

    def down(self, order: Order) -> None:
        """The leader says something."""

        def arrive() -> None:
            if not self.is_cut and self.agent.connection is self:
                self.agent.obey(order)

        self._world.in_order((self, "down"), arrive)

    def cut(self) -> None:
        """The connection breaks; both ends notice it some time later, each by itself."""
        world = self._world
        self.is_cut = True
        world.after(world.draw(0.0, 2.0), lambda: world.part(self))
        world.after(world.draw(0.0, 2.0), lambda: self.agent.disconnect(self))


class Agent:
    """The agent of a node.

    Args:
        world: that it is in.
        node: number of the node.
        session: of this agent.

    Attributes:
        processes: worker -> its latest process.
        connection: to the leader; None as long as the agent looks for one.
        is_leaving: the node is to leave.
    """

    def __init__(self, world: World, node: int, session: str) -> None:
        self.world, self.node, self.session, self.is_alive = world, node, session, True
        self.processes: dict[Worker, Process] = {}
        self.connection: Connection | None = None
        self.is_leaving = False
        self._away_until = 0.0
        self._standing, self._last_words = StandingOrders(), LastWords()
        self._started: dict[Worker, AgentProcess] = {}
        self._to_start: dict[Worker, Start] = {}
        self._said: list[FromWorker] = []
        self._ended: list[Ended] = []
        self._is_flushing = False
        self._look()

    # The leader.

    def _look(self) -> None:
        """Connect to the leader, if there is one and this agent can reach it."""
        world = self.world
        if not self.is_alive or self.connection is not None:
            return
        if world.leader is None or world.now < self._away_until:
            world.after(world.draw(0.5, 1.5) * LOOK_SECONDS, self._look)
            return
        self.connection = Connection(world, self, world.leader)
        self._said, self._ended = [], []
        self.connection.up(Hello(self.node, self.session, list(self._started.values()), self._last_words.all()))

    def disconnect(self, connection: Connection) -> None:
        """This connection is gone."""
        if self.connection is connection:
            self.connection = None
            self._look()

    def lose_connection(self, seconds: float) -> None:
        """The connection to the leader breaks, and there is no other way to it for some seconds."""
        self._away_until = self.world.now + seconds
        for process in self.processes.values():
            process.is_blameless, process.is_to_end = False, True
        if self.connection is not None:
            self.connection.cut()

    def die(self) -> None:
        """The agent dies, and its processes with it."""
        self.is_alive = False
        for process in self.processes.values():
            process.end("killed with its agent")
        if self.connection is not None:
            self.connection.cut()

    def obey(self, order: Order) -> None:
        """Carry out an order of the leader, or pass it on to the processes."""
        if not self.is_alive:
            return
        match order:
            case Rejected():
                if (connection := self.connection) is not None:
                    self.disconnect(connection)
            case Start():
                worker = Worker.parse(order.worker)
                process = self.processes.get(worker)
                if process is not None and order.incarnation <= process.incarnation:
                    return
                if process is not None and process.is_alive:
                    self._to_start[worker] = order
                    self._kill(process)
                else:
                    self._start(order)
            case Kill(worker=name, incarnation=incarnation):
                process = self.processes.get(Worker.parse(name))
                if process is not None and process.incarnation <= incarnation:
                    self._kill(process)
            case _:
                self._pass_on(order)

    def _kill(self, process: Process) -> None:
        self.world.after(self.world.draw(0.0, 0.1), lambda: process.end(KILLED))

    def _start(self, order: Start) -> None:
        worker = Worker.parse(order.worker)
        self._started[worker] = AgentProcess(order.worker, order.incarnation, order.generation)
        self.processes[worker] = Process(self.world, order, self)
        self.world.has_started(self.processes[worker])

    def _pass_on(self, message: Order) -> None:
        self._standing.take(message)
        self._last_words.told(message)
        only = message.worker if isinstance(message, Leave) else None
        for process in self.processes.values():
            if process.has_joined and only in (None, process.name):
                self._tell(process, message)

    def _tell(self, process: Process, message: Order) -> None:
        self.world.in_order(process, lambda: process.hear(message), self.world.draw(0.0, 0.01))

    # Processes.

    def join(self, process: Process) -> None:
        """A process has connected."""
        process.has_joined = True
        for message in self._standing.messages():
            self._tell(process, message)

    def hear(self, said: FromWorker) -> None:
        """A process says something."""
        if self.is_alive:
            self._last_words.take(said)
            self._said.append(said)
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self.world.after(self.world.draw(0.0, 0.005), self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self.connection is not None and (self._said or self._ended):
            self.connection.up(Batch(self._said, {}, self._ended))
            self._said, self._ended = [], []

    def ended(self, process: Process, how: str) -> None:
        """A process has ended."""
        worker = process.worker
        if not self.is_alive or self.processes[worker] is not process:
            return
        self._started[worker] = msgspec.structs.replace(self._started[worker], how=how)
        self._last_words.ended(process.members)
        self._ended.append(Ended(process.name, process.incarnation, how))
        self._flush_soon()
        if (start := self._to_start.pop(worker, None)) is not None:
            self._start(start)
        if self.is_leaving:
            self._leave_if_empty()

    def leave(self, then: Callable[[], None]) -> None:
        """The node is to leave: its processes do first.

        Args:
            then: called when it has.
        """
        self.is_leaving, self._then = True, then
        for process in list(self.processes.values()):
            if process.is_alive:
                self.hear(FromWorker(process.name, Leaving(process.incarnation)))
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if self.is_alive and not any(process.is_alive for process in self.processes.values()):
            self._flush()
            self.is_alive = False
            self._then()
