"""Memory of training besides activations: bytes per parameter, messages under way, and pieces of work.

The analytic model computes with these figures and the executor keeps to them; `benchmarks/memory.py` compares both.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle.job.sections import Sections

POSTED_AHEAD = 4
"""Receives that a worker posts ahead of its program, over all lanes.

Enough for two micro-batches from both neighbors, however many peers a plan has for a worker.
"""
MESSAGES_UNDER_WAY = POSTED_AHEAD + 1
"""Messages of a worker besides the one in use: received and waiting, plus one being sent."""
COMMUNICATORS = 16
"""Most communicators of a process, if its stages have few sets of hosts."""
COMMUNICATOR_BYTES = 64 << 20
"""Device memory of a NCCL communicator: buffers of about 10 MB per channel and peer."""
SHARD_PIECE = 1 << 16
"""Elements of a shard's sum or parameters that a host sends at a time."""
AWAITED = 2
"""Pieces that the first owner of a shard receives ahead from each peer while it adds their sums."""
USABLE = 0.9
"""Share of a device's memory to plan with, if the job leaves the limit to recycle."""
MEAN = 4
"""Bytes of an element of the mean gradient, of which one piece exists at a time."""
PRECISION_BYTES = {"fp32": 4, "bf16": 2}
"""`[train] precision` -> bytes of an element of weights, activations and messages."""
GRADIENT_BYTES = {"exact": 8, "fast": 4}
"""`[train] accumulation` -> bytes of an element of the gradient sum."""


@dataclass(frozen=True)
class Pieces:
    """Elements that a device processes at a time, so that no temporary tensor has the size of a stage.

    Attributes:
        added: elements of a gradient that is rounded and added to its sum.
        stepped: elements per optimizer call; only their mean gradient is kept for it.
        normed: elements of a gradient whose squares form one term of the norm; also the granularity of shards.
        widened: temporary bytes per added element for its conversion to the type of the sum.
    """

    added: int
    stepped: int
    normed: int
    widened: int


ON_CPU = Pieces(1 << 16, 1 << 19, 1 << 14, 8)
"""Small enough that several passes over a piece stay in the cache: half the time of whole matrices."""
ON_GPU = Pieces(1 << 21, 1 << 22, 1 << 20, 0)
"""Small enough for the second-level cache of an A100 or H100 (40 and 50 MB), so that device memory is read once.

An addend, its intermediate values and its part of an fp64 sum take 32 MiB. The mean gradient of a piece takes 16 MiB,
large enough to make launch costs negligible. Kernels widen elements as they read them.
"""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of one parameter on a worker that hosts it.

    Attributes:
        state: the fp32 parameter, Adam's two moments and, in bf16, the rounded parameter. With a sharded optimizer: the
            live parameters of the whole stage, and the rest of k of D shards.
        undo: states kept on the device: the one before a step that may be undone, and two that hosts compare.
    """

    state: float
    gradient: float
    undo: float

    @property
    def total(self) -> float:
        return self.state + self.gradient + self.undo


def parameter_bytes(job: Sections) -> ParameterBytes:
    """Return the bytes per parameter; 18 in bf16 if gradients are summed in fp32 and nothing is undone."""
    working, gradient = PRECISION_BYTES[job.train.precision], GRADIENT_BYTES[job.train.accumulation]
    is_rounded, is_sharded = job.train.precision != "fp32", job.train.sharded_optimizer
    live = working if is_rounded or is_sharded else 0  # else one of the 12
    state = live + (12 if is_rounded or not is_sharded else 8) * shards_held(job)
    kept = int(job.planner.staggered) + 2 * job.integrity.compares_states
    return ParameterBytes(state, gradient, kept * undone_bytes(job) if job.train.undo == "device" else 0)


def undone_bytes(job: Sections) -> float:
    """Return the bytes per parameter of the state before a step, on the device or the host.

    With a sharded optimizer only the owned shards are kept: a gather restores the live parameters.
    """
    rounded = PRECISION_BYTES[job.train.precision] if job.train.precision != "fp32" else 0
    return 12 * shards_held(job) if job.train.sharded_optimizer else 12 + rounded


def reducing_bytes(job: Sections, parameters: float) -> float:
    """Return the bytes that a host of a stage of `parameters` needs, besides its sums, to reduce shards."""
    if not job.train.sharded_optimizer:
        return 0.0
    hosts = job.shape.pipelines
    elements = min(AWAITED * SHARD_PIECE, parameters / hosts)
    return (hosts - 1) * elements * GRADIENT_BYTES[job.train.accumulation]


def shards_held(job: Sections) -> float:
    """Return the share of its stages' optimizer state that a host holds in a fault-free run: 1, or k of D shards."""
    return job.train.optimizer_copies / job.shape.pipelines if job.train.sharded_optimizer else 1.0


def moved_bytes(precision: str, accumulation: str) -> int:
    """Return the bytes of memory traffic to add one parameter's gradient of one micro-batch to its sum.

    The gradient is written and read once, the sum read and written. In fp32 a "fast" product is added directly.
    """
    product = 0 if (precision, accumulation) == ("fp32", "fast") else 2 * PRECISION_BYTES[precision]
    return product + 2 * GRADIENT_BYTES[accumulation]


def usable_bytes(memory: float) -> float:
    """Return the bytes of a GPU to plan with, besides its communicators."""
    return USABLE * memory - COMMUNICATORS * COMMUNICATOR_BYTES
