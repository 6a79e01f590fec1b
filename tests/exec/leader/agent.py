"""The agents of the simulated world: real ones, whose processes and connections are simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from recycle.exec.agent.node_agent import NodeAgent
from recycle.exec.leader.leader import Leader
from recycle.exec.protocol import Batch, FromWorker, Hello, Join, LeaderMessage, Order, Rejected, Said, Start
from recycle.job.shape import Worker
from tests.exec.leader.process import KILLED, Process

if TYPE_CHECKING:
    from tests.exec.leader.world import World

LOOK_SECONDS = 0.2
_DECODER = msgspec.msgpack.Decoder(LeaderMessage)


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
        world.after(world.draw(0.0, 2.0), lambda: world.lose_agent(self))
        world.after(world.draw(0.0, 2.0), lambda: self.agent.disconnect(self))


class _Link:
    """The connection of a member of a worker's process to the agent."""

    def __init__(self, process: Process, is_first: bool) -> None:
        self.process, self.is_first, self.name = process, is_first, ""


class _Machine:
    """Stands for `Hub` and `LocalProcesses` of a node.

    Attributes:
        processes: worker -> its latest process.
        ended: how processes have ended that the agent has not seen yet.
    """

    def __init__(self, world: World, agent: Agent) -> None:
        self._world, self._agent = world, agent
        self.processes: dict[Worker, Process] = {}
        self.ended: dict[Worker, tuple[str, str]] = {}

    def listen(self, *_: object) -> None:
        pass

    def dispatch(self) -> bool:
        return False

    def send(self, link: _Link, message: bytes | LeaderMessage) -> None:
        if link.is_first:  # its process has all members
            reported = _DECODER.decode(message) if isinstance(message, bytes) else message
            self._world.in_order(link.process, lambda: link.process.hear(reported), self._world.draw(0.0, 0.01))

    def start(self, order: Start) -> None:
        self.processes[Worker.parse(order.worker)] = process = Process(self._world, order, self._agent)
        self._world.has_started(process)

    def running(self, worker: Worker) -> bool:
        return worker in self.ended or (worker in self.processes and self.processes[worker].is_alive)

    def kill(self, worker: Worker) -> None:
        self._world.after(self._world.draw(0.0, 0.1), lambda process=self.processes[worker]: process.end(KILLED))

    def take_ends(self) -> dict[Worker, tuple[str, str]]:
        gone, self.ended = self.ended, {}
        return gone


class Agent:
    """The agent of a node.

    Args:
        world: that it is in.
        node: number of the node.
        session: of this agent.

    Attributes:
        connection: to the leader; None as long as the agent looks for one.
        is_leaving: the node is to leave.
    """

    def __init__(self, world: World, node: int, session: str) -> None:
        self.world, self.node, self.is_alive = world, node, True
        self._machine: Any = _Machine(world, self)
        limits, tensor_parallel = world.job.membership, world.job.grid.tensor_parallel
        self._agent = NodeAgent(
            node, session, self._machine, limits.heartbeat, tensor_parallel, cast(Any, None), self._machine
        )
        self._links: dict[str, _Link] = {}
        self.connection: Connection | None = None
        self.is_leaving = False
        self._away_until = 0.0
        self._is_flushing = False
        self._look()

    @property
    def processes(self) -> dict[Worker, Process]:
        """Worker -> its latest process."""
        return cast(_Machine, self._machine).processes

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
        self.connection.up(self._agent.hello())

    def disconnect(self, connection: Connection) -> None:
        """This connection is gone."""
        if self.connection is connection:
            self.connection = None
            self._look()

    def lose_connection(self, seconds: float) -> None:
        """The connection to the leader breaks for some seconds."""
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
        """Carry out an order of the leader."""
        if not self.is_alive:
            return
        if not isinstance(order, Rejected):
            self._agent.obey(order)
            self._flush_soon()
        elif self.connection is not None:
            self.disconnect(self.connection)

    # Processes.

    def join(self, process: Process) -> None:
        """A process has connected."""
        process.has_joined = True
        for member in process.members:
            self._links[member] = link = _Link(process, member == process.name)
            self._agent.take(cast(Any, link), [Join(member, process.incarnation)])

    def hear(self, messages: FromWorker) -> None:
        """A process says something."""
        if self.is_alive:
            self._agent.take(cast(Any, self._links[messages.member]), [Said(messages.message, messages.generation)])
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self.world.after(self.world.draw(0.0, 0.005), self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if not self.is_alive:
            return
        self._send_batch()
        if self.is_leaving:
            has_left = self._agent.leave()
            self._send_batch()
            if has_left:
                self.is_alive = False
                self._then()

    def _send_batch(self) -> None:
        if (batch := self._agent.batch()) is not None and self.connection is not None:
            self.connection.up(batch)

    def ended(self, process: Process, how: str) -> None:
        """A process has ended."""
        if self.is_alive:
            self._machine.ended[process.worker] = how, ""
            self._flush_soon()

    def leave(self, then: Callable[[], None]) -> None:
        """The node is to leave: its processes do first.

        Args:
            then: called when it has.
        """
        self.is_leaving, self._then = True, then
        self._flush_soon()
