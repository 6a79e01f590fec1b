"""Processes whose groups are of the backend `live`, in generations that tests choose."""

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recycle import RecycleError, RunError, Shape, Worker
from recycle.exec.transport.base import TransportError
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.plugin import TransportSettings
from recycle.job.sections import MembershipSection
from recycle.megatron.live import LiveWorld
from recycle.megatron.peers import Peers
from tests.warm import ANSWER_SECONDS, WarmPool

SHAPE = Shape(2, 3, 2)
LIMITS = MembershipSection(transport_timeout=60.0, dead_after=30.0, form_timeout=20.0)
TIED = 3
VICTIM = Worker(1, 2)


class LiveWorkers(WarmPool):
    """One process per worker of `SHAPE`, by global rank, each with its groups; none is in a generation yet."""

    def __init__(self):
        super().__init__(SHAPE.worker_count, _make_worker)
        self.generation = 0

    def form(self, live: Sequence[Worker]):
        """Have these workers form the next generation."""
        self.generation += 1
        self.answers(live, "form", self.generation, list(map(str, live)))

    def answers(self, live: Sequence[Worker], *request) -> dict[Worker, Any]:
        """What these workers answer to a request, as `_make_worker` has it."""
        for worker in live:
            self.send(global_rank(worker), *request)
        answers = {worker: self.receive(global_rank(worker)) for worker in live}
        for worker, answer in answers.items():
            assert not hasattr(answer, "text"), f"{worker}: {answer}"
        return answers

    def sum_between_iterations(self, live: Sequence[Worker], interrupted: Worker) -> dict[Worker, Any]:
        """Have all sum their ranks, and form the next generation: one of them before it has the result."""
        self.generation += 1
        for worker in live:
            self.send(global_rank(worker), "interrupted", self.generation, list(map(str, live)), worker == interrupted)
        return {worker: self.receive(global_rank(worker)) for worker in live}

    def results_of_last_step(self, live: Sequence[Worker], joins: Worker) -> dict[Worker, dict[str, Any]]:
        """Form the next generation in the first collective after a step; a process joins for the step after."""
        self.generation += 1
        for worker in live:
            request = ("form",) if worker == joins else ("continued",)
            self.send(global_rank(worker), *request, self.generation, list(map(str, live)))
        return {worker: self.receive(global_rank(worker)) for worker in live}

    def kill_inside(self, call: str, live: Sequence[Worker]) -> dict[Worker, str]:
        """Kill `VICTIM` while the others are in a collective; return their errors."""
        survivors = [worker for worker in live if worker != VICTIM]
        for worker in survivors:
            self.send(global_rank(worker), "block", call)
        self.send(global_rank(VICTIM), "die")
        self.await_end(global_rank(VICTIM))
        self.store.set(f"{self.generation}/over", "1")
        return {worker: self.receive(global_rank(worker)) for worker in survivors}


def global_rank(worker: Worker) -> int:
    return worker.rank * SHAPE.pipelines + worker.pipeline


