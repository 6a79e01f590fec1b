"""What one stage of a job takes and holds on this machine; and, between processes, what a transfer and a sum take.

Runs as a module in child processes of the profiler (profiler.py): one after the other through all stages, so that no
measurement disturbs another, or one process per peer for what takes several. The request is a JSON line on standard
input, figures are JSON lines on standard output.

Times are those of the instructions as a worker runs them: on a GPU the device is waited for before and after. Bytes are
the allocator's on a GPU; on a CPU, which keeps no such account, those of the storages that autograd and the store of
weight gradients hold. They are what a second micro-batch adds to a first: parameters and constants are no part of it.

Limits: one micro-batch at a time, with nothing else on the machine: workers that share cores or a memory bus take
longer. The messages that come in are random; no kernel here depends on what is in them.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch
from msgspec import Struct

from recycle.child import serve
from recycle.exec.membership.launcher_store import LauncherStore
from recycle.exec.model.build import build_stages
from recycle.exec.model.emulated import EmulatedStage
from recycle.exec.model.stage import MegatronStage
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.exec.transport.transports import ANYWHERE, transport_named
from recycle.exec.worker.updates import Updates
from recycle.ir.kinds import ValueKind
from recycle.job import Job, price
from recycle.sections import MembershipSection
from recycle.shape import MicroBatch, Worker

WARM_UP = 3
"""Rounds that do not count: first calls allocate, choose kernels and fill caches."""
ONE, OTHER = MicroBatch(0, 0), MicroBatch(0, 1)


class StageFigures(Struct, frozen=True):
    """Of one stage.

    Attributes:
        seconds: `forward`, `backward_input`, `backward_weight`, `backward` (whole) and `step` -> one per repeat.
        message, activation, stash, static: bytes of a message; held from F to I; between I and W; always.
        gradients: bytes of each gradient buffer that a reduction sums, and whether its entries have 8 bytes.
    """

    stage: int
    seconds: dict[str, list[float]]
    message: int
    activation: float
    stash: float
    static: float
    gradients: tuple[tuple[int, int], ...]


class PeerRequest(Struct, frozen=True):
    """Be one of `peers` processes at the store; the first two exchange messages, all sum buffers.

    Attributes:
        messages: bytes of the messages to exchange.
        sums: buffers to sum together, by bytes and bytes of an entry.
    """

    rank: int
    peers: int
    port: int
    messages: list[int]
    sums: list[tuple[tuple[int, int], ...]]
    repeats: int
    timeout: float


class PeerFigures(Struct, frozen=True):
    """Seconds: of a message of each size, one way; of each sum. Medians."""

    messages: list[float]
    sums: list[float]


class Subject:
    """A stage, freshly built, with what it takes to measure it.

    Args:
        job: that it is a part of.
        index: the stage.
    """

    def __init__(self, job: Job, index: int) -> None:
        self.stage, self._job = build_stages(job, [index])[index], job
        self._device = self.stage.state_tensors()[0].device
        self._generator = torch.Generator().manual_seed(index)

    def activation(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """What the stage before would send; None where there is none."""
        return None if self.stage.index == 0 else self._random(1.0)

    def gradient(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """What the stage behind would send; None where there is none."""
        return None if self.stage.index == self._job.shape.stages - 1 else self._random(1e-3)

    def _random(self, deviation: float) -> torch.Tensor:
        shape, dtype = self.stage.message_spec()
        return (deviation * torch.randn(shape, generator=self._generator)).to(self._device, dtype)

    def held(self) -> tuple[float, float]:
        """Bytes that one micro-batch holds from F to I, and between I and W."""
        self.stage.begin_iteration(0)
        measure = self._held_by_allocator if self._device.type == "cuda" else self._held_by_tensors
        found = measure()
        self.stage.begin_iteration(0)
        return found

    def _held_by_allocator(self) -> tuple[float, float]:
        def grows(action: Callable[[MicroBatch], object]) -> float:
            before = torch.cuda.memory_allocated(self._device)
            action(OTHER)
            return float(torch.cuda.memory_allocated(self._device) - before)

        self._forward(ONE)
        held = grows(self._forward)
        self._backward_input(ONE)
        return held, held + grows(self._backward_input)

    def _held_by_tensors(self) -> tuple[float, float]:
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        after = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for micro_batch in (ONE, OTHER):
                saved += self._forward(micro_batch)
                after.append(storage_bytes(saved))
        saved.clear()
        for micro_batch in (ONE, OTHER):
            self._backward_input(micro_batch)
            assert isinstance(self.stage, MegatronStage)
            saved += self.stage.held_for_weights(micro_batch)
            after.append(storage_bytes(saved))
        return after[1] - after[0], after[3] - after[2]

    def _forward(self, micro_batch: MicroBatch) -> list[torch.Tensor]:
        ends = [self.activation(micro_batch)]
        ends.append(self.stage.forward(micro_batch, ends[0]))
        return [tensor for tensor in ends if tensor is not None]

    def _backward_input(self, micro_batch: MicroBatch) -> None:
        self.stage.backward_input(micro_batch, self.gradient(micro_batch))

    def static(self) -> float:
        """Bytes of parameters and optimizer state, twice where a step may be undone; of the sum of gradients; and of
        their mean in fp32."""
        state = [tensor.nbytes for tensor in self.stage.state_tensors()]
        sums = sum(tensor.nbytes for tensor in (*self.stage.gradient_buffers(), *self.stage.tied_buffers()))
        return float(sum(state) * (2 if self._job.planner.staggered else 1) + sums + state[0])

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class EmulatedSubject(Subject):
    """A stage that takes its profile's times; its bytes are the profile's too."""

    stage: EmulatedStage

    def activation(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        return self.stage.incoming(ValueKind.ACTIVATION, micro_batch)

    def gradient(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        return self.stage.incoming(ValueKind.INPUT_GRADIENT, micro_batch)

    def held(self) -> tuple[float, float]:
        activation = self._of_profile("activation")
        return activation, activation * price(self._job).prices.weight_stash

    def static(self) -> float:
        return self._of_profile("static")

    def _of_profile(self, name: str) -> float:
        return price(self._job).prices.per_stage(name, self._job.shape.stages)[self.stage.index]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> float:
    """Bytes of the storages below `tensors`, each once."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return float(sum(sizes.values()))


