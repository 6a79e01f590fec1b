"""The instructions: frozen, fully identified, without time.

One class per kind; its text form is the repr, the file syntax and what errors print. `parse_instruction` reads one,
`KIND_CLASSES` is the one table of kinds. The notation extends that of `torch.distributed.pipelining`:

    instruction = stage kind [ micro_batch ] [ "@" worker ] | "(" F-or-B ";" F-or-B ")"
    micro_batch = pipeline "." index      input may leave "pipeline." out when there is one pipeline
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from recycle.errors import ScheduleError
from recycle.shape import MicroBatch, Worker


class Kind(IntEnum):
    """Row value of the `kind` column; the index into `KIND_CLASSES`."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    OVERLAPPED_PAIR = 4
    SEND_ACTIVATION = 5
    RECV_ACTIVATION = 6
    SEND_GRADIENT = 7
    RECV_GRADIENT = 8
    REDUCE_GRADIENTS = 9
    OPTIMIZER_STEP = 10
    REDUNDANT_FORWARD = 11


@dataclass(frozen=True, slots=True, repr=False)
class Instruction:
    """Anything a worker's program may hold."""

    kind: ClassVar[Kind]
    token: ClassVar[str]

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True, repr=False)
class Compute(Instruction):
    """Work of one stage on one micro-batch."""

    stage: int
    micro_batch: MicroBatch

    def __str__(self) -> str:
        return f"{self.stage}{self.token}{self.micro_batch}"


class Forward(Compute):
    """`2F1.5`: stage 2's forward of micro-batch 5 of pipeline 1."""

    __slots__ = ()
    kind, token = Kind.FORWARD, "F"


class Backward(Compute):
    """`2B1.5`: input and weight gradients in one go."""

    __slots__ = ()
    kind, token = Kind.BACKWARD, "B"


class BackwardInput(Compute):
    """`2I1.5`: the gradient for the stage's input; the stage before waits for nothing else."""

    __slots__ = ()
    kind, token = Kind.BACKWARD_INPUT, "I"


class BackwardWeight(Compute):
    """`2W1.5`: the gradient for the stage's weights; may wait until the stage's reduce."""

    __slots__ = ()
    kind, token = Kind.BACKWARD_WEIGHT, "W"


class RedundantForward(Compute):
    """`2R1.5`: stage 2's forward again, by the worker of stage 1, which holds a copy of stage 2 (Bamboo).

    What it makes is kept for the backward that would be wanted if stage 2's worker died, until the backward of stage 1
    of the same micro-batch shows that it lives. Nobody else uses it: it is none of the forwards that a micro-batch
    needs, and its input must be at hand.
    """

    __slots__ = ()
    kind, token = Kind.REDUNDANT_FORWARD, "R"


@dataclass(frozen=True, slots=True, repr=False)
class OverlappedPair(Instruction):
    """`(2F1.5;2B1.3)`: one forward and one whole backward at the same time (DualPipe). Prints the forward first."""

    kind = Kind.OVERLAPPED_PAIR
    token = ";"
    forward: Forward
    backward: Backward

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"


@dataclass(frozen=True, slots=True, repr=False)
class Transfer(Instruction):
    """One end of a transfer; `stage` is the one that runs the instruction, `peer` the worker at the other end."""

    stage: int
    micro_batch: MicroBatch
    peer: Worker

    def __str__(self) -> str:
        return f"{self.stage}{self.token}{self.micro_batch}@{self.peer}"


class SendActivation(Transfer):
    """`2SEND_F1.5@0.3`: stage 2's output of micro-batch 1.5, to worker 0.3."""

    __slots__ = ()
    kind, token = Kind.SEND_ACTIVATION, "SEND_F"


class RecvActivation(Transfer):
    """`3RECV_F1.5@1.2`: stage 3's input of micro-batch 1.5, from worker 1.2."""

    __slots__ = ()
    kind, token = Kind.RECV_ACTIVATION, "RECV_F"


class SendGradient(Transfer):
    """`3SEND_B1.5@1.2`: stage 3's input gradient of micro-batch 1.5, to worker 1.2."""

    __slots__ = ()
    kind, token = Kind.SEND_GRADIENT, "SEND_B"


class RecvGradient(Transfer):
    """`2RECV_B1.5@0.3`: stage 2's output gradient of micro-batch 1.5, from worker 0.3."""

    __slots__ = ()
    kind, token = Kind.RECV_GRADIENT, "RECV_B"


@dataclass(frozen=True, slots=True, repr=False)
class StageWide(Instruction):
    """Something a host does for its whole stage once per iteration."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.token}"


class ReduceGradients(StageWide):
    """`2REDUCE_GRAD`: the sum of stage 2's gradients over all its live hosts."""

    __slots__ = ()
    kind, token = Kind.REDUCE_GRADIENTS, "REDUCE_GRAD"


