"""What a rule is: a code, a severity, a paragraph, and a function that marks where a schedule breaks it.

The function gets an `Inspection` and yields a `Defect` for each way of breaking the rule: columns of the rows that do,
with a message and a hint. Grouping, limits, counts and order are the frame's (`Rule.findings`, `check`).

An `Inspection` holds one schedule together with everything that rules ask about it, each worked out at most once. What
a schedule leaves out (transfers; reduces and steps) is implied as `lower` writes it, while rows and positions in
defects are those of the program as it was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Flags, Floats, Ints, Rows
from recycle.ir.dependencies import Dependencies, Unmet, Why
from recycle.ir.event_graph import EventGraph
from recycle.ir.instruction import (
    Instruction,
    StageWide,
    Transfer,
    is_kind,
)
from recycle.ir.kinds import kinds_where
from recycle.ir.lower import implied_kinds
from recycle.ir.pieces import Work, counts_of, is_whole, parts_of_weight, work
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import timeline_of
from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch

Severity = Literal["error", "warning"]
SHOWN = 6
"""Names that a message lists before it says how many more there are."""
MOST_DESCRIBED = 1000
"""Findings of one rule that are described. Of the others only the number is told: a file of a few megabytes may have
millions, each of which would take more memory than what it is about."""


@dataclass(frozen=True)
class ProgramPosition:
    """An instruction of a schedule: its worker, its position there from 0, and its text."""

    worker: str
    position: int
    instruction: str

    def __str__(self) -> str:
        return f"{self.instruction} on worker {self.worker} (position {self.position})"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        rule: code of the rule.
        severity: "error" (the schedule must not run) or "warning".
        worker, position: where; None when the finding is about the whole schedule. Positions count from 0 in the
            program as it was given.
        instruction: text of the instruction there, or None.
        message, hint: what is wrong, and what to do.
        others: the instructions that it is at odds with: the other end of a transfer, what comes too late, the rest of
            a circle of waits in its order.
    """

    rule: str
    severity: Severity
    worker: str | None
    position: int | None
    instruction: str | None
    message: str
    hint: str
    others: tuple[ProgramPosition, ...] = ()


@dataclass(frozen=True)
class Place:
    """One entry of a `Defect`: its index in the columns, the instructions that it is at odds with, and how many entries
    it stands for (see `Defect.per`)."""

    index: int
    others: tuple[ProgramPosition, ...]
    count: int


Tells = Mapping[str, npt.NDArray[Any] | Callable[[Place], object]]


@dataclass(frozen=True, eq=False)
class Defect:
    """One way in which a schedule breaks a rule, as columns with an entry for each time that it does.

    Attributes:
        message, hint: what is wrong and what to do, as formats in which these names stand for values of an entry:
            `worker` that it is about, `other` the first instruction that it is at odds with, and the names of `tells`.
        row: given row that an entry is about; None or -1 where it is about a worker or the whole schedule.
        worker: index of the worker where no row is given.
        others: row that the entry is at odds with, or several in a second dimension; -1 for none.
        where: entries that count; all when left out.
        per: of these, entries with the same number are reported once, at the first of them.
        more: what the message calls the others of them, if it counts them: `(and 3 more ...)`.
        tells: name -> its value in each entry.
    """

    message: str
    hint: str
    row: int | Rows | None = None
    worker: Rows | None = None
    others: Rows | None = None
    where: Flags | None = None
    per: Rows | Ints | None = None
    more: str = ""
    tells: Tells = field(default_factory=dict)

    def told(self) -> tuple[Rows, Rows]:
        """(entry, entries that it stands for) of each finding."""
        columns = (column for column in (self.row, self.worker, self.per) if column is not None)
        entries = np.arange(next(map(np.size, columns), 1))
        if self.where is not None:
            entries = entries[self.where]
        if self.per is None:
            return entries, np.ones_like(entries)
        _, places, counts = firsts(self.per[entries])
        return entries[places], counts


@dataclass(frozen=True)
class Rule:
    """One row of the table of rules.

    Attributes:
        code: what findings carry and `recycle check --explain` takes.
        title: the rule in a few words.
        documentation: a paragraph for people.
        find: yields the defects.
        severity: of every finding of this rule.
        presumes_valid: what it finds means nothing in a schedule with errors.
    """

    code: str
    title: str
    documentation: str
    find: Callable[[Inspection], Iterable[Defect]]
    severity: Severity = "error"
    presumes_valid: bool = False

    def findings(self, inspection: Inspection) -> tuple[list[Finding], int]:
        """(at most the first `MOST_DESCRIBED` findings, how many more there are)."""
        found: list[Finding] = []
        more = 0
        for defect in self.find(inspection):
            entries, counts = defect.told()
            room = MOST_DESCRIBED - len(found)
            more += max(0, len(entries) - room)
            for entry, count in zip(entries[:room].tolist(), counts[:room].tolist(), strict=True):
                found.append(self._finding(inspection, defect, entry, count))
        return found, more

    def _finding(self, inspection: Inspection, defect: Defect, entry: int, count: int) -> Finding:
        row = -1 if defect.row is None else int(np.atleast_1d(defect.row)[entry])
        others = [] if defect.others is None else np.atleast_1d(defect.others[entry]).tolist()
        place = Place(entry, tuple(inspection.at(other) for other in others if other >= 0), count)
        worker = position = instruction = None
        if row >= 0:
            here = inspection.at(row)
            worker, position, instruction = here.worker, here.position, here.instruction
        elif defect.worker is not None:
            worker = str(inspection.schedule.shape.worker_at(defect.worker[entry]))
        values: dict[str, object] = {"worker": worker, "other": next(iter(place.others), None)}
        values |= {name: told(place) if callable(told) else told[entry] for name, told in defect.tells.items()}
        message, hint = (text.format(**values) for text in (defect.message, defect.hint))
        if defect.more and count > 1:
            message += f" (and {count - 1} more {defect.more})"
        return Finding(self.code, self.severity, worker, position, instruction, message, hint, place.others)


