"""The backend `live` of torch.distributed: groups of the whole job, whose members may die and return.

A group has the rank and size of the full job all the time, so what Megatron's objects derive from groups stays valid.
Its collectives run over the live processes of the present generation (`Peers`):

    group               sums                                            gathers and broadcasts
    hosts of a stage    its live hosts; an average divides by all       the entry of a dead process is that of the first
    a pipeline          each rank once, by this pipeline's process or,  live host of the same stages
                        if it is dead, by the first live host of its
                        stages
    all processes       the live processes                              as above

A collective without a rule raises RunError, and names the call: it never returns as if it had worked. Before the first
generation a process answers alone: sums are its own values, gathers are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup, ReduceOp, Work  # type: ignore[attr-defined]

from recycle.errors import RunError
from recycle.exec.transport.base import TransportError
from recycle.job.shape import Worker
from recycle.megatron.peers import EarlierPeers, Peers
from recycle.megatron.transfer import receive_value, send_value
from recycle.megatron_versions import use_one_backend

BACKEND = "live"
_CALLS = 1 << 20
"""More collectives than a script makes in a step."""
MOST_BYTES = 1 << 20
"""Largest tensor that is gathered from every live process."""


class Scope(Enum):
    """Kind of a group, by its nominal members."""

    OWN = "this process"
    HOSTS = "all hosts of a stage"
    PIPELINE = "a pipeline"
    ENDS = "the ends of a pipeline"
    WORLD = "all processes"
    OTHER = "other processes"


class LiveWork(Work):
    """A collective under way; `finish` waits for it, once."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None


