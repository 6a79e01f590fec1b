"""Transport with a communicator of its own per lane: what NCCL needs, and any backend can do.

A lane is a directed pair of workers. On one communicator per lane only one worker sends and one receives, both in the
order of the checked schedule, so first in, first out cannot deadlock, whatever other lanes do; and a lane whose peer
is gone blocks no other. The communicators of one worker form one after the other, in an order that is the same
everywhere (by sender, then receiver, then the stages' sums by number): the lowest one that has not formed always has
both its members waiting for it, so forming cannot deadlock either. Each is between processes of one tensor rank; the
processes of a worker have one more, which forms first.

Communicators that form lazily would do so at the first transfer, in the order of the program and not in this one:
each is warmed up as soon as it stands, which also keeps that time out of the first iteration.

A wait on such a communicator only queues what follows behind it on the device, and the host goes on. Where others are
told that something is done, `settle` waits for the device. A receive occupies the device until its peer comes, and the
first use of a kernel may wait until the device is idle. So in the first iteration of a generation no receive is posted
before the program comes to it: in the order of the program no wait of one instruction can depend on a later one.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from recycle.errors import RunError
from recycle.exec.transport.base import TransportError
from recycle.exec.transport.forming_store import FormingStore
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport, Lane, first_line
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.instruction import Instruction, Send, Transfer
from recycle.shape import Worker


def lanes_of(role: Worker, program: Sequence[Instruction], joins: Collection[Lane] = ()) -> list[Lane]:
    """The lanes that a worker has a part in, sorted: those of its program and those by which states are copied.

    Args:
        joins: (source, joiner) of every state that is copied before the program runs.
    """
    lanes = {lane for lane in joins if role in lane}
    for instruction in program:
        if isinstance(instruction, Transfer):
            sends = isinstance(instruction, Send)
            lanes.add((role, instruction.peer) if sends else (instruction.peer, role))
    return sorted(lanes)


class LaneTransport(GroupTransport):
    """One worker's end of all its lanes and sums, in one generation; a subclass makes the communicators on `_store`."""

    def __init__(self, settings: TransportSettings, groups: GroupsOfGeneration) -> None:
        super().__init__(groups, settings.device)
        self._settings, self._patience = settings, settings.limits.transport_timeout
        self._store = FormingStore(settings.store, groups.over, settings.limits.form_timeout)
        self._tensor: Any = None
        self._first: int | None = None
        self._lock = threading.Lock()
        self._ordered: deque[tuple[Callable[[], bool], Any]] = deque()
        self._standing: list[Any] = []
        self._released = False
        self._ending: threading.Thread | None = None

    @abstractmethod
    def _make(self, name: str, rank: int, size: int) -> Any:
        """A torch backend of `size` ranks; waits for the others."""

    @abstractmethod
    def _abort(self, groups: Sequence[Any]) -> None:
        """End communicators together, which wakes whoever waits on them here; may take a while."""

    @abstractmethod
    def _mark(self) -> Callable[[], bool]:
        """A call that says whether the device has done what it was given to compute until now."""

    def _order(self, work: Any) -> None:
        mark = self._mark()
        with self._lock:
            self._forget_done()
            self._ordered.append((mark, work))
        work.wait()

    def _forget_done(self) -> None:
        while self._ordered and self._ordered[0][1].is_completed():
            self._ordered.popleft()

    def waits_for_peer(self) -> bool:
        """Whether the device has come to an operation that has not ended, because a peer has not come.

        The host may wait for the device then: at the end of its program, or because the device takes no more launches.
        """
        with self._lock, contextlib.suppress(RuntimeError):  # the main thread meets the same error
            self._forget_done()
            return bool(self._ordered) and self._ordered[0][0]()
        return False

    def form(self) -> None:
        groups, (tensor_rank, tensor_parallel) = self._groups, self._settings.tensor
        of_rank = f"t{tensor_rank}/" if tensor_parallel > 1 else ""
        if tensor_parallel > 1:
            self._tensor = self._stand(
                f"tensor{groups.role}",
                *(tensor_rank, tensor_parallel),
                lambda group: group.allgather([[self._token() for _ in range(tensor_parallel)]], [self._token()]),
            )
        for sender, receiver in lanes_of(groups.role, groups.program, groups.joins):
            name = f"{of_rank}lane{sender}>{receiver}"
            if sender == groups.role:
                self._outgoing[receiver] = self._stand(name, 0, 2, lambda lane: lane.send([self._token()], 1, 0)), 1
            else:
                self._incoming[sender] = self._stand(name, 1, 2, lambda lane: lane.recv([self._token()], 0, 0)), 0
        for stage, hosts in sorted(groups.hosts.items()):
            if len(hosts) > 1:
                rank = sorted(hosts).index(groups.role)
                self._sums[stage] = self._stand(
                    f"{of_rank}stage{stage}", rank, len(hosts), lambda group: group.allreduce([self._token()])
                )

    def _token(self) -> torch.Tensor:
        return torch.zeros(1, device=self._device)

    def _stand(self, name: str, rank: int, size: int, warm_up: Callable[[Any], Any]) -> Any:
        """A communicator, once all have come and something has passed over it."""
        try:
            return self._wait_in_thread(
                lambda: self._formed(name, rank, size, warm_up), seconds=self._settings.limits.form_timeout
            )
        except TransportError as error:
            raise TransportError(f"{name} did not form: {error}") from None

    def _formed(self, name: str, rank: int, size: int, warm_up: Callable[[Any], Any]) -> Any:
        group = self._make(f"{self._groups.name}/{name}", rank, size)
        with self._lock:
            released = self._released
            if not released:
                self._standing.append(group)
        if released:
            self._abort([group])
            raise RuntimeError("the generation is over")
        warm_up(group).wait()
        self._synchronize()
        return group

    def _posted_ahead(self) -> int:
        return 0 if self._iteration == self._first else super()._posted_ahead()

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        if self._first is None:
            self._first = iteration
        super().begin(program, iteration)

    def exchange(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        parts = [torch.empty_like(tensor) for _ in range(self._settings.tensor[1])]
        gathering = self._try(lambda: self._tensor.allgather([parts], [tensor]))

        def pending() -> list[torch.Tensor]:
            self._try(gathering.wait)
            return parts

        return pending

    def release(self) -> None:
        """Begin to end all communicators, in a thread of its own: the caller holds up the heartbeat of nobody."""
        with self._lock:
            self._released = True
            standing, self._standing = self._standing, []
            if standing:
                self._ending = threading.Thread(target=self._abort, args=(standing,), daemon=True)
                self._ending.start()

    def close(self) -> None:
        """End all communicators and wait until the device is idle: what was queued may still write to the state.

        An abort that hangs is found as a hang of this process.

        Raises:
            RunError: the device has failed, and only another process can use it again.
        """
        super().close()
        self._tensor = None
        with self._lock:
            self._ordered.clear()
        self.release()
        if self._ending is not None:
            self._ending.join()
        try:
            self._synchronize()
        except RuntimeError as error:
            raise RunError(f"{self._device} cannot be used any more by this process: {first_line(error)}") from None