def rule(
    code: str, title: str, severity: Severity = "error", presumes_valid: bool = False
) -> Callable[[Callable[[Inspection], Iterable[Defect]]], Rule]:
    """Make a rule of a function, whose docstring is the rule's documentation."""
    return lambda find: Rule(code, title, inspect.cleandoc(find.__doc__ or ""), find, severity, presumes_valid)


@dataclass(frozen=True, eq=False)
class Inspection:
    """One schedule under inspection, with what to hold it against.

    Attributes:
        schedule: as given.
        profile: bytes, and the share of an activation that is kept between I and W.
        limits: activations that the workers of each rank may hold, or None.
        byte_limit: bytes that any worker may hold, or None.
        about_to_run: nothing is implied, because the workers execute the program as it is.
        events: the event graph of the schedule as `lower` writes it out.
        shared: what several rules go by, under the function that works it out.
    """

    schedule: Schedule
    profile: Profile
    limits: Sequence[float] | None
    byte_limit: float | None
    about_to_run: bool
    events: EventGraph
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def lowered(self) -> Schedule:
        return self.events.schedule

    @property
    def origin(self) -> Rows:
        """Row of the given schedule that each lowered row came from, -1 where lowering added it."""
        assert self.events.origin is not None
        return self.events.origin

    @property
    def graph(self) -> Dependencies:
        return self.events.dependencies

    @cached_property
    def pieces(self) -> Work:
        """The given rows with overlapped pairs taken apart."""
        return work(self.schedule)

    @cached_property
    def has_transfers(self) -> bool:
        return bool(is_kind(self.schedule.columns.kind, Transfer).any())

    @cached_property
    def has_optimizer(self) -> bool:
        if self.schedule.forward_only:
            return False
        return bool(is_kind(self.schedule.columns.kind, implied_kinds()).any())

    @cached_property
    def dead(self) -> Flags:
        """Worker index -> failed."""
        shape = self.schedule.shape
        dead = np.zeros(shape.worker_count, dtype=np.bool_)
        dead[[shape.worker_index(worker) for worker in self.schedule.failed]] = True
        return dead

    @cached_property
    def hosted(self) -> Flags:
        """(worker index, stage) -> the placement puts the stage there."""
        shape = self.schedule.shape
        hosted = np.zeros((shape.worker_count, shape.stages), dtype=np.bool_)
        for w, stages in enumerate(self.schedule.placement):
            hosted[w, [s for s in stages if 0 <= s < shape.stages]] = True
        return hosted

    @cached_property
    def hosts(self) -> Flags:
        """(worker index, stage) -> the placement puts the stage there, and the worker is alive."""
        return self.hosted & ~self.dead[:, None]

    @cached_property
    def computes(self) -> Rows:
        """Pieces of the given schedule that a micro-batch needs, inside the shape."""
        return self.pieces.of(*kinds_where(lambda row: row.required))

    @cached_property
    def cell(self) -> Rows:
        """Stage and micro-batch of each piece as one number; only valid pieces have a meaningful one."""
        return self.pieces.stage * self.schedule.shape.global_micro_batches + self.pieces.micro_batch

    @cached_property
    def cells(self) -> int:
        """How many (stage, micro-batch) there are."""
        return self.schedule.shape.stages * self.schedule.shape.global_micro_batches

    @cached_property
    def counts(self) -> dict[type[Instruction], Rows]:
        """For F, B, I and W: how often each cell has it; parts of a W count as one when all are there."""
        return counts_of(self.pieces, self.schedule.shape, self.parts[0])

    @cached_property
    def parts(self) -> tuple[Rows, Rows]:
        """(fewest, most) parts of W that each cell has for any bucket."""
        return parts_of_weight(self.pieces, self.schedule.shape, self.schedule.buckets)

    @cached_property
    def complete(self) -> Flags:
        """Cells with one F and either one B or one I and one W; with one F where the schedule is forward-only."""
        f, b, i, w = self.counts.values()
        whole, parted = (b == 1) & (i == 0) & (w == 0), (b == 0) & (self.parts[0] == self.parts[1])
        return is_whole(self.schedule, f == 1, whole, parted & (i == 1), parted & (w == 1))

    @cached_property
    def misplaced(self) -> Flags:
        """Cells with a piece on a worker that is dead or does not host the stage."""
        pieces, at = self.pieces, self.computes
        wrong = ~self.hosts[pieces.worker[at], pieces.stage[at]]
        misplaced = np.zeros(self.cells, dtype=np.bool_)
        misplaced[self.cell[at[wrong]]] = True
        return misplaced

    @cached_property
    def apart(self) -> Unmet:
        """Backwards that are not on the worker that holds what they need, once per cell; lowered rows."""
        far = self.graph.missing.with_reason(Why.NOT_LOCAL)
        far = far.take(is_kind(self.lowered.columns.kind[far.row], kinds_where(lambda row: row.required)))
        return far.take(np.sort(np.unique(self.cells_of(far), return_index=True)[1]))

    @cached_property
    def broken(self) -> Flags:
        """Cells with a defect of their own; what else goes wrong around them is a consequence."""
        broken = ~self.complete | self.misplaced
        broken[self.cells_of(self.apart)] = True
        return broken

    def rows_in(self, cells: Flags) -> Flags:
        """The given rows that compute one of these cells."""
        rows = np.zeros(len(self.schedule.columns), dtype=np.bool_)
        rows[self.pieces.row[self.computes[cells[self.cell[self.computes]]]]] = True
        return rows

    @cached_property
    def stray_updates(self) -> Flags:
        """The given reduces and steps on a worker that does not host the stage, and those that are there already."""
        pieces, stages = self.pieces, self.schedule.shape.stages
        at = pieces.of(StageWide)
        keys = (pieces.kind[at].astype(np.int64) * len(self.dead) + pieces.worker[at]) * stages + pieces.stage[at]
        keys = keys * (self.schedule.buckets + 1) + pieces.bucket[at]
        stray = np.zeros(len(self.schedule.columns), dtype=np.bool_)
        stray[pieces.row[at[repeats(keys)[0]]]] = True
        stray[pieces.row[at[~self.hosts[pieces.worker[at], pieces.stage[at]]]]] = True
        return stray

    def cells_of(self, unmet: Unmet) -> Rows:
        """The cells of what is missing."""
        return unmet.stage * self.schedule.shape.global_micro_batches + unmet.micro_batch

    def micro_batch(self, number: int) -> MicroBatch:
        """The micro-batch with this global number."""
        return MicroBatch(*divmod(int(number), self.schedule.shape.micro_batches))

    def micro_batches(self, numbers: Rows) -> str:
        """The micro-batches with these global numbers, as `listed` lists them."""
        return listed([self.micro_batch(number) for number in numbers[:SHOWN].tolist()], len(numbers))

    @cached_property
    def _starts(self) -> Floats:
        """Start of each given row from idle, under the profile."""
        start = np.zeros(len(self.schedule.columns) + 1)  # the last entry takes what lowering added
        start[self.origin] = timeline_of(self.lowered, self.profile).start
        return start

    def time_of(self, row: int) -> str:
        """` at time 7` for a given row, nothing when the order cannot finish."""
        return f" at time {self._starts[row]:g}" if self.events.is_acyclic else ""

    def given(self, row: int) -> int | None:
        """Given row of a lowered row or node; None for what lowering added and for joins."""
        return int(self.origin[row]) if row < len(self.origin) and self.origin[row] >= 0 else None

    def at(self, row: int) -> ProgramPosition:
        """The instruction in a given row."""
        worker, position = self.schedule.position(row)
        return ProgramPosition(str(worker), position, str(self.schedule.instruction(row)))

    def workers(self, indices: Rows) -> str:
        """Workers, by index, as `listed` lists them."""
        return listed([self.schedule.shape.worker_at(w) for w in indices[:SHOWN].tolist()], len(indices))