def _make_worker(store, rank: int):
    own = Worker(rank % SHAPE.pipelines, rank // SHAPE.pipelines)
    world, plugin = LiveWorld(own, SHAPE.pipelines, SHAPE.ranks), Gloo(TransportSettings(store, limits=LIMITS))
    world.join()
    groups = {"world": dist.group.WORLD, "own": dist.new_group([rank])}
    for r in range(SHAPE.ranks):
        hosts = dist.new_group([global_rank(Worker(k, r)) for k in range(SHAPE.pipelines)], backend="gloo")
        groups |= {"hosts": hosts} if r == own.rank else {}
    for k in range(SHAPE.pipelines):
        ranks = [global_rank(Worker(k, r)) for r in range(SHAPE.ranks)]
        for name, members in (("pipeline", ranks), ("ends", [ranks[0], ranks[-1]]), ("others", ranks[1:])):
            group = dist.new_group(members, backend="live")
            groups |= {name: group} if k == own.pipeline and rank in members else {}
    over = threading.Event()

    def form(generation, names):
        assert world.calling is None  # collectives while the generation forms are over its own processes
        plugin.end()
        over.clear()
        live = sorted(map(Worker.parse, names))
        hosts = {r: [worker for worker in live if worker.rank == r] for r in range(SHAPE.ranks)}
        hosts[TIED] = sorted(hosts[0] + hosts[SHAPE.ranks - 1])
        message = ((1,), torch.float32)
        transport = plugin.open(GroupsOfGeneration(f"g{generation}", own, live, hosts, message, over=over))
        world.enter(Peers(transport, live, TIED), generation)
        threading.Thread(target=_end_when_told, args=(store.clone(), generation, over, plugin), daemon=True).start()

    def block(call):
        try:
            CALLS[call](groups, float(rank)).wait()
        except TransportError as error:
            return f"TransportError: {error}"
        return "done"

    def interrupted(generation, names, fails):
        """Sum over all between two iterations; if it `fails`, as in a process that is interrupted before it returns."""
        calls = 0

        def exchange(peers):
            nonlocal calls
            calls += 1
            found = [sum(peers.gather(None, torch.tensor([float(rank)])).values(), torch.zeros(1))]
            if fails:
                raise TransportError("interrupted")
            return found

        world.recover = lambda error: form(generation, names)
        world.begin_step(generation - 1)
        (total,) = world.complete(None, exchange)
        world.recover = None
        if not fails:
            form(generation, names)
        return [float(total), calls]

    def continued(generation, names):
        """Make the collectives of a step whose generation is over, in the next one."""
        world.begin_step(generation - 1)
        world.peers, world.recover = None, lambda error: form(generation, names)
        found = _collect(groups, own, between=True)
        world.recover = None
        return found

    def save():
        """What a process that saves hears from the others that do; [] in other processes."""
        found = []
        world.calling = world.peers
        with world.only_savers() as number:
            if number is not None:
                names = [None] * dist.get_world_size()
                dist.all_gather_object(names, str(own))
                sent = [f"for {rank}" for rank in range(len(names))] if number == 0 else None
                dist.scatter_object_list(received := [None], sent)
                dist.barrier()
                found = [dist.get_rank(), names, *received]
        world.calling = None
        return found

    def step():
        """The error of a collective in an optimizer's step."""
        with world.stepping(), pytest.raises(RunError) as error:
            dist.all_reduce(torch.zeros(1), group=groups["hosts"])
        return str(error.value)

    def collect():
        return _collect(groups, own)

    def die():
        os.kill(os.getpid(), 9)

    requests = {call.__name__: call for call in (form, block, interrupted, continued, collect, save, step, die)}
    return lambda request, *arguments: requests[request](*arguments)


def _end_when_told(watch, generation: int, over: threading.Event, plugin: Gloo):
    try:
        watch.wait([f"{generation}/over"], timedelta(seconds=ANSWER_SECONDS))
    except RuntimeError:  # the test is over
        return
    over.set()
    plugin.wake()


CALLS = {
    "all_reduce of the hosts": lambda groups, value: dist.all_reduce(
        torch.full((100_000,), value), group=groups["hosts"], async_op=True
    ),
    "all_reduce of all": lambda groups, value: dist.all_reduce(torch.full((3,), value), async_op=True),
    "all_gather along the pipeline": lambda groups, value: dist.all_gather(
        [torch.zeros(1) for _ in range(SHAPE.ranks)], torch.ones(1), groups["pipeline"], async_op=True
    ),
}


def _collect(groups, own: Worker, between=False):
    """Collectives over each group, in an iteration or between two; worker k.r has the value 10 k + r."""
    value = 10.0 * own.pipeline + own.rank
    found = {}

    def reduced(name, op=dist.ReduceOp.SUM, count=1):
        tensor = torch.full((count,), value)
        dist.all_reduce(tensor, op, groups[name])
        assert torch.equal(tensor, tensor[:1].expand(count))
        return float(tensor[0])

    for name in ("world", "hosts", "pipeline", "own"):
        found[f"sum {name}"] = reduced(name)
        found[f"largest {name}"] = reduced(name, dist.ReduceOp.MAX)
        entries = [torch.zeros(1) for _ in range(dist.get_world_size(groups[name]))]
        dist.all_gather(entries, torch.tensor([value]), groups[name])
        found[f"gathered {name}"] = [float(entry) for entry in entries]
        dist.barrier(groups[name])
    found["mean hosts"] = reduced("hosts", dist.ReduceOp.AVG)
    found["large sum pipeline"] = reduced("pipeline", count=300_000)
    if "ends" in groups and not between:
        found["sum ends"] = reduced("ends")
    sent = torch.tensor([value])
    dist.broadcast(sent, dist.get_process_group_ranks(groups["pipeline"])[-1], groups["pipeline"])
    found["broadcast pipeline"] = float(sent)
    part = torch.zeros(1)
    dist.scatter(part, [torch.tensor([value])], dist.get_rank(), groups["own"])
    found["scattered own"] = float(part)
    objects = [None] * SHAPE.worker_count
    dist.all_gather_object(objects, str(own))
    found["objects"] = objects
    with dist.distributed_c10d._coalescing_manager(groups["hosts"], async_ops=True) as works:
        pair = [torch.tensor([value]), torch.tensor([-value])]
        for tensor in pair:
            dist.all_reduce(tensor, group=groups["hosts"])
    works.wait()
    found["coalesced hosts"] = [float(tensor) for tensor in pair]
    refused = {
        "reduce_scatter": lambda: dist.reduce_scatter_single(torch.zeros(1), torch.zeros(2), group=groups["hosts"]),
        "send": lambda: dist.isend(torch.zeros(1), 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.zeros(1), torch.ones(1), group=groups["own"]),
        "all_gather": lambda: dist.all_gather_single(torch.zeros(800_000), torch.zeros(400_000), groups["hosts"]),
    }
    if "others" in groups:
        refused["all_reduce"] = lambda: dist.all_reduce(torch.zeros(1), group=groups["others"])
    found["refused"] = {name: _error(call) for name, call in refused.items()}
    return found


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except RecycleError as error:
        return str(error)
    return ""
