"""The table of instruction kinds: one class and one row per kind (see docs/guides/add-an-instruction.md).

The base class determines the operands: `Compute` a stage and a micro-batch, `Transfer` also the peer worker,
`StageWide` the stage only, `ComputePart` and `StagePart` also a bucket. Columns store the index of a kind in the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch, Worker

Codes = npt.NDArray[np.uint8]
"""Kinds of instructions, or causes of edges."""
Flags = npt.NDArray[np.bool_]
MOST_KINDS = 256
_TOKEN = re.compile("[A-Z][A-Z_]*|;")
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound="type[Instruction]")


class ValueKind(IntEnum):
    """The kinds of values that instructions exchange."""

    ACTIVATION = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2


class Origin(IntEnum):
    """Where an instruction may obtain a value."""

    ANY_WORKER = 0
    """any worker that produces the value; a transfer carries the value between workers"""
    SAME_WORKER = 1
    """an earlier instruction of the same worker passes the value on, without a transfer"""
    STAGE = 2
    """the stage itself, which keeps the value from an earlier instruction on the same worker"""


class Need(NamedTuple):
    """A value that a kind needs, from the stage at `offset` relative to its own; void beyond the ends of the model."""

    value: ValueKind
    offset: int
    origin: Origin = Origin.ANY_WORKER


@dataclass(frozen=True, kw_only=True)
class InstructionKind:
    """A row of the table.

    Attributes:
        token: text between stage and micro-batch: capitals and underscores, unique among kinds.
        title: name for people, such as "forward".
        needs: values needed, for the instruction's micro-batch.
        produces: values produced. A SEND carries the first one to other stages.
        follows: kind that the instruction waits for on the same worker, for the same stage and micro-batch.
        required: whether every micro-batch needs the kind's share of work at every stage, exactly once.
        implied: whether `lower` adds the kind, once per hosted stage, to a schedule without any implied kind.
        seconds: attributes of `Profile` that add up to the duration on a stage; empty for no duration.
        holds: whether an activation of the stage is held from the start of the instruction.
        remakes: whether the instruction first reruns the forward, for stages that recompute.
        frees: profile -> share of an activation freed at the end.
        released_by: (value, relative stage) whose production on the same worker frees the rest of the activation;
            None: instructions of the same stage and micro-batch free it by `frees`.
        letter: first letter of the label in drawings; None for the token, empty for no label.
    """

    token: str
    title: str
    needs: tuple[Need, ...] = ()
    produces: tuple[ValueKind, ...] = ()
    follows: type[Instruction] | None = None
    required: bool = False
    implied: bool = False
    seconds: tuple[str, ...] = ()
    holds: bool = False
    remakes: bool = False
    frees: Callable[[Profile], float] = lambda profile: 0.0
    released_by: tuple[ValueKind, int] | None = None
    letter: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Instruction:
    """An entry of a worker's program; `kind` is the index in `KIND_CLASSES`, `operands` the names of the fields."""

    kind: ClassVar[int]
    row: ClassVar[InstructionKind]
    token: ClassVar[str]
    operands: ClassVar[tuple[str, ...]]

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True, repr=False)
class Compute(Instruction):
    """Work of one stage on one micro-batch."""

    stage: int
    micro_batch: MicroBatch

    def __str__(self) -> str:
        return f"{self.stage}{self.token}{self.micro_batch}"


class WaitSend(Compute):
    """Waits until the worker's sends of the stage and micro-batch have arrived; has no duration."""

    __slots__ = ()


class AsyncInstruction(Instruction):
    """Base of instructions that overlap the compute of their worker."""

    __slots__ = ()


class HostCopy(Compute, AsyncInstruction):
    """Base of copies of a stage's activation between device and host, one at a time per worker and kind."""

    __slots__ = ()


class Part(Instruction):
    """Base of instructions for one bucket of a stage's gradients; `bucket` is its number, from 0."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, repr=False)
class Transfer(AsyncInstruction):
    """One end of a transfer; `stage` runs the instruction, `peer` is the worker at the other end."""

    stage: int
    micro_batch: MicroBatch
    peer: Worker

    def __str__(self) -> str:
        return f"{self.stage}{self.token}{self.micro_batch}@{self.peer}"


class Send(Transfer):
    """The sending end of a transfer."""

    __slots__ = ()


class Receive(Transfer):
    """The receiving end of a transfer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, repr=False)
