"""The backend `live` of torch.distributed: groups of the whole job, whose members may die and return.

A group has the rank and size of the full job all the time, so what Megatron's objects derive from groups stays valid.
Its collectives run over the live processes of the present generation (`Peers`):

    group               sums                                            gathers and broadcasts
    hosts of a stage    its live hosts; an average divides by all       the entry of a dead process is that of the first
    a pipeline          each rank once, by this pipeline's process or,  live host of the same stages
                        if it is dead, by the first live host of its
                        stages
    all processes       the live processes                              as above

A worker is T processes that die together. A group is of one tensor rank of its workers, or of all T; then results are
combined over them, in the order of tensor ranks. The T ranks of one worker communicate by themselves (`TensorGroup`).

Megatron's distributed optimizer splits a stage's optimizer state among the hosts of an instance: a block of pipelines.
A dead member's entry is then that of the first live host of its stage that holds the same part.

    group               collective       result, inside an iteration
    an instance         all_reduce       each member once
    its hosts of a      reduce_scatter   this host's part of the sum over all live hosts of the stage
    stage               all_gather       each part from its first live holder
    holders of a part   all_reduce       unchanged, because reduce_scatter has summed all
    of a stage

Some live processes may save a checkpoint as a world of their own (`LiveWorld.only_savers`).

A collective without a rule raises RunError, and names the call: it never returns as if it had worked. Before the first
generation a process answers alone: sums are its own values, gathers are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ReduceOp, Work  # type: ignore[attr-defined]

from recycle.errors import RunError
from recycle.exec.model.tensor_group import AnyGroup, Pending, TensorGroup, combined, name_of
from recycle.exec.transport.base import TransportError
from recycle.job.shape import Worker
from recycle.megatron.peers import EarlierPeers, Peers
from recycle.megatron.transfer import pack, unpack
from recycle.megatron_versions import default_group, use_one_backend

BACKEND = "live"
_OWN_WORKER = -1
_CALLS = 1 << 20
"""More collectives than a script makes in a step."""
MOST_BYTES = 1 << 20
"""Largest tensor that is gathered from every live process; parts of an optimizer's state may be larger."""


class Scope(Enum):
    """Kind of a group, by its nominal members."""

    OWN = "this process"
    TENSOR = "the tensor ranks of a worker"
    HOSTS = "all hosts of a stage"
    PIPELINE = "a pipeline"
    ENDS = "the ends of a pipeline"
    INSTANCE = "an optimizer instance"
    HOLDERS = "the holders of a part of the optimizer's state"
    WORLD = "all processes"
    SAVERS = "the processes that save"
    OTHER = "other processes"


Place = tuple[Worker, int]
"""A process: its worker and tensor rank."""
_Key = tuple[int | None, bool]
"""Of collectives in one order: the rank of a pipeline whose hosts make them, None for all, `_OWN_WORKER` for the tensor
ranks of this worker; and whether all T ranks do."""


