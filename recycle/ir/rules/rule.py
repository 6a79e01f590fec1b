"""The framework of rules: a rule has a code, a severity, a documentation and a function that yields defects.

The function receives an `Inspection` and yields a `Defect` for each kind of violation. `Rule.findings` and `check`
group, limit and sort them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from recycle.ir.columns import Columns, Flags, Floats, Ints, Rows, occurrences
from recycle.ir.dependencies import Dependencies, Unmet, Why, find
from recycle.ir.event_graph import EventGraph
from recycle.ir.instruction import (
    Instruction,
    StageWide,
    Transfer,
    is_kind,
)
from recycle.ir.kinds import kinds_where
from recycle.ir.lower import implied_kinds
from recycle.ir.operations import Operations, counts_of, is_whole, operations_of, parts_of_weight
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import timeline_of
from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch, Shape

Severity = Literal["error", "warning"]
SHOWN = 6
"""Names that a message lists before it counts the others."""
MOST_DESCRIBED = 1000
"""Findings listed per rule; others are only counted, since a broken file may have millions."""


@dataclass(frozen=True)
class ProgramPosition:
    """An instruction of a schedule: worker, position in the program from 0, and text."""

    worker: str
    position: int
    instruction: str

    def __str__(self) -> str:
        return f"{self.instruction} on worker {self.worker} (position {self.position})"


@dataclass(frozen=True)
class Finding:
    """One violation of a rule.

    Attributes:
        rule: code of the rule.
        severity: "error" (the schedule must not run) or "warning".
        worker, position: place in the given program, from 0; None for findings about the whole schedule.
        instruction: text of the instruction, or None.
        others: conflicting instructions: the other end of a transfer, a late instruction, or the rest of a cycle.
    """

    rule: str
    severity: Severity
    worker: str | None
    position: int | None
    instruction: str | None
    message: str
    hint: str
    others: tuple[ProgramPosition, ...] = ()


Text = str | Callable[[int], str]
"""A format with the names `worker` and `other` (the first conflicting instruction), or a function entry -> format."""


@dataclass(frozen=True, eq=False)
class Defect:
    """One way in which a schedule breaks a rule, as columns with an entry per occurrence.

    Attributes:
        message, hint: the finding's texts.
        row: given row of each entry; None or -1 for entries about a worker or the whole schedule.
        worker: index of the worker, for entries without a row.
        others: conflicting row of each entry, or several in a second dimension; -1 for none.
        where: entries that count; None for all.
    """

    message: Text
    hint: Text
    row: int | Rows | None = None
    worker: Rows | None = None
    others: Rows | None = None
    where: Flags | None = None

    @property
    def entries(self) -> Rows:
        """Indices of the entries that count."""
        column = self.row if self.worker is None else self.worker
        entries = np.arange(1 if column is None else np.size(column))
        return entries if self.where is None else entries[self.where]


@dataclass(frozen=True)
class Rule:
    """One row of the table of rules; `presumes_valid` rules are skipped for schedules with errors."""

    code: str
    title: str
    documentation: str
    find: Callable[[Inspection], Iterable[Defect]]
    severity: Severity = "error"
    presumes_valid: bool = False

    def findings(self, inspection: Inspection) -> tuple[list[Finding], int]:
        """Return (at most the first `MOST_DESCRIBED` findings, number of further findings)."""
        listed: list[Finding] = []
        omitted = 0
        for defect in self.find(inspection):
            entries, room = defect.entries, MOST_DESCRIBED - len(listed)
            omitted += max(0, len(entries) - room)
            listed += [self._finding(inspection, defect, entry) for entry in entries[:room].tolist()]
        return listed, omitted

    def _finding(self, inspection: Inspection, defect: Defect, entry: int) -> Finding:
        row = -1 if defect.row is None else int(np.atleast_1d(defect.row)[entry])
        rows = [] if defect.others is None else np.atleast_1d(defect.others[entry]).tolist()
        others = tuple(inspection.at(other) for other in rows if other >= 0)
        worker = position = instruction = None
        if row >= 0:
            at = inspection.at(row)
            worker, position, instruction = at.worker, at.position, at.instruction
        elif defect.worker is not None:
            worker = str(inspection.shape.worker_at(defect.worker[entry]))
        message, hint = (
            (text(entry) if callable(text) else text).format(worker=worker, other=next(iter(others), None))
            for text in (defect.message, defect.hint)
        )
        return Finding(self.code, self.severity, worker, position, instruction, message, hint, others)


def rule(
    code: str, title: str, severity: Severity = "error", presumes_valid: bool = False
) -> Callable[[Callable[[Inspection], Iterable[Defect]]], Rule]:
    """Decorator that turns a function into a rule, documented by the function's docstring."""
    return lambda find: Rule(code, title, inspect.cleandoc(find.__doc__ or ""), find, severity, presumes_valid)