class StageWide(Instruction):
    """Work that a host does once per iteration for its whole stage."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.token}"


@dataclass(frozen=True, slots=True, repr=False)
class ComputePart(Compute, Part):
    """The share of a computation for one bucket."""

    bucket: int

    def __str__(self) -> str:
        return f"{self.stage}{self.token}{self.micro_batch}/{self.bucket}"


@dataclass(frozen=True, slots=True, repr=False)
class StagePart(StageWide, Part):
    """Work that a host does once per iteration for one bucket of its stage."""

    bucket: int

    def __str__(self) -> str:
        return f"{self.stage}{self.token}/{self.bucket}"


def make_instruction(cls: type[Instruction], **operands: Any) -> Instruction:
    """Create an instruction, ignoring operands that its kind does not have."""
    return cls(*[operands[name] for name in cls.operands])


KIND_CLASSES: list[type[Instruction]] = []
"""The class of each kind, by number. Registration extends the list, so read it at the time of use."""
_READ: list[Any] = []


def register(row: InstructionKind) -> Callable[[C], C]:
    """Register the decorated class as a kind, under the next number.

    Raises:
        TypeError: the class derives from none of the base classes that determine the operands.
        ValueError: the token is malformed or taken, `seconds` names an unknown attribute of `Profile`, or the table is
            full.
    """

    def enter(cls: C) -> C:
        if row.token != ";" and not issubclass(cls, (Compute, Transfer, StageWide)):
            raise TypeError(f"{cls.__name__} derives from none of Compute, Transfer or StageWide")
        for name in row.seconds:
            if not hasattr(Profile, name):
                raise ValueError(f"{cls.__name__}: seconds: {name!r} is not an attribute of a profile")
        if not _TOKEN.fullmatch(row.token):
            raise ValueError(f"{row.token!r} is not a token: write capitals and underscores, such as REPLAY")
        taken = next((other for other in KIND_CLASSES if other.token == row.token), None)
        if taken is not None:
            raise ValueError(f"the token {row.token} is already used by {taken.__name__}")
        if len(KIND_CLASSES) == MOST_KINDS:
            raise ValueError(f"the table already has {MOST_KINDS} kinds, the maximum")
        cls.kind, cls.row, cls.token = len(KIND_CLASSES), row, row.token
        cls.operands = tuple(field.name for field in fields(cls))
        KIND_CLASSES.append(cls)
        _table_changed()
        return cls

    return enter


def unregister(cls: type[Instruction]) -> None:
    """Remove the last registered kind, for tests and notebooks. Raises ValueError for any other kind."""
    if KIND_CLASSES[-1] is not cls:
        raise ValueError(f"{cls.__name__} is not the kind that was registered last")
    KIND_CLASSES.pop()
    _table_changed()


def _table_changed() -> None:
    for function in _READ:
        function.cache_clear()


def reads_kinds(function: F) -> F:
    """Decorator that caches a function of its arguments and the table until a kind is registered."""
    kept: Any = cache(function)
    _READ.append(kept)
    return kept  # type: ignore[no-any-return]


@reads_kinds
def kind_of_token(token: str) -> type[Instruction]:
    """Return the kind with this token. Raises KeyError if there is none."""
    return {cls.token: cls for cls in KIND_CLASSES}[token]


def kinds_where(holds: Callable[[InstructionKind], bool]) -> tuple[type[Instruction], ...]:
    """Return the kinds for whose row `holds` is true."""
    return tuple(cls for cls in KIND_CLASSES if holds(cls.row))


def makers_of(value: ValueKind) -> tuple[type[Instruction], ...]:
    """Return the kinds that produce `value`."""
    return kinds_where(lambda row: value in row.produces)


def per_kind(value_of: Callable[[type[Instruction]], Any], dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
    """Evaluate `of` for each kind, as an array indexed by a column of kinds."""
    return np.array([value_of(cls) for cls in KIND_CLASSES], dtype=dtype)


def is_kind(column: Codes, classes: type | Iterable[type]) -> Flags:
    """Return which entries of a column of kinds are of one of the classes or subclasses; faster than `np.isin`."""
    return _flags((classes,) if isinstance(classes, type) else tuple(classes)).take(column)


@reads_kinds
def _flags(classes: tuple[type, ...]) -> Flags:
    return per_kind(lambda cls: issubclass(cls, classes), np.bool_)


@reads_kinds
def kinds_of(classes: tuple[type, ...]) -> list[int]:
    """Return the kinds of these classes and their subclasses."""
    return [cls.kind for cls in KIND_CLASSES if issubclass(cls, classes)]
