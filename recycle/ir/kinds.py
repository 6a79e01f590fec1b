"""The table of instruction kinds: what a kind is stands in one row, which every layer reads.

A kind is a class of instructions and a row: `@register(InstructionKind(...))` on the class enters it. What the class
derives from says its operands: `Compute` a stage and a micro-batch, `Transfer` the other worker too, `StageWide` the
stage alone; `ComputePart` and `StagePart` a bucket besides. The row says the rest: how it is written, what it needs and
makes, what it costs and holds. The built-in kinds are entered in `recycle.ir.instruction`; a kind of one's own is
entered the same way, from any file that is imported (see docs/guides/add-an-instruction.md). What others add to a
kind stands in maps of theirs: `recycle.exec.worker.kinds`, `recycle.ir.rules` and `viz.kinds`.

Columns hold the number of a kind, its place in the table. Hot code looks rows up by that number: `is_kind` asks for
classes, `per_kind` makes an array of a property of all rows.
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

MOST_KINDS = 256
"""How many kinds a column of 8 bits tells apart."""
_TOKEN = re.compile("[A-Z][A-Z_]*|;")
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound="type[Instruction]")


class ValueKind(IntEnum):
    """What instructions hand to each other."""

    ACTIVATION = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2


class Origin(IntEnum):
    """Where an instruction may have a value from."""

    ANY_WORKER = 0
    """whoever makes it: a transfer brings it from another worker"""
    SAME_WORKER = 1
    """an earlier instruction of the same worker hands it over; no transfer brings it"""
    STAGE = 2
    """the stage itself, which keeps it since an earlier instruction of the same worker; nothing is handed over"""


class Need(NamedTuple):
    """A value that a kind needs.

    Attributes:
        value: what it is.
        offset: the stage that makes it, relative to the instruction's own. Beyond the model's ends there is none.
        origin: where it may come from.
    """

    value: ValueKind
    offset: int
    origin: Origin = Origin.ANY_WORKER


@dataclass(frozen=True, kw_only=True)
class InstructionKind:
    """A row of the table.

    Attributes:
        token: what is written between stage and micro-batch: capitals and underscores, no other kind's.
        title: what people read for it, such as "forward".
        needs: the values that it needs, for its own micro-batch.
        produces: the values that it makes. A SEND carries the first of them to other stages.
        follows: the kind that must come before it on the same worker, for the same stage and micro-batch, and whose end
            it waits for.
        required: whether every micro-batch needs its share of it at every stage, exactly once.
        implied: whether `lower` writes it, once per hosted stage, when a schedule has no such kind at all.
        seconds: the attributes of `Profile` that add up to what it takes on its stage; none: no time.
        holds: whether it holds an activation of its stage from its start on.
        remakes: whether it begins by running the forward of its micro-batch again, where the stage recomputes.
        frees: profile -> share of an activation that is let go at its end.
        released_by: (value, stage relative to its own) whose making, on the same worker and for the same micro-batch,
            lets go of the rest of what it holds. None: instructions of its own stage and micro-batch do, by `frees`.
        letter: how its label begins in drawings; the token when None, no label when empty.
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
    """Anything a worker's program may hold.

    Attributes:
        kind: number of its kind, its place in `KIND_CLASSES`.
        row: its kind's row.
        token: the row's.
        operands: names of its fields, in order.
    """

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
    """Waits until what its worker has sent of the stage and the micro-batch has arrived; takes no time of its own."""

    __slots__ = ()


class Beside(Instruction):
    """What runs beside the computing of its worker, which begins it and goes on."""

    __slots__ = ()


class Part(Instruction):
    """What concerns one bucket of a stage's gradients: `bucket` says which, from 0."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, repr=False)
class Transfer(Beside):
    """One end of a transfer; `stage` is the one that runs the instruction, `peer` the worker at the other end."""

    stage: int
    micro_batch: MicroBatch
    peer: Worker

    def __str__(self) -> str:
        return f"{self.stage}{self.token}{self.micro_batch}@{self.peer}"


class Send(Transfer):
    """The end that has the value: the one that it needs."""

    __slots__ = ()


class Receive(Transfer):
    """The end that gets the value: the one that it needs."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, repr=False)
