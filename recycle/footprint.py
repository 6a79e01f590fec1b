"""What training holds in memory besides activations: bytes of a parameter, of messages under way, of work in pieces.

The analytic model counts with these figures and the executor keeps to them; `benchmarks/memory.py` and
`tests/exec/profile/test_footprint.py` hold both against what torch allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle.sections import Sections

POSTED_AHEAD = 4
"""Receives of a worker that wait for their message before the program comes to them: the next ones of all lanes. Enough
for two micro-batches from both neighbours, and as few however many peers a plan brings a worker together with."""
MESSAGES_UNDER_WAY = POSTED_AHEAD + 1
"""Messages that a worker has beside those that it computes with: that wait to be read, and one that is being sent."""
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
        widened: bytes of an element of what is added that exist for a moment in the sum's own type.
    """

    added: int
    stepped: int
    widened: int


ON_CPU = Pieces(1 << 16, 1 << 19, 8)
"""Several passes over a piece find it in the cache: half the time of whole matrices."""
ON_GPU = Pieces(1 << 21, 1 << 22, 0)
"""An addend, what is made of it and its part of an fp64 sum are 32 MiB, which the second-level cache of an A100 or H100
(40 and 50 MB) holds, so that several passes over them move them through the device's memory once. The mean gradient of
a piece is 16 MiB; it is large enough that launches cost nothing. Kernels widen as they read."""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of one parameter on a worker that hosts it.

    Attributes:
        state: what a new host copies: the fp32 parameter, Adam's two moments and, in bf16, the rounded one.
        gradient: its gradient sum.
        undo: of the state before a step that may be taken back, on the device.
    """

    state: int
    gradient: int
    undo: int

    @property
    def total(self) -> int:
        return self.state + self.gradient + self.undo


def parameter_bytes(job: Sections) -> ParameterBytes:
    """What a parameter of the job weighs; 18 bytes in bf16 where gradients are summed in fp32 and nothing is undone."""
    working, gradient = PRECISION_BYTES[job.train.precision], GRADIENT_BYTES[job.train.accumulation]
    state = 12 + (working if job.train.precision != "fp32" else 0)
    undo = state if job.planner.staggered and job.train.undo == "device" else 0
    return ParameterBytes(state, gradient, undo)


def moved_bytes(precision: str, accumulation: str) -> int:
    """Bytes through the device's memory to add one parameter's gradient of one micro-batch to its sum.

    The gradient is written and read once, the sum read and written; in fp32 a "fast" product is added as it is made.
    """
    made = 0 if (precision, accumulation) == ("fp32", "fast") else 2 * PRECISION_BYTES[precision]
    return made + 2 * GRADIENT_BYTES[accumulation]