class LiveWorld:
    """All groups of this process.

    Args:
        pipelines, ranks: D and P of the job. Global rank r D + k is worker k.r, as in Megatron's default order.

    Attributes:
        is_alone: no generation has run yet.
        peers: of the present generation; None between generations.
        calling: the processes that make a call which is repeated as a whole (`complete`), while it runs.
        recover: called when a collective fails, or finds no generation, between iterations; returns in the next
            generation. None inside an iteration, which is repeated as a whole.
    """

    def __init__(self, worker: Worker, pipelines: int, ranks: int) -> None:
        self.worker, self._pipelines, self._ranks = worker, pipelines, ranks
        self.is_alone = True
        self.peers: Peers | None = None
        self.calling: Peers | None = None
        self.recover: Callable[[TransportError], None] | None = None
        self._firsts: dict[Worker, int] = {}
        self._step = 0
        self._counts: dict[int | None, int] = {None: 0, worker.rank: 0}
        self._last: dict[int | None, list[torch.Tensor]] = {}

    def begin_step(self, step: int) -> None:
        """The script comes to a step, and counts its collectives from there."""
        self._step = step
        for number, count in self._counts.items():
            self._counts[number] = max(count, step * _CALLS)

    def enter(self, peers: Peers, step: int) -> None:
        """Run collectives over these processes from now on; called in all of them at the start of a generation.

        Between iterations some processes may have completed a collective in which others were interrupted, and send
        them its result. Processes that joined later have no part in it. `step` is the generation's first.

        Raises TransportError.
        """
        own = self._firsts.get(self.worker, step)
        numbers = list(self._counts)
        rows = peers.gather(None, torch.tensor([own, *(self._counts[number] for number in numbers)]))
        self._firsts = {worker: int(row[0]) for worker, row in rows.items()}
        for place, number in enumerate(numbers, 1):
            counts = {
                worker: int(row[place]) for worker, row in rows.items() if number is None or worker.rank == number
            }
            for worker, count in counts.items():
                earlier = [other for other in counts if self._firsts[other] <= count // _CALLS]
                source = max(earlier, key=lambda other: counts[other], default=worker)
                if counts[source] <= count:
                    continue
                if self.worker == source:
                    send_value(peers.transport, worker, self._last.get(number, []))
                elif self.worker == worker:
                    self._last[number], _ = receive_value(peers.transport, source)
                    self._counts[number] = counts[source]
        self.is_alone, self.peers = False, peers

    def complete(
        self, number: int | None, exchange: Callable[[Peers | None], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Run a collective between iterations, through failures; return its result."""
        recover, count = self.recover, self._counts[number]
        assert recover is not None
        while self._counts[number] == count:
            self.recover = None
            try:
                if self.peers is None:
                    raise TransportError("the generation is over")
                self.calling = self.present
                self._last[number] = exchange(self.calling)
                self._counts[number] += 1
            except TransportError as error:
                recover(error)
            finally:
                self.recover, self.calling = recover, None
        return self._last[number]

    @property
    def present(self) -> Peers | None:
        """The processes that have come to the script's step; those that joined since begin with the next."""
        joined = [worker for worker, first in self._firsts.items() if first > self._step]
        return EarlierPeers(self.peers, self.worker, joined) if joined and self.peers is not None else self.peers

    @property
    def acting_rank(self) -> int:
        """0 or the last rank if this process stands in for it, as the first live host of its stages; or its own."""
        peers, last = self.present, self.size - 1
        if peers is None:
            return self.rank
        ends = {rank: peers.holder(*self.workers([rank])) for rank in (0, last)}
        return next((rank for rank, holder in ends.items() if holder == self.worker), self.rank)

    @property
    def rank(self) -> int:
        return self.worker.rank * self._pipelines + self.worker.pipeline

    @property
    def size(self) -> int:
        return self._pipelines * self._ranks

    def workers(self, global_ranks: Sequence[int]) -> list[Worker]:
        return [Worker(rank % self._pipelines, rank // self._pipelines) for rank in global_ranks]

    def scope(self, members: Sequence[Worker]) -> Scope:
        pipelines, ranks = ({member[axis] for member in members} for axis in (0, 1))
        if len(members) == 1:
            return Scope.OWN
        if len(members) == self.size:
            return Scope.WORLD if self._ranks > 1 else Scope.HOSTS
        if len(ranks) == 1 and len(members) == self._pipelines:
            return Scope.HOSTS
        if len(pipelines) == 1 and len(members) == self._ranks:
            return Scope.PIPELINE
        if len(pipelines) == 1 and ranks == {0, self._ranks - 1}:
            return Scope.ENDS
        return Scope.OTHER

    def join(self) -> None:
        """Initialize torch.distributed with this world; later groups have its backend, whatever they ask for."""
        if dist.is_initialized():
            raise RunError("torch.distributed is initialized already; the session does it: remove init_process_group")

        def create(options: Any, _: Any) -> LiveGroup:
            own = options.global_ranks_in_group or range(self.size)
            return LiveGroup(self, options.group_rank, self.workers(own))

        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
        dist.init_process_group(BACKEND, rank=self.rank, world_size=self.size, store=HashStore())
        use_one_backend()


_Group: Any = ProcessGroup  # its methods have overloads that torch.distributed does not use


class LiveGroup(_Group):  # type: ignore[misc]
    def __init__(self, world: LiveWorld, rank: int, members: Sequence[Worker]) -> None:
        super().__init__(rank, len(members))
        self._world, self._members, self._scope = world, list(members), world.scope(members)
        self._name = ""

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def shutdown(self) -> None:
        """The groups of a generation belong to its transport."""

    abort = shutdown

    # Collectives, as torch.distributed calls them.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        self._require_rule("all_reduce")
        if self._world.recover is None and not self._answers_alone and not isinstance(self._peers(), EarlierPeers):
            return LiveWork(self._sum(tensors, op, self._peers()))
        return self._run(
            "all_reduce", lambda peers: self._summed(tensors, op, peers), lambda sums: _copy(tensors, sums)
        )

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        def take(sums: list[torch.Tensor]) -> None:
            if self.rank() == opts.rootRank:
                _copy(tensors, sums)

        return self._run("reduce", lambda peers: self._summed(tensors, opts.reduceOp, peers), take)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        root = opts.rootRank
        return self._run(
            "broadcast",
            lambda peers: [self._entries("broadcast", tensor, peers)[root] for tensor in tensors],
            lambda sent: _copy(tensors, sent),
        )

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None) -> Work:
        (entries,), (tensor,) = outputs, tensors
        return self._run(
            "all_gather", lambda peers: self._entries("all_gather", tensor, peers), lambda found: _copy(entries, found)
        )

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        parts = list(output.view(self.size(), -1).unbind())
        return self.allgather([parts], [tensor.reshape(-1)])

    _allgather_base = all_gather_single

    def gather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any) -> Work:
        def take(entries: list[torch.Tensor]) -> None:
            if self.rank() == opts.rootRank:
                _copy(outputs[0], entries)

        return self._run("gather", lambda peers: self._entries("gather", tensors[0], peers), take)

    def barrier(self, opts: Any = None) -> Work:
        tensors = [torch.zeros(1)]
        return self._run("barrier", lambda peers: self._summed(tensors, ReduceOp.SUM, peers), lambda sums: None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # The rules.

    def _require_rule(self, call: str) -> None:
        if self._scope is Scope.OTHER:
            raise self._refusal(call)

    @property
    def _answers_alone(self) -> bool:
        return self._world.is_alone or self._scope is Scope.OWN

    def _peers(self) -> Peers:
        peers = self._world.calling or self._world.peers
        if peers is None:
            raise TransportError("the generation is over")
        return peers

    def _run(
        self,
        call: str,
        exchange: Callable[[Peers | None], list[torch.Tensor]],
        take: Callable[[list[torch.Tensor]], None],
    ) -> Work:
        """Get the result of a collective, and give it to `take`; `exchange` must not change its input."""
        self._require_rule(call)
        if self._answers_alone:
            take(exchange(None))
        elif self._world.recover is None:
            take(exchange(self._peers()))
        elif self._scope is Scope.ENDS:
            raise self._refusal(f"{call} between iterations")
        else:
            number = self._members[0].rank if self._scope is Scope.HOSTS else None
            take(self._world.complete(number, exchange))
        return LiveWork()

    def _summed(self, tensors: Sequence[torch.Tensor], op: Any, peers: Peers | None) -> list[torch.Tensor]:
        sums = [tensor.clone() for tensor in tensors]
        if isinstance(peers, EarlierPeers):
            for tensor in sums:
                tensor.copy_(self._combined_from(peers, tensor, op))
        elif peers is not None and (finish := self._sum(sums, op, peers)) is not None:
            finish()
        return sums

    def _sum(self, tensors: list[torch.Tensor], op: Any, peers: Peers) -> Callable[[], None] | None:
        scope, is_average = self._scope, op == ReduceOp.AVG
        is_large = sum(tensor.nbytes for tensor in tensors) > MOST_BYTES
        if scope is Scope.PIPELINE and not (is_large and op == ReduceOp.SUM):
            for tensor in tensors:
                tensor.copy_(_combined(self._entries("all_reduce", tensor, peers), op))
            return None
        once = scope in (Scope.PIPELINE, Scope.ENDS)
        if (once and op != ReduceOp.SUM) or (is_average and scope is not Scope.HOSTS):
            raise self._refusal(f"all_reduce with {_name(op)}")
        group = peers.transport.group_of(self._number(peers))
        if once and not peers.is_first_host(self._world.worker):
            for tensor in tensors:
                tensor.zero_()
        options: Any = dist.AllreduceOptions()
        options.reduceOp = ReduceOp.SUM if is_average else op
        works = [] if group is None else [group.allreduce([tensor], options) for tensor in tensors]

        def finish() -> None:
            if group is not None:
                peers.transport.await_collective(works, group)
            for tensor in tensors if is_average else ():
                tensor /= self.size()

        return finish

    def _combined_from(self, peers: Peers, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """What `_sum` computes, without a group of exactly these processes."""
        entries = peers.gather(self._number(peers), tensor)
        if self._scope is Scope.PIPELINE:
            is_large = tensor.nbytes > MOST_BYTES
            members = [Worker(0, member.rank) if is_large else member for member in self._members]
            return _combined([entries[peers.holder(member)] for member in members], op)
        if op == ReduceOp.AVG and self._scope is Scope.HOSTS:
            return _combined(list(entries.values()), ReduceOp.SUM) / int(self.size())
        return _combined(list(entries.values()), op)

    def _number(self, peers: Peers) -> int | None:
        if self._scope is Scope.HOSTS:
            return self._members[0].rank
        if self._scope is Scope.ENDS:
            if peers.tied is None:
                raise RunError(
                    "the embedding and the output layer share a weight, but the job has [model] tied = false; set it"
                    " to true"
                )
            return peers.tied
        return None

    def _entries(self, call: str, tensor: torch.Tensor, peers: Peers | None) -> list[torch.Tensor]:
        """The tensor of each member; the entry of a dead member comes from the first live host of its stages."""
        if peers is None:
            return [tensor] * self.size()
        if self._scope is Scope.ENDS:
            raise self._refusal(call)
        if tensor.nbytes > MOST_BYTES:
            raise self._refusal(f"{call} of {tensor.nbytes:,} bytes, more than {MOST_BYTES:,},")
        by_worker = peers.gather(self._members[0].rank if self._scope is Scope.HOSTS else None, tensor)
        return [by_worker[peers.holder(member)] for member in self._members]

    def _refusal(self, call: str) -> RunError:
        members = f"ranks {' '.join(map(str, dist.get_process_group_ranks(self)))}"
        return RunError(f"torch.distributed: {call} over {self._scope.value} ({members}) has no rule in a session")


def _refused(call: str) -> Callable[..., Any]:
    def refuse(self: LiveGroup, *_: Any, **__: Any) -> Any:
        if self._scope is Scope.OWN:
            return LiveWork()
        raise self._refusal(call)

    return refuse


for _call in (
    *("scatter", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced"),
    *("allgather_coalesced", "all_gather_single_coalesced", "alltoall", "all_to_all_single", "alltoall_base"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "send", "recv", "recv_anysource"),
):
    setattr(LiveGroup, _call, _refused(_call))


def _copy(into: Sequence[torch.Tensor], entries: Sequence[torch.Tensor]) -> None:
    for tensor, entry in zip(into, entries, strict=True):
        tensor.copy_(entry.view_as(tensor))


_COMBINE: Mapping[Any, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


def _combined(entries: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    combine = next((function for known, function in _COMBINE.items() if op == known), None)
    if combine is None:
        raise RunError(f"torch.distributed: all_reduce with {_name(op)} has no rule here in a session")
    total = entries[0]
    for entry in entries[1:]:
        total = combine(total, entry)
    return total


def _name(op: Any) -> str:
    return next((name for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX") if op == getattr(ReduceOp, name)), str(op))
