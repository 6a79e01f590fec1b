"""Measures times and bytes of a job's stages on this machine, and transfers and sums between processes.

Runs as a module in child processes of the profiler (profiler.py): one process for all stages in turn, or one per peer.
The request is a JSON line on standard input; results are JSON lines on standard output. Limits: one micro-batch at a
time on an otherwise idle machine; workers that share cores or a memory bus take longer. Incoming messages are random.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch.distributed import FileStore  # type: ignore[attr-defined]

from recycle.child import serve
from recycle.exec.device import copy_stream_of
from recycle.exec.emulation import EmulatedStage
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage, on_host
from recycle.exec.model.state.layouts import Shards
from recycle.exec.profile.memory import allocated_by, capacity
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportSettings, gpu_or_cpu, transport_named
from recycle.exec.worker.step_state import StepState
from recycle.ir.kinds import ValueKind
from recycle.job import Job, price
from recycle.job.footprint import MESSAGES_UNDER_WAY
from recycle.job.sections import MembershipSection
from recycle.job.shape import MicroBatch, Worker
from recycle.plans.shards import owners_of

HOST_COPY = 1 << 25
"""Bytes of a copy to or from the host."""
WARM_UP = 3
"""Repeats that are discarded: first calls allocate, choose kernels and fill caches."""
FIRST, SECOND = MicroBatch(0, 0), MicroBatch(0, 1)


class StageFigures(Struct, frozen=True):
    """Figures of one stage.

    Attributes:
        seconds: `forward`, `backward_input`, `backward_weight`, `backward` (whole) and `step` -> one per repeat.
        activation, stash, static, workspace: as of `Footprint`.
        gradients: bytes of each reduced gradient buffer, and of an entry.
        capacity: bytes available to a worker on this machine.
        host_bandwidth: as of `Profile`.
        weights: of a sharded optimizer, bytes of the gathered live parameters, and of an entry.
        placement: parameter -> "I" or "W", the half of a split backward that gives its gradient.
    """

    stage: int
    seconds: dict[str, list[float]]
    message: int
    activation: float
    stash: float
    static: float
    workspace: float
    gradients: tuple[tuple[int, int], ...]
    capacity: float
    host_bandwidth: float | None = None
    weights: tuple[int, int] = (0, 1)
    placement: dict[str, str] = {}


class Footprint(NamedTuple):
    """Bytes of a micro-batch from F to I, and between I and W; permanent; and temporary for one instruction."""

    activation: float
    stash: float
    static: float
    workspace: float


class PeerRequest(Struct, frozen=True):
    """Request to be one of `peers` processes that form groups; the first two exchange messages, all sum buffers.

    Attributes:
        store: file that the groups form on.
        transport: to connect over.
        sums: buffers to sum together, by bytes and bytes of an entry.
        copies: owners of each shard of a sharded optimizer, one shard per peer; 0 for none.
        weights: parameters to gather, by bytes and bytes of an entry, if there are shards.
    """

    rank: int
    peers: int
    store: str
    transport: str
    messages: list[int]
    sums: list[tuple[tuple[int, int], ...]]
    repeats: int
    timeout: float
    copies: int = 0
    weights: list[tuple[int, int]] = []


class PeerFigures(Struct, frozen=True):
    """Median seconds of each message (one way), each sum, a minimal sum of as many buffers, and each gather."""

    messages: list[float]
    sums: list[float]
    latencies: list[float]
    gathers: list[float]


class MeasuredStage:
    def __init__(self, job: Job, index: int) -> None:
        self._job, self._index = job, index
        self._device = gpu_or_cpu()
        built = allocated_by(self._build, self._device)
        self._static = float(built.kept)
        stream = copy_stream_of(self._device)
        self._updates = StepState({index: self.stage}, is_on_host=job.train.undo == "host", stream=stream)
        self._generator = torch.Generator().manual_seed(index)

    def _build(self) -> None:
        self.stage = build_stages(self._job, [self._index])[self._index]
        if isinstance(shards := self.stage.layout, Shards):  # each host has as many
            count, copies = self._job.shape.pipelines, self._job.train.optimizer_copies
            shards.own([number for number in shards.all_numbers if number % count < copies])
            shards.settled()

    def activation(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """The message from the previous stage; None on the first."""
        return None if self.stage.index == 0 else self._random(1.0)

    def gradient(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """The message from the next stage; None on the last."""
        return None if self.stage.index == self._job.shape.stages - 1 else self._random(1e-3)

    def _random(self, deviation: float) -> torch.Tensor:
        shape, dtype = self.stage.message_spec()
        return (deviation * torch.randn(shape, generator=self._generator)).to(self._device, dtype)

    def forward(self, micro_batch: MicroBatch) -> None:
        self.stage.forward(micro_batch, self.activation(micro_batch))

    def backward_input(self, micro_batch: MicroBatch) -> None:
        self.stage.backward_input(micro_batch, self.gradient(micro_batch))

    def backward(self, micro_batch: MicroBatch) -> None:
        self.stage.backward(micro_batch, self.gradient(micro_batch))

    def update(self, iteration: int) -> None:
        """Run the end of an iteration, except the sum over the stage's hosts."""
        for _ in self.stage.layout.reduced(self.stage):
            pass
        if self._job.planner.staggered:
            self._updates.step_ahead(self._index, iteration)
        else:
            self.stage.step(iteration, 1.0)

    def footprint(self) -> Footprint:
        """Memory of the stage, measured on the second micro-batch, as the first allocates persistent memory."""
        actions = (self.forward, self.backward_input, self.stage.backward_weight, self.forward, self.backward)
        self.stage.begin_iteration(0)
        for action in actions:
            action(FIRST)
        forward, inputs, weights, _, whole = (allocated_by(partial(action, SECOND), self._device) for action in actions)
        kept = allocated_by(partial(self.update, 0), self._device).kept
        update = allocated_by(partial(self.update, 1), self._device)
        activation, stash = forward.kept, forward.kept + inputs.kept
        held = max(activation, stash) if self._job.planner.decoupled else activation
        recomputed = held - activation
        workspace = [forward.peak - activation, whole.peak - recomputed, update.peak]
        if self._job.planner.decoupled:
            workspace += [inputs.peak - recomputed, weights.peak]
        message = message_bytes(self.stage)
        return Footprint(activation, stash, self._static + kept, max(workspace) + MESSAGES_UNDER_WAY * message)

    def host_bandwidth(self, repeats: int) -> float | None:
        """Bytes per second of copies to the host and, at the same time, back; on a CPU they take turns."""
        away, back = copy_stream_of(self._device), copy_stream_of(self._device)
        here = torch.zeros(2, HOST_COPY, dtype=torch.uint8, device=self._device)
        there = on_host(here)

        def copy() -> None:
            away.copy(there[0], here[0])
            back.copy(here[1], there[1])
            away.settle()
            back.settle()

        self.wait()
        return HOST_COPY / _median(copy, repeats)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class MeasuredEmulatedStage(MeasuredStage):
    stage: EmulatedStage

    def activation(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        return self.stage.incoming(ValueKind.ACTIVATION, micro_batch)

    def gradient(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        return self.stage.incoming(ValueKind.INPUT_GRADIENT, micro_batch)

    def footprint(self) -> Footprint:
        activation = self._of_profile("activation")
        stash = activation * price(self._job).prices.weight_stash
        return Footprint(activation, stash, self._of_profile("static"), self._of_profile("workspace"))

    def host_bandwidth(self, repeats: int) -> float | None:
        return price(self._job).prices.scaled(self._job.model.seconds_per_unit).host_bandwidth

    def _of_profile(self, name: str) -> float:
        return price(self._job).prices.per_stage(name, self._job.shape.stages)[self.stage.index]


def message_bytes(stage: Stage) -> int:
    """Bytes of an activation that crosses a boundary of the stage."""
    shape, dtype = stage.message_spec()
    return torch.Size(shape).numel() * dtype.itemsize


def measure_stage(job: Job, index: int, repeats: int) -> StageFigures:
    measured = MeasuredEmulatedStage(job, index) if job.model.kind == "emulated" else MeasuredStage(job, index)
    stage = measured.stage
    seconds: dict[str, list[float]] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        measured.wait()
        began = time.perf_counter()
        yield
        measured.wait()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    footprint = measured.footprint()
    for iteration in range(WARM_UP + repeats):
        with timed("clear"):
            stage.begin_iteration(iteration)
        activation, gradient = measured.activation(FIRST), measured.gradient(FIRST)
        with timed("forward"):
            stage.forward(FIRST, activation)
        with timed("backward_input"):
            stage.backward_input(FIRST, gradient)
        with timed("backward_weight"):
            stage.backward_weight(FIRST)
        activation, gradient = measured.activation(SECOND), measured.gradient(SECOND)
        stage.forward(SECOND, activation)
        with timed("backward"):
            stage.backward(SECOND, gradient)
        with timed("update"):
            measured.update(iteration)
    # A stage's other work once per iteration counts as its step.
    seconds["step"] = [a + b for a, b in zip(seconds.pop("clear"), seconds.pop("update"), strict=True)]
    return StageFigures(
        index,
        {name: each[WARM_UP:] for name, each in seconds.items()},
        message_bytes(stage),
        *footprint,
        tuple((buffer.nbytes, buffer.element_size()) for buffer in stage.gradient_buffers()),
        capacity(job, job.shape.chunks * sum(tensor.nbytes for tensor in stage.state_tensors())),
        measured.host_bandwidth(repeats),
        _size_of(stage.layout.gathered()),
        dict(stage.placement()),
    )


def _size_of(parts: Sequence[torch.Tensor]) -> tuple[int, int]:
    return sum(part.nbytes for part in parts), max((part.element_size() for part in parts), default=1)


def measure_peers(request: PeerRequest) -> PeerFigures:
    """Run this process's part of the exchange; process 0's figures are the result."""
    peers = [Worker(k, 0) for k in range(request.peers)]
    role = peers[request.rank]
    keys = FileStore(request.store, request.peers)
    seconds = request.timeout
    limits = MembershipSection(transport_timeout=seconds, dead_after=seconds, form_timeout=seconds)
    kind = transport_named(request.transport)
    device = kind.device(request.rank)
    plugin = kind(TransportSettings(keys, device, limits=limits))
    owners = {0: owners_of(peers, peers, request.copies)} if request.copies else {}
    transport = plugin.open(
        GroupsOfGeneration(
            "profile",
            role,
            peers,
            {0: peers},
            ((1,), torch.float32),
            lanes=[(peers[0], peers[1]), (peers[1], peers[0])],
            owners=owners,
        )
    )
    zeros = partial(torch.zeros, device=device)
    settle = transport.settle if plugin.progress.clock.runs_behind else lambda: None
    messages = []
    for size in request.messages if request.rank < 2 else []:
        tensor = zeros(max(1, size // 4), dtype=torch.float32)
        turn = partial(_exchange, transport, request.rank == 0, peers[1 - request.rank], tensor, settle)
        messages.append(_median(turn, request.repeats) / 2)
    barrier = [zeros(1)]
    sums, latencies, gathers = list[float](), list[float](), list[float]()
    for buffers in request.sums:
        tensors = [zeros(size // each, dtype=_DTYPES[each]) for size, each in buffers]
        minimal = [tensor[: request.peers if request.copies else 1].clone() for tensor in tensors]
        transport.reduce(0, barrier)
        if not request.copies:
            sums.append(_median(partial(transport.reduce, 0, tensors), request.repeats))
            latencies.append(_median(partial(transport.reduce, 0, minimal), request.repeats))
            continue
        for results, whole in ((sums, tensors), (latencies, minimal)):
            parts = [torch.tensor_split(tensor, request.peers) for tensor in whole]
            results.append(_median(partial(transport.reduce_scatter, 0, parts), request.repeats))
    for size, each in request.weights:
        weights = torch.tensor_split(zeros(size // each, dtype=_DTYPES[each]), request.peers)
        transport.reduce(0, barrier)
        gathers.append(_median(partial(transport.gather, 0, weights), request.repeats))
    transport.reduce(0, barrier)  # all processes stay until the last has finished
    return PeerFigures(messages, sums, latencies, gathers)


def _exchange(
    transport: GroupTransport, begins: bool, peer: Worker, tensor: torch.Tensor, settle: Callable[[], None]
) -> None:
    turns = [transport.send_state, transport.receive_state]
    for turn in turns if begins else turns[::-1]:
        turn(peer, [tensor])
    settle()


_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def _median(action: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(WARM_UP + repeats):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:])


def main(parent: str, kind: str) -> None:
    """Answer the request on standard input: a `PeerRequest`, or (job as text, number of repeats)."""
    requests, answers = serve(parent)
    line = requests.readline()
    if kind == "peer":
        answers.write(msgspec.json.encode(measure_peers(msgspec.json.decode(line, type=PeerRequest))) + b"\n")
        sys.stderr.flush()
        os._exit(0)  # threads of the transport still run
    text, repeats = msgspec.json.decode(line, type=tuple[str, int])
    job = Job.from_toml(text)
    torch.set_num_threads(job.train.threads)
    for index in range(job.shape.stages):
        answers.write(msgspec.json.encode(measure_stage(job, index, repeats)) + b"\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