@dataclass(frozen=True, eq=False)
class Inspection:
    """A schedule under inspection, and the limits to check.

    Attributes:
        profile: bytes, and the share of an activation kept between I and W.
        limits, byte_limit: activations that workers of each rank may hold, and bytes of any worker; None for no limit.
        about_to_run: whether workers execute the program as it is, so that nothing is implied.
        events: event graph of the lowered schedule.
        shared: results shared by several rules, by the function that computes them.
    """

    schedule: Schedule
    profile: Profile
    limits: Sequence[float] | None
    byte_limit: float | None
    about_to_run: bool
    events: EventGraph
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return self.schedule.shape

    @property
    def columns(self) -> Columns:
        """The given rows."""
        return self.schedule.columns

    @property
    def lowered(self) -> Schedule:
        return self.events.schedule

    @property
    def origin(self) -> Rows:
        """Row in the given schedule of each lowered row, -1 for added rows."""
        assert self.events.origin is not None
        return self.events.origin

    @property
    def graph(self) -> Dependencies:
        return self.events.dependencies

    @cached_property
    def operations(self) -> Operations:
        """The given rows with overlapped pairs split."""
        return operations_of(self.schedule)

    @cached_property
    def has_transfers(self) -> bool:
        return bool(is_kind(self.columns.kind, Transfer).any())

    @cached_property
    def has_optimizer(self) -> bool:
        if self.schedule.forward_only:
            return False
        return bool(is_kind(self.columns.kind, implied_kinds()).any())

    @cached_property
    def dead(self) -> Flags:
        """Worker index -> failed."""
        dead = np.zeros(self.shape.worker_count, dtype=np.bool_)
        dead[[self.shape.worker_index(worker) for worker in self.schedule.failed]] = True
        return dead

    @cached_property
    def hosted(self) -> Flags:
        """(worker index, stage) -> whether the placement assigns the stage."""
        hosted = np.zeros((self.shape.worker_count, self.shape.stages), dtype=np.bool_)
        for w, stages in enumerate(self.schedule.placement):
            hosted[w, [s for s in stages if 0 <= s < self.shape.stages]] = True
        return hosted

    @cached_property
    def hosts(self) -> Flags:
        """(worker index, stage) -> whether the placement assigns the stage to a live worker."""
        return self.hosted & ~self.dead[:, None]

    @cached_property
    def computes(self) -> Rows:
        """Valid operations that a micro-batch requires."""
        return self.operations.select(*kinds_where(lambda row: row.required))

    @property
    def cell(self) -> Rows:
        """Stage and micro-batch of each operation as one number; meaningful for valid operations only."""
        return self.operations.cell

    @property
    def cells(self) -> int:
        """Number of (stage, micro-batch) cells."""
        return self.operations.cells

    @cached_property
    def counts(self) -> dict[type[Instruction], Rows]:
        """Number of F, B, I and W in each cell; a full set of parts counts as one W."""
        return counts_of(self.operations, self.parts[0])

    @cached_property
    def parts(self) -> tuple[Rows, Rows]:
        """(fewest, most) parts of W over the buckets, per cell."""
        return parts_of_weight(self.operations, self.schedule.buckets)

    @cached_property
    def complete(self) -> Flags:
        """Cells with one F and either one B or one I and one W; only one F in a forward-only schedule."""
        f, b, i, w = self.counts.values()
        whole, parted = (b == 1) & (i == 0) & (w == 0), (b == 0) & (self.parts[0] == self.parts[1])
        return is_whole(self.schedule, f == 1, whole, parted & (i == 1), parted & (w == 1))

    @cached_property
    def misplaced(self) -> Flags:
        """Cells with work on a worker that is dead or does not host the stage."""
        ops, at = self.operations, self.computes
        misplaced = np.zeros(self.cells, dtype=np.bool_)
        misplaced[self.cell[at[~self.hosts.ravel()[ops.host[at]]]]] = True
        return misplaced

    @cached_property
    def apart(self) -> Unmet:
        """Backwards on another worker than their inputs, once per cell; lowered rows."""
        unmet = self.graph.missing.with_reason(Why.NOT_LOCAL)
        unmet = unmet.take(is_kind(self.lowered.columns.kind[unmet.row], kinds_where(lambda row: row.required)))
        return unmet.take(np.sort(np.unique(self.cells_of(unmet), return_index=True)[1]))

    @cached_property
    def broken(self) -> Flags:
        """Cells with a defect; other findings about them are consequences."""
        broken = ~self.complete | self.misplaced
        broken[self.cells_of(self.apart)] = True
        return broken

    def rows_in(self, cells: Flags) -> Flags:
        """Return the given rows that compute one of these cells."""
        rows = np.zeros(len(self.columns), dtype=np.bool_)
        rows[self.operations.row[self.computes[cells[self.cell[self.computes]]]]] = True
        return rows

    @cached_property
    def stray_updates(self) -> Flags:
        """The given reduces and steps that are duplicates or on a worker that does not host the stage."""
        ops = self.operations
        at = ops.select(StageWide)
        keys = ops.kind[at] * np.int64(self.hosts.size) + ops.host[at]
        keys = keys * (self.schedule.buckets + 1) + ops.bucket[at]
        stray = np.zeros(len(self.columns), dtype=np.bool_)
        stray[ops.row[at[repeats(keys)[0]]]] = True
        stray[ops.row[at[~self.hosts.ravel()[ops.host[at]]]]] = True
        return stray

    def cells_of(self, unmet: Unmet) -> Rows:
        """Return the cells of unmet needs."""
        return unmet.stage * self.shape.global_micro_batches + unmet.micro_batch

    def micro_batch(self, number: int) -> MicroBatch:
        """Return the micro-batch with this global id."""
        return MicroBatch(*divmod(int(number), self.shape.micro_batches))

    def micro_batches(self, numbers: Rows) -> str:
        """Format the micro-batches with these global ids, as `listed`."""
        return listed([self.micro_batch(number) for number in numbers[:SHOWN].tolist()], len(numbers))

    @cached_property
    def _starts(self) -> Floats:
        start = np.zeros(len(self.columns) + 1)  # the last entry absorbs added rows
        start[self.origin] = timeline_of(self.lowered, self.profile).start
        return start

    def time_of(self, row: int) -> str:
        """Return ` at time 7` for a given row; empty if the order deadlocks."""
        return f" at time {self._starts[row]:g}" if self.events.is_acyclic else ""

    def given(self, row: int) -> int | None:
        """Return the given row of a lowered row or node; None for added rows and joins."""
        return int(self.origin[row]) if row < len(self.origin) and self.origin[row] >= 0 else None

    def at(self, row: int) -> ProgramPosition:
        """Return the instruction in a given row."""
        worker, position = self.schedule.position(row)
        return ProgramPosition(str(worker), position, str(self.schedule.instruction(row)))

    def workers(self, indices: Rows) -> str:
        """Format workers by index, as `listed`."""
        return listed([self.shape.worker_at(w) for w in indices[:SHOWN].tolist()], len(indices))