class LiveWorld:
    """All groups of this process.

    Args:
        pipelines, ranks: D and P of the job. Global rank (r D + k) T + t is tensor rank t of worker k.r, as in
            Megatron's default order.
        tensor: the tensor ranks of this worker; None if T = 1.

    Attributes:
        is_alone: no generation has run yet.
        peers: of the present generation; None between generations.
        calling: the processes that make a call which is repeated as a whole (`complete`), while it runs.
        recover: called when a collective fails, or finds no generation, between iterations; returns in the next
            generation. None inside an iteration, which is repeated as a whole.
    """

    def __init__(self, worker: Worker, pipelines: int, ranks: int, tensor: TensorGroup | None = None) -> None:
        self.worker, self._pipelines, self._ranks, self.tensor = worker, pipelines, ranks, tensor
        self.tensor_parallel: int = 1 if tensor is None else tensor.size()
        tensor_rank = 0 if tensor is None else tensor.rank()
        self.rank = (worker.rank * pipelines + worker.pipeline) * self.tensor_parallel + tensor_rank
        self.size = pipelines * ranks * self.tensor_parallel
        self.is_alone = True
        self.peers: Peers | None = None
        self.calling: Peers | None = None
        self.recover: Callable[[TransportError], None] | None = None
        self._firsts: dict[Worker, int] = {}
        self._step, self._is_stepping = 0, False
        keys = (*product((None, worker.rank), (False, True)), (_OWN_WORKER, True))
        self._counts: dict[_Key, int] = dict.fromkeys(keys, 0)
        self._last: dict[_Key, list[Tensor]] = {}

    def begin_step(self, step: int) -> None:
        """The script comes to a step, and counts its collectives from there."""
        self._step = step
        for key, count in self._counts.items():
            self._counts[key] = max(count, step * _CALLS)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Refuse collectives with other workers inside the block, where a failure would leave half a step."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def reachable(self, scope: Scope) -> Peers:
        """The processes that a collective runs over now. Raises TransportError between generations."""
        if self._is_stepping and scope is not Scope.TENSOR:
            raise RunError(
                f"the optimizer's step makes a collective over {scope.value}, which a failure could interrupt; use"
                " an optimizer that steps each process's parameters by itself"
            )
        peers = self.calling or self.peers
        if peers is None:
            raise TransportError("the generation is over")
        return peers

    def enter(self, peers: Peers, step: int) -> None:
        """Run collectives over these processes from now on; called in all of them at the start of a generation.

        Between iterations some processes may have completed a collective in which others were interrupted, and send
        them its result. Processes that joined later have no part in it. `step` is the generation's first.

        Raises TransportError.
        """
        own = self._firsts.get(self.worker, step)
        rows = peers.gather(None, torch.tensor([own, *self._counts.values()]))
        self._firsts = {worker: int(row[0]) for worker, row in rows.items()}
        for place, key in enumerate(list(self._counts), 1):
            number, _ = key
            counts = {
                worker: int(row[place]) for worker, row in rows.items() if number is None or worker.rank == number
            }
            for worker, count in counts.items():
                earlier = [other for other in counts if self._firsts[other] <= count // _CALLS]
                source = max(earlier, key=lambda other: counts[other], default=worker)
                if counts[source] <= count:
                    continue
                if self.worker == source:
                    peers.send(worker, self._last.get(key, []))
                elif self.worker == worker:
                    self._last[key] = peers.receive(source)
                    self._counts[key] = counts[source]
        if self.tensor is not None:
            self._agree_with_tensor_ranks(self.tensor)
        self.is_alone, self.peers = False, peers

    def _agree_with_tensor_ranks(self, tensor: TensorGroup) -> None:
        """Get results that only other tensor ranks have; where all T make a collective, they are the same."""
        for key in [key for key in self._counts if key[1]]:
            counts = [int(count) for count in tensor.gather_all(torch.tensor([self._counts[key]]))]
            source = counts.index(max(counts))
            if counts[source] > min(counts):
                own = pack(self._last.get(key, []) if tensor.rank() == source else [])
                sizes = [int(size) for size in tensor.gather_all(torch.tensor([len(own)]))]
                contents = tensor.gather_all(torch.nn.functional.pad(own, (0, max(sizes) - len(own))))
                self._last[key], self._counts[key] = unpack(contents[source][: sizes[source]]), counts[source]

    def complete(
        self, number: int | None, exchange: Callable[[Peers | None], list[Tensor]], by_all_tensor_ranks: bool = True
    ) -> list[Tensor]:
        """Run a collective between iterations, through failures; return its result."""
        key = number, by_all_tensor_ranks
        recover, count = self.recover, self._counts[key]
        assert recover is not None
        while self._counts[key] == count:
            self.recover = None
            try:
                if self.peers is None:
                    raise TransportError("the generation is over")
                self.calling = self.present
                self._last[key] = exchange(self.calling)
                self._counts[key] += 1
            except TransportError as error:
                self.calling = None  # the next generation has other groups
                recover(error)
            finally:
                self.recover, self.calling = recover, None
        return self._last[key]

    @contextmanager
    def only_savers(self) -> Iterator[int | None]:
        """Make one live host of each stage torch.distributed's default group inside the block.

        With a distributed optimizer it is one of each part. Yields this process's rank there; None in others, which
        make no collectives in the block.
        """
        peers = self.calling
        assert peers is not None
        savers = {worker for worker in peers.live if peers.holders(worker)[0] == worker}
        if self.worker not in savers:
            yield None
            return
        group = dist.new_group([rank for rank in range(self.size) if self.place(rank)[0] in savers])
        group.scope = Scope.SAVERS if group.size() > 1 else Scope.OWN
        self.calling = EarlierPeers(peers, self.worker, set(peers.live) - savers)
        try:
            with default_group(group):
                yield group.rank()
        finally:
            self.calling = peers
            dist.destroy_process_group(group)

    @property
    def present(self) -> Peers | None:
        """The processes that have come to the script's step; those that joined since begin with the next."""
        joined = [worker for worker, first in self._firsts.items() if first > self._step]
        return EarlierPeers(self.peers, self.worker, joined) if joined and self.peers is not None else self.peers

    @property
    def acting_rank(self) -> int:
        """0 or the last rank if this process stands in for it, as the first live host of its stages; or its own."""
        peers = self.present
        if peers is None:
            return self.rank
        for rank in (0, self.size - 1):
            worker, tensor_rank = self.place(rank)
            if peers.holder(worker) == self.worker and tensor_rank == self.rank % self.tensor_parallel:
                return rank
        return self.rank

    def place(self, global_rank: int) -> Place:
        position, tensor_rank = divmod(global_rank, self.tensor_parallel)
        return Worker(position % self._pipelines, position // self._pipelines), tensor_rank

    def scope(self, members: Sequence[Worker], tensor_ranks: int, size: int) -> Scope:
        """`members` without repetitions, of which a group of `size` processes has so many tensor ranks."""
        pipelines, ranks = ({member[axis] for member in members} for axis in (0, 1))
        if tensor_ranks not in (1, self.tensor_parallel) or size != len(members) * tensor_ranks:
            return Scope.OTHER
        if len(members) == 1:
            return Scope.OWN if tensor_ranks == 1 else Scope.TENSOR
        if len(members) == self._pipelines * self._ranks:
            return Scope.WORLD if self._ranks > 1 else Scope.HOSTS
        if len(ranks) == 1 and len(members) == self._pipelines:
            return Scope.HOSTS
        if len(pipelines) == 1 and len(members) == self._ranks:
            return Scope.PIPELINE
        if len(pipelines) == 1 and ranks == {0, self._ranks - 1}:
            return Scope.ENDS
        first, count = min(pipelines), len(pipelines)
        if len(ranks) in (1, self._ranks) and count > 1 and len(members) == count * len(ranks):
            if first % count == 0 and pipelines == set(range(first, first + count)):
                return Scope.INSTANCE
            step = self._pipelines // count
            if len(ranks) == 1 and pipelines == set(range(first % step, self._pipelines, step)):
                return Scope.HOLDERS
        return Scope.OTHER

    def join(self) -> None:
        """Initialize torch.distributed with this world; later groups have its backend, whatever they ask for."""
        if dist.is_initialized():
            raise RunError("torch.distributed is initialized already; the session does it: remove init_process_group")

        def create(options: Any, _: Any) -> LiveGroup:
            own = options.global_ranks_in_group or range(self.size)
            return LiveGroup(self, options.group_rank, list(map(self.place, own)))

        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
        dist.init_process_group(BACKEND, rank=self.rank, world_size=self.size, store=HashStore())
        use_one_backend()


class LiveGroup(AnyGroup):  # type: ignore[misc]
    def __init__(self, world: LiveWorld, rank: int, places: Sequence[Place]) -> None:
        super().__init__(rank, len(places))
        self._world, self._places, self._name = world, list(places), ""
        self._members = list(dict.fromkeys(worker for worker, _ in places))
        tensor_ranks = len({tensor_rank for _, tensor_rank in places})
        self.scope = world.scope(self._members, tensor_ranks, len(places))
        self._tensor = world.tensor if tensor_ranks > 1 else None
        ranks = {member.rank for member in self._members}
        self._rank_of_all = ranks.pop() if len(ranks) == 1 else None

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

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        self._require_rule("all_reduce")
        is_inside = self._world.recover is None and not self._answers_alone
        if is_inside and not isinstance(self._peers(), EarlierPeers):
            return Pending(self._sum(tensors, op, self._peers()))
        return self._run(
            "all_reduce", lambda peers: self._summed(tensors, op, peers), lambda sums: _copy(tensors, sums)
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        def take(sums: list[Tensor]) -> None:
            if self.rank() == opts.rootRank:
                _copy(tensors, sums)

        return self._run("reduce", lambda peers: self._summed(tensors, opts.reduceOp, peers), take)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        root = opts.rootRank
        return self._run(
            "broadcast",
            lambda peers: [self._entries("broadcast", tensor, peers)[root] for tensor in tensors],
            lambda sent: _copy(tensors, sent),
        )

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Work:
        (entries,), (tensor,) = outputs, tensors
        return self._run(
            "all_gather", lambda peers: self._entries("all_gather", tensor, peers), lambda found: _copy(entries, found)
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        parts = list(output.view(self.size(), -1).unbind())
        if self._is_instance_of_stage:
            if not self._answers_alone:  # else the other parts stay as they are
                self._gather_parts(output, tensor)
            return Pending()
        return self.allgather([parts], [tensor.reshape(-1)])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """`tensor` becomes the sum, and `output` may be a part of it."""
        if not self._answers_alone:
            if not self._is_instance_of_stage or self._world.recover is not None:
                raise self._refusal("reduce_scatter")
            self._sum_over_hosts([tensor], ReduceOp.SUM if opts is None else opts.reduceOp, self._peers())()
        part = tensor.view(self.size(), -1)[self.rank()].view_as(output)
        if part.data_ptr() != output.data_ptr():
            output.copy_(part)
        return Pending()

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work:
        def take(entries: list[Tensor]) -> None:
            if self.rank() == opts.rootRank:
                _copy(outputs[0], entries)

        return self._run("gather", lambda peers: self._entries("gather", tensors[0], peers), take)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        if self.scope is Scope.SAVERS:
            blocks = inputs[0] if inputs else []
            exchange = partial(self._scattered, outputs[0], blocks, self._places[opts.rootRank])
            return self._run("scatter", exchange, partial(_copy, outputs))
        if not self._answers_alone or not inputs:
            raise self._refusal("scatter")
        _copy(outputs, [inputs[0][AnyGroup.rank(self)]])
        return Pending()

    def barrier(self, opts: Any = None) -> Work:
        tensors = [torch.zeros(1)]
        return self._run("barrier", lambda peers: self._summed(tensors, ReduceOp.SUM, peers), lambda sums: None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # The rules.

    def _require_rule(self, call: str) -> None:
        if self.scope is Scope.OTHER:
            raise self._refusal(call)

    @property
    def _answers_alone(self) -> bool:
        return self._world.is_alone or self.scope is Scope.OWN

    def _peers(self) -> Peers:
        return self._world.reachable(self.scope)

    def _run(
        self, call: str, exchange: Callable[[Peers | None], list[Tensor]], take: Callable[[list[Tensor]], None]
    ) -> Work:
        """Get the result of a collective, and give it to `take`; `exchange` must not change its input."""
        self._require_rule(call)
        if self._answers_alone:
            take(exchange(None))
        elif self._world.recover is None:
            take(exchange(self._peers()))
        elif self.scope in (Scope.ENDS, Scope.INSTANCE, Scope.HOLDERS):
            raise self._refusal(f"{call} between iterations")
        else:
            own = {Scope.HOSTS: self._world.worker.rank, Scope.TENSOR: _OWN_WORKER}
            number = own.get(self.scope)
            take(self._world.complete(number, exchange, self._tensor is not None))
        return Pending()

    def _summed(self, tensors: Sequence[Tensor], op: Any, peers: Peers | None) -> list[Tensor]:
        sums = [tensor.clone() for tensor in tensors]
        if self.scope is Scope.TENSOR and peers is not None:
            self._sum_over_tensor_ranks(sums, op)
        elif isinstance(peers, EarlierPeers):
            for tensor in sums:
                tensor.copy_(self._combined_from(peers, tensor, op))
        elif peers is not None and (finish := self._sum(sums, op, peers)) is not None:
            finish()
        return sums

    def _sum(self, tensors: list[Tensor], op: Any, peers: Peers) -> Callable[[], None] | None:
        scope, is_average = self.scope, op == ReduceOp.AVG
        if scope is Scope.HOLDERS:
            return lambda: self._divide(tensors, is_average)
        is_large = sum(tensor.nbytes for tensor in tensors) > MOST_BYTES
        if scope is Scope.INSTANCE or (scope is Scope.PIPELINE and not (is_large and op == ReduceOp.SUM)):
            for tensor in tensors:
                tensor.copy_(combined(self._entries("all_reduce", tensor, peers), op))
            return None
        once = scope in (Scope.PIPELINE, Scope.ENDS)
        if (once and op != ReduceOp.SUM) or (is_average and scope is not Scope.HOSTS):
            raise self._refusal(f"all_reduce with {name_of(op)}")
        if once and not peers.is_first_host(self._world.worker):
            for tensor in tensors:
                tensor.zero_()
        return self._sum_over_hosts(tensors, op, peers)

    def _sum_over_hosts(self, tensors: list[Tensor], op: Any, peers: Peers) -> Callable[[], None]:
        is_average, number, host_side = op == ReduceOp.AVG, self._number(peers), peers.transport.host_side()
        is_on_host = number is None or any(tensor.device.type == "cpu" for tensor in tensors)
        transport = host_side if is_on_host else peers.transport
        group = transport.group_of(number)
        sums = [tensor.cpu() for tensor in tensors] if transport is host_side else tensors
        op = ReduceOp.SUM if is_average else op
        works = [] if group is None else [group.allreduce([tensor], _options(op)) for tensor in sums]

        def finish() -> None:
            if group is not None:
                transport.await_collective(works, group)
                _copy(tensors, sums)
            self._sum_over_tensor_ranks(tensors, op)
            self._divide(tensors, is_average)

        return finish

    def _sum_over_tensor_ranks(self, tensors: Sequence[Tensor], op: Any) -> None:
        if self._tensor is not None:
            self._tensor.allreduce(tensors, _options(op)).wait()

    def _divide(self, tensors: list[Tensor], is_average: bool) -> None:
        for tensor in tensors if is_average else ():
            tensor /= self.size()

    @property
    def _is_instance_of_stage(self) -> bool:
        return self.scope is Scope.INSTANCE and self._rank_of_all is not None

    def _gather_parts(self, output: Tensor, tensor: Tensor) -> None:
        """Fill `output`; exact, because each part is added to zeros, as integers."""
        if self._world.recover is not None:
            raise self._refusal("all_gather between iterations")
        peers, own = self._peers(), self._world.worker
        parts = torch.zeros_like(output)
        if peers.holders(own)[0] == own:
            parts.view(self.size(), -1)[self.rank()] = tensor.reshape(-1)
        self._sum_over_hosts([parts.view(torch.int32)], ReduceOp.SUM, peers)()
        output.copy_(parts)

    def _combined_from(self, peers: Peers, tensor: Tensor, op: Any) -> Tensor:
        """What `_sum` computes, without a group of exactly these processes."""
        entries = peers.gather(self._number(peers), tensor)
        if self._tensor is not None:
            parts = self._tensor.gather_all(torch.stack(list(entries.values())))
            entries = {
                worker: combined(column, op) for worker, column in zip(entries, zip(*parts, strict=True), strict=True)
            }
        if self.scope is Scope.PIPELINE:
            is_large = tensor.nbytes > MOST_BYTES
            members = [Worker(0, member.rank) if is_large else member for member in self._members]
            return combined([entries[peers.holder(member)] for member in members], op)
        if op == ReduceOp.AVG and self.scope is Scope.HOSTS:
            return combined(list(entries.values()), ReduceOp.SUM) / int(self.size())
        return combined(list(entries.values()), op)

    def _number(self, peers: Peers) -> int | None:
        if self.scope in (Scope.HOSTS, Scope.INSTANCE):
            return self._rank_of_all
        if self.scope is Scope.ENDS:
            if peers.tied is None:
                raise RunError(
                    "the embedding and the output layer share a weight, but the job has [model] tied = false; set it"
                    " to true"
                )
            return peers.tied
        return None

    def _entries(self, call: str, tensor: Tensor, peers: Peers | None) -> list[Tensor]:
        """The tensor of each member; the entry of a dead member comes from the first live host of its stages."""
        if peers is None:
            return [tensor] * self.size()
        if self.scope is Scope.ENDS:
            raise self._refusal(call)
        if self.scope is Scope.TENSOR and self._tensor is not None:
            return self._tensor.gather_all(tensor)
        if tensor.nbytes > MOST_BYTES and not (self._is_instance_of_stage or self.scope is Scope.SAVERS):
            raise self._refusal(f"{call} of {tensor.nbytes:,} bytes, more than {MOST_BYTES:,},")
        by_worker = peers.gather(self._number(peers), tensor)
        entries = [by_worker[peers.holder(member)] for member in self._members]
        if self._tensor is None:
            return entries
        parts = [part.unbind() for part in self._tensor.gather_all(torch.stack(entries))]
        return [parts[tensor_rank][self._members.index(worker)] for worker, tensor_rank in self._places]

    def _scattered(self, output: Tensor, blocks: Sequence[Tensor], root: Place, peers: Any) -> list[Tensor]:
        """The block of this process; the root's worker sends each other worker what the same tensor rank gets."""
        giver, source = root
        if self._world.worker != giver:
            return [peers.receive(giver)]
        if self._tensor is not None:
            count, shape = self._tensor.size(), (len(self._members), *output.shape)
            parts = [torch.stack(list(blocks[rank::count])) if blocks else output.new_empty(0) for rank in range(count)]
            shapes = [torch.Size(shape if rank == source else (0,)) for rank in range(count)]
            blocks = self._tensor.begin_exchange(parts, shapes)()[source].unbind()
        for worker, block in zip(self._members, blocks, strict=True):
            if worker != giver:
                peers.send(worker, block)
        return [blocks[self._members.index(giver)]]

    def _refusal(self, call: str) -> RunError:
        members = f"ranks {' '.join(map(str, dist.get_process_group_ranks(self)))}"
        is_transfer = call in ("send", "recv")
        remedy = "; run forwards and backwards by session.forward_backward" if is_transfer else ""
        what = f"{call} over {self.scope.value} ({members})"
        return RunError(f"torch.distributed: a session does not support {what}{remedy}")


def _refused(call: str) -> Callable[..., Any]:
    def refuse(self: LiveGroup, *_: Any, **__: Any) -> Any:
        raise self._refusal(call)

    return refuse


def _within_worker(name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """What the tensor ranks of a worker do by themselves inside an iteration; `otherwise` in other groups."""

    def call(self: LiveGroup, *arguments: Any, **named: Any) -> Any:
        if self.scope is not Scope.TENSOR or self._answers_alone or self._world.recover is not None:
            return otherwise(self, *arguments, **named)
        return getattr(self._world.tensor, name)(*arguments, **named)

    return call


for _call in ("allgather_coalesced", "alltoall", "send", "recv", "recv_anysource"):
    setattr(LiveGroup, _call, _refused(_call))
for _call, _alias in (
    ("allreduce", "allreduce_coalesced"),
    ("allgather", None),
    ("all_gather_single", "_allgather_base"),
    ("reduce_scatter", None),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("all_to_all_single", "alltoall_base"),
):
    _function = _within_worker(_call, vars(LiveGroup).get(_call) or _refused(_call))
    setattr(LiveGroup, _call, _function)
    setattr(LiveGroup, _alias or _call, _function)


def _coalesced(name: str) -> Callable[..., Any]:
    def call(self: LiveGroup, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, tensors, strict=True):
            getattr(self, name)(output, tensor, opts)
        return Pending()

    return call


for _call, _alias in (
    ("all_gather_single", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
):
    for _name in (f"{_call}_coalesced", _alias):
        setattr(LiveGroup, _name, _coalesced(_call))


def _options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def _copy(into: Sequence[Tensor], entries: Sequence[Tensor]) -> None:
    for tensor, entry in zip(into, entries, strict=True):
        tensor.copy_(entry.view_as(tensor))
