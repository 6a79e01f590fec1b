"""What training holds in memory besides activations: bytes of a parameter, of messages under way, of work in pieces.

The analytic model counts with these figures and the executor keeps to them; `benchmarks/memory.py` and
`tests/exec/profile/test_footprint.py` hold both against what torch allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle.job.sections import Sections

POSTED_AHEAD = 4
"""Receives of a worker that wait for their message before the program comes to them: the next ones of all lanes. Enough
for two micro-batches from both neighbours, and as few however many peers a plan brings a worker together with."""
MESSAGES_UNDER_WAY = POSTED_AHEAD + 1
"""Messages that a worker has beside those that it computes with: that wait to be read, and one that is being sent."""
SHARD_PIECE = 1 << 16
"""Elements of a shard's sum, or of its parameters, that a host sends at a time."""
AWAITED = 2
"""Pieces that the first owner of a shard awaits from each peer at a time, while it adds up their sums."""
USABLE = 0.9
"""Share of a device's memory that is planned with, where a job leaves that to recycle."""
MEAN = 4
"""Bytes of an element of the mean gradient, of which a piece exists at a time."""
PRECISION_BYTES = {"fp32": 4, "bf16": 2}
"""`[train] precision` -> bytes of an element of weights, activations and messages."""
GRADIENT_BYTES = {"exact": 8, "fast": 4}
"""`[train] accumulation` -> bytes of an element of the gradient sum."""


@dataclass(frozen=True)
class Pieces:
    """How many elements a device works on at a time, so that no temporary tensor has the size of a stage.

    Attributes:
        added: of a gradient that is rounded and added to its sum.
        stepped: by the optimizer; their mean gradient is the one thing that is kept for it.
        normed: of a parameter's gradient whose squares are one term of the norm, and the grain of shards.
        widened: bytes of an element of what is added that exist for a moment in the sum's own type.
    """

    added: int
    stepped: int
    normed: int
    widened: int


ON_CPU = Pieces(1 << 16, 1 << 19, 1 << 14, 8)
"""Several passes over a piece find it in the cache: half the time of whole matrices."""
ON_GPU = Pieces(1 << 21, 1 << 22, 1 << 20, 0)
"""An addend, what is made of it and its part of an fp64 sum are 32 MiB, which the second-level cache of an A100 or H100
(40 and 50 MB) holds, so that several passes over them move them through the device's memory once. The mean gradient of
a piece is 16 MiB; it is large enough that launches cost nothing. Kernels widen as they read."""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of one parameter on a worker that hosts it.

    Attributes:
        state: the fp32 parameter, Adam's two moments and, in bf16, the rounded one. With a sharded optimizer a host has
            the live parameters of its whole stage, and the rest of k of D shards.
        gradient: its gradient sum.
        undo: of states kept on the device: that before a step that may be taken back, and two that hosts compare.
    """

    state: float
    gradient: float
    undo: float

    @property
    def total(self) -> float:
        return self.state + self.gradient + self.undo


def parameter_bytes(job: Sections) -> ParameterBytes:
    """What a parameter of the job weighs; 18 bytes in bf16 where gradients are summed in fp32 and nothing is undone."""
    working, gradient = PRECISION_BYTES[job.train.precision], GRADIENT_BYTES[job.train.accumulation]
    is_rounded, is_sharded = job.train.precision != "fp32", job.train.sharded_optimizer
    live = working if is_rounded or is_sharded else 0  # else one of the 12
    state = live + (12 if is_rounded or not is_sharded else 8) * shards_held(job)
    kept = int(job.planner.staggered) + 2 * job.integrity.compares_states
    return ParameterBytes(state, gradient, kept * undone_bytes(job) if job.train.undo == "device" else 0)


def undone_bytes(job: Sections) -> float:
    """Bytes per parameter of the state before a step, wherever it is kept.

    With a sharded optimizer that of the owned shards: a gather brings the live parameters back.
    """
    rounded = PRECISION_BYTES[job.train.precision] if job.train.precision != "fp32" else 0
    return 12 * shards_held(job) if job.train.sharded_optimizer else 12 + rounded


def reducing_bytes(job: Sections, parameters: float) -> float:
    """Bytes that a host of a stage of so many parameters has beside its sums while it reduces shards."""
    if not job.train.sharded_optimizer:
        return 0.0
    hosts = job.shape.pipelines
    elements = min(AWAITED * SHARD_PIECE, parameters / hosts)
    return (hosts - 1) * elements * GRADIENT_BYTES[job.train.accumulation]


def shards_held(job: Sections) -> float:
    """Share of its stages' optimizer state that a host holds in a healthy run: all, or k of D shards."""
    return job.train.optimizer_copies / job.shape.pipelines if job.train.sharded_optimizer else 1.0


def moved_bytes(precision: str, accumulation: str) -> int:
    """Bytes through the device's memory to add one parameter's gradient of one micro-batch to its sum.

    The gradient is written and read once, the sum read and written; in fp32 a "fast" product is added as it is made.
    """
    made = 0 if (precision, accumulation) == ("fp32", "fast") else 2 * PRECISION_BYTES[precision]
    return made + 2 * GRADIENT_BYTES[accumulation]