def listed(names: Sequence[object] | Rows, count: int | None = None) -> str:
    """Format `a, b, c and 4 more`; `count` is the total if `names` is only the beginning."""
    count = len(names) if count is None else count
    omitted = f" and {count - SHOWN} more" if count > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + omitted


def and_more(count: int, noun: str) -> str:
    """Format ` (and 3 more ...)` for the other entries of a finding that represents `count`."""
    return f" (and {count - 1} more {noun})" if count > 1 else ""


def repeats(keys: Rows) -> tuple[Rows, Rows]:
    """Return (index of each repeated key, index of its first occurrence)."""
    later = np.flatnonzero(occurrences(keys))
    return later, find(keys, keys[later])


def firsts(keys: Rows | Ints) -> tuple[Rows, Rows, Rows]:
    """Return (key, index of the first entry, number of entries) of each distinct key, ascending."""
    key, place, entries = np.unique(keys, return_index=True, return_counts=True)
    return key.astype(np.int64), place, entries


def grouped(values: Rows, keys: Rows) -> list[Rows]:
    """Return the values with each key, given sorted keys."""
    return np.split(values, np.flatnonzero(np.diff(keys)) + 1) if len(keys) else []


def extremes(take: np.ufunc, keys: Rows, values: Rows, wanted: Rows, missing: int) -> Rows:
    """Return the minimum (`np.minimum`) or maximum of the values with each wanted key; `missing` without any value.

    `missing` must be at least as extreme as every value, in the opposite direction.
    """
    if not len(wanted):
        return wanted
    known, place = np.unique(keys, return_inverse=True)
    result = np.full(len(known) + 1, missing, dtype=np.int64)
    take.at(result, place, values)
    at = np.searchsorted(known, wanted)
    at[np.append(known, -1)[at] != wanted] = len(known)
    return result[at]
