"""Gloo transport: raw process groups on a store prefix of their own, one generation long.

One group joins all live workers for point-to-point transfers, one more per stage joins its hosts for the sum. No
global process group is made, so a generation ends by dropping objects, and megatron-core's own state is not touched.

Shutting this process's sockets is what wakes whoever is blocked in a gloo transfer, here and at the other end;
aborting a group does not. Sockets that were open before the generation (the clients of the store) are left alone, and
so are listening sockets, whose shutdown would end the process. Two waits are deaf to that now and then: forming a
group whose member died before it connected, and an all-reduce. They run in a thread of their own, which is left
behind when the generation is over; so are their groups, because freeing one would wait for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from recycle.exec.transport import Pending, TransportError, lane_places
from recycle.ir.instruction import Instruction, RecvActivation, RecvGradient, Transfer
from recycle.shape import Worker

POSTED_AHEAD = 2
"""Receives that are posted ahead per lane: enough to overlap, few enough to bound the buffers."""
OVER_SECONDS = 0.02
"""How often a wait that cannot be woken looks whether its generation is over."""
FORM_SECONDS = (0.001, 0.05)
"""How often a group that forms looks for its members: at first, and after a while."""
_STATE_TAG = 1 << 20
_LEFT_BEHIND: list[Any] = []
"""Groups with an all-reduce that never ended; kept, because freeing them would block this process."""


class GlooTransport:
    """Transport between processes over TCP.

    Args:
        store: a torch store client.
        prefix: what the generation's keys begin with.
        role: this worker's role in the plan.
        members: roles of all live workers, in the same order everywhere.
        hosts: stage -> roles of its live hosts, for the stages that this worker hosts.
        message: shape and type of an activation that crosses a stage boundary.
        timeout: seconds after which a wait gives up; the last resort.
        form_timeout: seconds that forming the groups may take.
        over: set when the generation is over.
        waiting: called with True before a wait on a peer and with False after it.

    Raises:
        TransportError: the groups did not form.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        role: Worker,
        members: Sequence[Worker],
        hosts: Mapping[int, Sequence[Worker]],
        message: tuple[tuple[int, ...], torch.dtype],
        *,
        timeout: float,
        form_timeout: float,
        over: threading.Event,
        waiting: Callable[[bool], None] = lambda _: None,
        address: str = "127.0.0.1",
    ) -> None:
        self._ranks = {member: rank for rank, member in enumerate(members)}
        self._message, self._waiting, self._over = message, waiting, over
        self._deaf = ThreadPoolExecutor(1)
        self._timeout = timedelta(seconds=timeout)
        self._sums: dict[int, Any] = {}
        wanted = {-1: (f"{prefix}/world", list(members))}
        wanted |= {stage: (f"{prefix}/stage{stage}", list(p)) for stage, p in sorted(hosts.items()) if len(p) > 1}
        patient = _FormingStore(store, over)
        groups = self._leave_when_over(
            lambda: {
                key: _group(patient, name, peers.index(role), len(peers), form_timeout, address)
                for key, (name, peers) in wanted.items()
            }
        )
        self._world = groups.pop(-1)
        self._sums.update(groups)
        for group in (self._world, *self._sums.values()):
            group._set_default_timeout(self._timeout)
        self._iteration = 0
        self._sent: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self._lanes: dict[Worker, list[Transfer]] = {}
        self._posted: dict[Transfer, Pending] = {}
        self._places: dict[Instruction, int] = {}

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        for sending, _ in self._sent.pop(iteration - 2, []):
            self._wait(sending)
        self._iteration = iteration
        self._places = lane_places(program)
        self._lanes, self._posted = {}, {}
        for instruction in program:
            if isinstance(instruction, RecvActivation | RecvGradient):
                self._lanes.setdefault(instruction.peer, []).append(instruction)
        for lane in self._lanes.values():
            lane.reverse()
            for _ in range(POSTED_AHEAD):
                self._post_next(lane)

    def _post_next(self, lane: list[Transfer]) -> None:
        if lane:
            instruction = lane.pop()
            self._posted[instruction] = self._post(instruction)

    def _post(self, instruction: Transfer) -> Pending:
        shape, dtype = self._message
        buffer = torch.empty(shape, dtype=dtype)
        tag = self._tag(instruction)
        receiving = self._try(partial(self._world.recv, [buffer], self._ranks[instruction.peer], tag))

        def pending() -> torch.Tensor:
            self._wait(receiving)
            return buffer

        return pending

    def send(self, instruction: Transfer, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        tag = self._tag(instruction)
        sending = self._try(partial(self._world.send, [tensor], self._ranks[instruction.peer], tag))
        self._sent.setdefault(self._iteration, []).append((sending, tensor))

    def _tag(self, instruction: Transfer) -> int:
        """Place in the lane and parity of the iteration: two iterations may be under way on a lane, never three."""
        return 2 * self._places[instruction] + self._iteration % 2

    def receive(self, instruction: Transfer) -> Pending:
        while instruction not in self._posted:
            self._post_next(self._lanes[instruction.peer])
        self._post_next(self._lanes[instruction.peer])
        return self._posted.pop(instruction)

    def reduce(self, stage: int, buffers: Sequence[torch.Tensor]) -> None:
        group = self._sums.get(stage)
        if group is None:
            return
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        for buffer in buffers:
            summing = self._try(partial(group.allreduce, [buffer], options))
            self._waiting(True)
            try:
                self._leave_when_over(summing.wait)
            except TransportError:
                _LEFT_BEHIND.append(group)
                raise
            finally:
                self._waiting(False)

    def send_state(self, peer: Worker, tensors: Sequence[torch.Tensor]) -> None:
        """Send `tensors` to a worker that joins."""
        for place, tensor in enumerate(tensors):
            tag = _STATE_TAG + place
            self._wait(self._try(partial(self._world.send, [tensor.detach()], self._ranks[peer], tag)))

    def receive_state(self, peer: Worker, tensors: Sequence[torch.Tensor]) -> None:
        """Fill `tensors` with what `peer` sends by `send_state`."""
        for place, tensor in enumerate(tensors):
            tag = _STATE_TAG + place
            self._wait(self._try(partial(self._world.recv, [tensor.detach()], self._ranks[peer], tag)))

    def close(self) -> None:
        self._posted, self._lanes, self._sent = {}, {}, {}
        self._world, self._sums = None, {}
        self._deaf.shutdown(wait=False)

    def _leave_when_over(self, action: Callable[[], Any]) -> Any:
        """The result of `action`, which runs in a thread; TransportError when it fails or the generation ends first."""
        running = self._deaf.submit(action)
        while True:
            try:
                return running.result(OVER_SECONDS)
            except TimeoutError:
                if self._over.is_set():
                    raise TransportError("the generation is over") from None
            except RuntimeError as error:
                raise TransportError(_first_line(error)) from None

    def _wait(self, pending: Any) -> None:
        self._waiting(True)
        try:
            self._try(pending.wait)
        finally:
            self._waiting(False)

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            raise TransportError(_first_line(error)) from None


class _FormingStore(Store):
    """The store that groups form on: the worker's own client, with waits that end when the generation is over.

    A client of its own would do too, but opening one looks its address up in the DNS with the interpreter lock held,
    which took 5 s where no name server answered, in the middle of a recovery.
    """

    def __init__(self, client: Any, over: threading.Event) -> None:
        super().__init__()
        self._client, self._over = client, over

    def set(self, key: str, value: str) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._client.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._client.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._client.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        pause, longest = FORM_SECONDS
        while not self._client.check(keys):
            if self._over.is_set() or time.monotonic() > deadline:
                raise RuntimeError(f"waited for {keys[0]} in vain")
            time.sleep(pause)
            pause = min(1.5 * pause, longest)


def _group(store: Any, name: str, rank: int, size: int, timeout: float, address: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout)
    return gloo(PrefixStore(name, store), rank, size, options)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def open_sockets() -> dict[str, int]:
    """The sockets of this process: identity -> file descriptor."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def shut_sockets(keep: set[str], peers: Collection[tuple[str, int]] = ()) -> int:
    """Shut every connected socket of this process but those in `keep` or connected to `peers`; returns how many."""
    shut = 0
    for identity, descriptor in open_sockets().items():
        if identity in keep:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[:2] in peers:
                continue
            connection.shutdown(socket.SHUT_RDWR)
            shut += 1
    return shut
