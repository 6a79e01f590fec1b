"""The processes of one machine in a run, and the objects that serve them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recycle.exec.agent.node_agent import HOLD_SECONDS, NodeAgent
from recycle.exec.gpus import GpuWatch, gpus_of
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.links import Hub, Link, listen_locally
from recycle.exec.processes.forkserver import ForkServer
from recycle.exec.processes.processes import LocalProcesses, Waker
from recycle.exec.protocol import Drain
from recycle.job.shape import Worker


class Node:
    """A machine of the run, ready to start its processes; `close` ends all of them.

    Args:
        places: positions of this machine, in the order of its GPUs.
        address: address of this machine for workers on other machines.
        node, session: number of the machine, and name of its agent.

    Attributes:
        hub: all connections.
        waker: ends a `wait` from other threads.
        socket: name of the socket that processes connect to.
    """

    def __init__(
        self,
        request: RunRequest,
        directory: RunDirectory,
        server: ForkServer,
        places: Sequence[Worker],
        *,
        address: str,
        node: int = 0,
        session: str = "",
        drain: Callable[[Link, Drain], None] = lambda link, message: None,
    ) -> None:
        self._heartbeat, tensor_parallel = request.job.membership.heartbeat, request.job.grid.tensor_parallel
        self.hub, self.waker = Hub(), Waker()
        listener, self.socket = listen_locally()
        specification = request.specification(directory, agent=self.socket, address=address)
        self.processes = LocalProcesses(server, specification, places, self.waker, tensor_parallel)
        self.processes.watch(self.hub.fileno())
        ranks = range(tensor_parallel)
        of_places = {
            str(place): gpus_of(specification.gpus, range(number * len(ranks), (number + 1) * len(ranks)))
            for number, place in enumerate(places)
        }
        self._watch = GpuWatch(of_places, request.job.cluster.gpu_checks, self.waker.wake)
        self.agent = NodeAgent(
            node, session, self.hub, self._heartbeat, tensor_parallel, listener, self.processes, drain, self._watch
        )

    def wait(self) -> None:
        """Wait for an event, or until heartbeats must be judged or held messages sent."""
        self.processes.wait(HOLD_SECONDS if self.agent.is_holding else self._heartbeat / 2)

    def close(self) -> None:
        self._watch.close()
        self.processes.end(patience=0.0)
        self.hub.close()
        self.waker.close()