def listed(names: Sequence[object], count: int | None = None) -> str:
    """`a, b, c and 4 more`, of `count` names in all where the sequence is only their beginning."""
    count = len(names) if count is None else count
    rest = f" and {count - SHOWN} more" if count > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + rest


def repeats(keys: Rows) -> tuple[Rows, Rows]:
    """(place of each entry whose key is there before it, place of the first entry with that key)."""
    _, first, back = np.unique(keys, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[back] != np.arange(len(keys)))
    return again, first[back[again]]


def firsts(keys: Rows | Ints) -> tuple[Rows, Rows, Rows]:
    """(key, place of its first entry, how many entries it has) of each distinct key, ascending; as columns."""
    key, place, entries = np.unique(keys, return_index=True, return_counts=True)
    return key.astype(np.int64), place, entries


def extremes(take: np.ufunc, keys: Rows, values: Rows, wanted: Rows, missing: int) -> Rows:
    """For each key in `wanted` the least (`np.minimum`) or greatest of the values that have it; `missing` where none
    has, which no value may exceed in that direction."""
    known, place = np.unique(keys, return_inverse=True)
    found = np.full(len(known) + 1, missing, dtype=np.int64)
    take.at(found, place, values)
    at = np.searchsorted(known, wanted)
    at[np.append(known, -1)[at] != wanted] = len(known)
    return found[at]