class StageWide(Instruction):
    """Something a host does for its whole stage once per iteration."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.token}"


@dataclass(frozen=True, slots=True, repr=False)
class ComputePart(Compute, Part):
    """The share of a computation that is for one bucket."""

    bucket: int

    def __str__(self) -> str:
        return f"{self.stage}{self.token}{self.micro_batch}/{self.bucket}"


@dataclass(frozen=True, slots=True, repr=False)
class StagePart(StageWide, Part):
    """Something a host does for one bucket of its stage once per iteration."""

    bucket: int

    def __str__(self) -> str:
        return f"{self.stage}{self.token}/{self.bucket}"


def made(cls: type[Instruction], **operands: Any) -> Instruction:
    """The instruction of a kind; of the operands those count that the kind has."""
    return cls(*[operands[name] for name in cls.operands])


KIND_CLASSES: list[type[Instruction]] = []
"""The table: class of each kind, by number. It grows when a kind is registered, so look it up when it is needed."""
_READ: list[Any] = []


def register(row: InstructionKind) -> Callable[[C], C]:
    """Enter the decorated class of instructions as a kind, under the next number.

    Raises:
        TypeError: the class derives from none of those that say the operands.
        ValueError: the token is no token, or another kind's; `seconds` names what a profile has not; or there are too
            many kinds.
    """

    def enter(cls: C) -> C:
        if row.token != ";" and not issubclass(cls, (Compute, Transfer, StageWide)):
            raise TypeError(f"{cls.__name__} derives from none of Compute, Transfer or StageWide")
        for name in row.seconds:
            if not hasattr(Profile, name):
                raise ValueError(f"{cls.__name__}: seconds: {name!r} is not an attribute of a profile")
        if not _TOKEN.fullmatch(row.token):
            raise ValueError(f"{row.token!r} is no token: write capitals and underscores, such as REPLAY")
        taken = next((other for other in KIND_CLASSES if other.token == row.token), None)
        if taken is not None:
            raise ValueError(f"the token {row.token} is that of {taken.__name__} already")
        if len(KIND_CLASSES) == MOST_KINDS:
            raise ValueError(f"there are {MOST_KINDS} kinds already, which is the most")
        cls.kind, cls.row, cls.token = len(KIND_CLASSES), row, row.token
        cls.operands = tuple(field.name for field in fields(cls))
        KIND_CLASSES.append(cls)
        _table_changed()
        return cls

    return enter


def unregister(cls: type[Instruction]) -> None:
    """Take the kind that was registered last out again, for tests and notebooks. Raises ValueError at another one."""
    if KIND_CLASSES[-1] is not cls:
        raise ValueError(f"{cls.__name__} is not the kind that was registered last")
    KIND_CLASSES.pop()
    _table_changed()


def _table_changed() -> None:
    for function in _READ:
        function.cache_clear()


def reads_kinds(function: F) -> F:
    """Decorator of a function whose result depends on its arguments and the table alone: keeps results until a kind is
    registered."""
    kept: Any = cache(function)
    _READ.append(kept)
    return kept  # type: ignore[no-any-return]


@reads_kinds
def kind_of_token(token: str) -> type[Instruction]:
    """The kind that is written so. Raises KeyError when there is none."""
    return {cls.token: cls for cls in KIND_CLASSES}[token]


def kinds_where(holds: Callable[[InstructionKind], bool]) -> tuple[type[Instruction], ...]:
    """The kinds of whose row `holds` is true."""
    return tuple(cls for cls in KIND_CLASSES if holds(cls.row))


def makers_of(value: ValueKind) -> tuple[type[Instruction], ...]:
    """The kinds that make such a value."""
    return kinds_where(lambda row: value in row.produces)


def per_kind(of: Callable[[type[Instruction]], Any], dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
    """A number of each kind, as an array to be indexed by a column of kinds."""
    return np.array([of(cls) for cls in KIND_CLASSES], dtype=dtype)


def is_kind(column: npt.NDArray[np.uint8], classes: type | Iterable[type]) -> npt.NDArray[np.bool_]:
    """Which entries of a column of kinds are of one of the classes or of classes derived from them.

    A look-up, several times faster than `np.isin`.
    """
    found: npt.NDArray[np.bool_] = _flags((classes,) if isinstance(classes, type) else tuple(classes))[column]
    return found


@reads_kinds
def _flags(classes: tuple[type, ...]) -> npt.NDArray[np.bool_]:
    flags = np.zeros(MOST_KINDS, dtype=np.bool_)
    flags[[cls.kind for cls in KIND_CLASSES if issubclass(cls, classes)]] = True
    return flags