class OptimizerStep(StageWide):
    """`2STEP`: stage 2's own optimizer step."""

    __slots__ = ()
    kind, token = Kind.OPTIMIZER_STEP, "STEP"


KIND_CLASSES: tuple[type[Instruction], ...] = (
    Forward,
    Backward,
    BackwardInput,
    BackwardWeight,
    OverlappedPair,
    SendActivation,
    RecvActivation,
    SendGradient,
    RecvGradient,
    ReduceGradients,
    OptimizerStep,
    RedundantForward,
)
NEEDED_KINDS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.OVERLAPPED_PAIR})
"""Of these every micro-batch needs its share at every stage, exactly once."""
COMPUTE_KINDS = NEEDED_KINDS | {Kind.REDUNDANT_FORWARD}
SEND_KINDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECV_KINDS = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT})
TRANSFER_KINDS = SEND_KINDS | RECV_KINDS
STAGE_KINDS = frozenset({Kind.REDUCE_GRADIENTS, Kind.OPTIMIZER_STEP})


def is_kind(column: npt.NDArray[np.uint8], kinds: Iterable[Kind]) -> npt.NDArray[np.bool_]:
    """Which entries of a column of kinds are one of `kinds`. A look-up, several times faster than `np.isin`."""
    table = np.zeros(256, dtype=np.bool_)
    table[list(kinds)] = True
    found: npt.NDArray[np.bool_] = table[column]
    return found


_CLASS_OF_TOKEN = {cls.token: cls for cls in KIND_CLASSES if cls is not OverlappedPair}
_TOKENS = "|".join(sorted(_CLASS_OF_TOKEN, key=len, reverse=True))
_PLAIN = re.compile(rf"([0-9]+)({_TOKENS})(?:(?:([0-9]+)\.)?([0-9]+))?(?:@([0-9]+)\.([0-9]+))?")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)")
DIGITS = 9
"""Digits that a number in the text may have."""


def parse_instruction(text: str, one_pipeline: bool = False) -> Instruction:
    """The instruction that `text` writes.

    Args:
        text: for example `2F1.5`, `3RECV_F1.5@1.2`, `2STEP`, `(2F1.5;2B1.3)`.
        one_pipeline: there is one pipeline only, so `2F5` means `2F0.5`.

    Raises:
        ScheduleError: the text is no instruction; the message says what is wrong with it.
    """
    match = _PLAIN.fullmatch(text)
    if match is None:
        return _parse_pair(text, one_pipeline)
    if any(number and number.isdigit() and len(number) > DIGITS for number in match.groups()):
        raise ScheduleError(f"{text[:40]!r}: a number has more than {DIGITS} digits")
    cls = _CLASS_OF_TOKEN[match[2]]
    stage = int(match[1])
    if issubclass(cls, StageWide):
        if match[4] is not None or match[5] is not None:
            raise ScheduleError(f"{text!r}: {cls.token} takes no micro-batch and no worker, write {stage}{cls.token}")
        return cls(stage)
    if match[4] is None:
        raise ScheduleError(f"{text!r}: the micro-batch is missing, write for example {stage}{cls.token}0.1")
    if match[3] is None and not one_pipeline:
        raise ScheduleError(
            f"{text!r}: the pipeline of the micro-batch is missing, write for example {stage}{cls.token}0.{match[4]}"
        )
    micro_batch = MicroBatch(int(match[3] or 0), int(match[4]))
    if issubclass(cls, Transfer):
        if match[5] is None:
            raise ScheduleError(f"{text!r}: the other worker is missing, write for example {text}@0.1")
        return cls(stage, micro_batch, Worker(int(match[5]), int(match[6])))
    if match[5] is not None:
        raise ScheduleError(f"{text!r}: {cls.token} is local and takes no @worker")
    assert issubclass(cls, Compute)
    return cls(stage, micro_batch)


def _parse_pair(text: str, one_pipeline: bool) -> OverlappedPair:
    match = _PAIR.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is not an instruction: expected for example 2F1.5, 2SEND_F1.5@0.3 or 2STEP")
    halves = {type(half): half for half in (parse_instruction(part, one_pipeline) for part in match.groups())}
    forward, backward = halves.get(Forward), halves.get(Backward)
    if not isinstance(forward, Forward) or not isinstance(backward, Backward):
        raise ScheduleError(f"{text!r}: an overlapped pair is one F and one B, for example (2F1.5;2B1.3)")
    return OverlappedPair(forward, backward)