def measure_stage(job: Job, index: int, repeats: int) -> StageFigures:
    """Times and bytes of a stage."""
    measured = EmulatedSubject(job, index) if job.model.kind == "emulated" else Subject(job, index)
    stage, updates = measured.stage, Updates({index: measured.stage})
    seconds: dict[str, list[float]] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        measured.wait()
        began = time.perf_counter()
        yield
        measured.wait()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    held = measured.held()
    for iteration in range(WARM_UP + repeats):
        with timed("clear"):
            stage.begin_iteration(iteration)
        activation, gradient = measured.activation(ONE), measured.gradient(ONE)
        with timed("forward"):
            stage.forward(ONE, activation)
        with timed("backward_input"):
            stage.backward_input(ONE, gradient)
        with timed("backward_weight"):
            stage.backward_weight(ONE)
        activation, gradient = measured.activation(OTHER), measured.gradient(OTHER)
        stage.forward(OTHER, activation)
        with timed("backward"):
            stage.backward(OTHER, gradient)
        with timed("update"):
            stage.gradient_norms_squared()
            if job.planner.staggered:
                updates.step_ahead(index, iteration)
            else:
                stage.step(iteration, 1.0)
    # What a stage does once per iteration besides the sum over its hosts counts as its step.
    seconds["step"] = [a + b for a, b in zip(seconds.pop("clear"), seconds.pop("update"), strict=True)]
    shape, dtype = stage.message_spec()
    return StageFigures(
        index,
        {name: each[WARM_UP:] for name, each in seconds.items()},
        torch.Size(shape).numel() * dtype.itemsize,
        *held,
        measured.static(),
        tuple((buffer.nbytes, buffer.element_size()) for buffer in stage.gradient_buffers()),
    )


def measure_peers(request: PeerRequest) -> PeerFigures:
    """This process's part of the exchange; what process 0 finds is the result."""
    peers = [Worker(k, 0) for k in range(request.peers)]
    me = peers[request.rank]
    store = LauncherStore.connect("127.0.0.1", request.port)
    seconds = request.timeout
    limits = MembershipSection(transport_timeout=seconds, dead_after=seconds, form_timeout=seconds)
    plugin = transport_named(ANYWHERE)(TransportSettings(store.torch_store, limits=limits))
    transport = plugin.open(GroupsOfGeneration("profile", me, peers, {0: peers}, ((1,), torch.float32)))
    messages = []
    for size in request.messages if request.rank < 2 else []:
        tensor = torch.zeros(max(1, size // 4), dtype=torch.float32)
        turn = partial(_exchange, transport, request.rank == 0, peers[1 - request.rank], tensor)
        messages.append(_median(turn, request.repeats) / 2)
    together = [torch.zeros(1)]
    sums = []
    for buffers in request.sums:
        tensors = [torch.zeros(size // each, dtype=_DTYPES[each]) for size, each in buffers]
        transport.reduce(0, together)
        sums.append(_median(partial(transport.reduce, 0, tensors), request.repeats))
    transport.reduce(0, together)  # nobody leaves before all have done
    return PeerFigures(messages, sums)


def _exchange(transport: GroupTransport, begins: bool, peer: Worker, tensor: torch.Tensor) -> None:
    """Send a message there and back."""
    turns = [transport.send_state, transport.receive_state]
    for turn in turns if begins else turns[::-1]:
        turn(peer, [tensor])


_DTYPES = {4: torch.float32, 8: torch.float64}


def _median(action: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(WARM_UP + repeats):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:])


def main(parent: str, kind: str) -> None:
    """Answer the request on standard input: a `PeerRequest`, or the text of a job and how often to time each stage."""
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
