"""Rules for transfers: each value that crosses workers is sent once and received once, in the same order at both ends.

The rules share one table of defective values, so a defect is reported once, by its nearest cause, and not for both
ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Flags, Ints, Rows
from recycle.ir.dependencies import Unmet, Why
from recycle.ir.instruction import (
    CARRIERS,
    KIND_CLASSES,
    Compute,
    Send,
    Transfer,
    is_kind,
)
from recycle.ir.kinds import MOST_KINDS, Origin, ValueKind, makers_of
from recycle.ir.rules.rule import Defect, Inspection, Rule, Severity, firsts, repeats, rule


def are_reported(inspection: Inspection, rows: Rows) -> Flags:
    """Return whether a finding about the transferred value of each given row exists already."""
    examination = _examined(inspection)
    return examination.are_reported(examination.values(rows))


def _examined_rule(code: str, title: str, documentation: str, severity: Severity = "error") -> Rule:
    defects = lambda inspection: _examined(inspection).defects.get(code, [])  # noqa: E731
    return Rule(code, title, inspect.cleandoc(documentation), defects, severity)


wrong_peer = _examined_rule(
    "wrong-peer",
    "the two ends of a transfer name different workers",
    """A SEND names the worker that receives, the RECV the worker that sends. If the value is sent to one worker and
    expected by another, neither can continue. A transfer from a worker to itself is wrong too: the value is already
    there.""",
)
duplicate_transfer = _examined_rule(
    "duplicate-transfer",
    "a value sent or received twice",
    """Transfers are matched by their order between two workers, so a second SEND or RECV of the same value gives
    every later one the wrong data. Remove it.""",
)
not_made_here = _examined_rule(
    "not-made-here",
    "a send of a value that its worker does not compute",
    """A worker can send only values that its own instructions compute: SEND_F the activation of an F, SEND_B the
    gradient of an I or B, of the same stage and micro-batch. Move the SEND to the worker that runs the producer.""",
)
unreceived = _examined_rule(
    "unreceived",
    "a send without a receive",
    """A SEND without a RECV at the other end blocks or leaves a full buffer, and gives later transfers between the
    two workers the wrong data. Add the RECV, or remove the SEND.""",
)
unsent = _examined_rule(
    "unsent",
    "a receive without a send",
    """A RECV without a SEND at the other end never ends. Add the SEND, or remove the RECV.""",
)
no_transfer = _examined_rule(
    "no-transfer",
    "a value that is needed on another worker and never sent",
    """In a schedule with transfers, every value that another worker needs must have a SEND and a RECV. Add the
    pair, or remove all transfers and `lower` the schedule again.""",
)
unused_transfer = _examined_rule(
    "unused-transfer",
    "a value received where nothing needs it",
    """The transfer is matched, but no instruction of the receiving worker needs the value. It costs time on its
    link and a buffer. Remove both ends.""",
    "warning",
)


@rule("fifo", "receives in another order than the sends")
def fifo(inspection: Inspection) -> Iterator[Defect]:
    """Transfers between two workers are matched by order: the n-th SEND goes into the n-th RECV. If the two ends
    have different orders, a worker computes on the wrong micro-batch without an error. Reported once per directed
    pair of workers, at the first RECV that gets another value."""
    if not inspection.has_transfers:
        return
    c, workers = inspection.columns, inspection.shape.worker_count
    sends, given = inspection.graph.sends, inspection.origin
    receive = np.flatnonzero(sends >= 0)
    receive, send = given[receive], given[sends[receive]]
    lane = c.peer[receive].astype(np.int64) * workers + c.worker[receive]
    by_receive, by_send = np.lexsort((receive, lane)), np.lexsort((send, lane))
    differ = np.flatnonzero(send[by_receive] != send[by_send])
    _, first, count = firsts(lane[by_receive][differ])
    yield Defect(
        lambda entry: (
            f"what arrives here is {{other}}, matched by order ({count[entry]} receives of this pair of workers get"
            " another value)"
        ),
        "receive in the order in which the peer sends",
        receive[by_receive[differ[first]]],
        others=send[by_send[differ[first]]],
    )


def _examined(inspection: Inspection) -> _TransferExamination:
    if _examined not in inspection.shared:
        inspection.shared[_examined] = _TransferExamination(inspection)
    examination: _TransferExamination = inspection.shared[_examined]
    return examination


_CARRIED, _MAKER = (np.zeros(MOST_KINDS, dtype=np.int64) for _ in range(2))
"""Kind of a transfer -> value kind, and producing stage relative to the transfer's stage."""
for _end in chain.from_iterable(CARRIERS.values()):
    _CARRIED[_end.kind], _MAKER[_end.kind] = _end.row.needs[0].value, _end.row.needs[0].offset


class _TransferExamination:
    """Finds defects of transfers by rule code, nearest causes first, and reports each value once.

    A value is an index into a table of (value kind, producing stage, micro-batch), with an extra stage at both ends.
    """

    def __init__(self, inspection: Inspection) -> None:
        self.inspection, self.shape = inspection, inspection.shape
        self.columns = inspection.columns
        self.defects: dict[str, list[Defect]] = {}
        self._table = len(CARRIERS), self.shape.stages + 2, self.shape.global_micro_batches
        if inspection.has_transfers:
            ops = inspection.operations
            rows = [np.append(ops.row, -1)[ops.first(ops.select(*makers_of(v)))] for v in CARRIERS]
            # Row that produces each value and row that needs it: the first of several, -1 for none. Values count as
            # reported if a defect of the value, its producer or its user is reported.
            self._maker, self._user = self._by_value(rows, -1)
            self._reported = np.logical_or(*self._by_value([inspection.broken] * len(CARRIERS), False))
            self._examine()

    def _by_value(self, cells: Sequence[npt.NDArray[Any]], nothing: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return data per cell, indexed by the value that the cell produces, and by the value that it needs."""
        inner = np.reshape(cells, (len(CARRIERS), self.shape.stages, -1))
        produced = np.pad(inner, ((0, 0), (1, 1), (0, 0)), constant_values=nothing)
        toward = (receive.row.needs[0].offset for _, receive in CARRIERS.values())
        needed = [np.roll(column, offset, axis=0) for column, offset in zip(produced, toward, strict=True)]
        return produced.ravel(), np.ravel(needed)

    def values(self, rows: Rows) -> Rows:
        """Return the values that the transfers in given rows carry."""
        kind, ops = self.columns.kind[rows], self.inspection.operations
        return self._values(_CARRIED[kind], ops.stage[rows] + _MAKER[kind], ops.micro_batch[rows])

    def _values(self, kind: Rows | int, stage: Rows, micro_batch: Rows) -> Rows:
        _, stages, micro_batches = self._table
        return (kind * stages + stage + 1) * micro_batches + micro_batch

    def _read(self, values: Rows) -> tuple[Rows, Rows, Rows]:
        kind, stage, micro_batch = np.unravel_index(values, self._table)
        return kind, stage - 1, micro_batch

    def are_reported(self, values: Rows) -> Flags:
        """Return whether each value is already reported."""
        reported: Flags = self._reported[values]
        return reported

    def _examine(self) -> None:
        inspection, c, ops = self.inspection, self.columns, self.inspection.operations
        rows = ops.select(Transfer)  # a transfer's row is its piece
        has_dead_end = inspection.dead[c.worker[rows]] | inspection.dead[c.peer[rows]]
        self._reported[self.values(rows[has_dead_end])] = True
        rows = rows[~has_dead_end]
        self._to_itself(rows[c.peer[rows] == c.worker[rows]])
        self._twice(rows)
        self._not_made()
        received = np.zeros(len(c), dtype=np.bool_)
        sends_of = inspection.graph.sends
        matched = np.flatnonzero(sends_of >= 0)
        receives = inspection.origin[matched]
        received[receives] = received[inspection.origin[sends_of[matched]]] = True
        # Ends without a partner: two ends of one value are mismatched, a single end lacks the other.
        loose = rows[~received[rows]]
        is_send = is_kind(c.kind[loose], Send)
        self._mismatched(loose[is_send], loose[~is_send])
        self._lacking(loose[is_send], True)
        self._lacking(loose[~is_send], False)
        self._untransferred()
        self._unused(np.sort(receives))

    def _fresh(self, values: Rows) -> Rows:
        fresh = np.flatnonzero(~self._reported[values])
        self._reported[values[fresh]] = True
        return fresh[np.sort(firsts(values[fresh])[1])]

    def _report(self, code: str, defect: Defect) -> None:
        self.defects.setdefault(code, []).append(defect)

    def _to_itself(self, rows: Rows) -> None:
        message = "a transfer from a worker to itself"
        hint = "remove both ends if the consumer is on this worker, else name the other worker"
        self._report("wrong-peer", Defect(message, hint, rows[self._fresh(self.values(rows))]))

    def _twice(self, rows: Rows) -> None:
        c = self.columns
        ends = (c.worker[rows].astype(np.int64) * self.shape.worker_count + c.peer[rows]) * MOST_KINDS + c.kind[rows]
        keys = np.unique(ends, return_inverse=True)[1].astype(np.int64)
        second, earlier = repeats(keys * self.inspection.cells + self.inspection.cell[rows])
        fresh = self._fresh(self.values(rows[second]))
        second, earlier = rows[second[fresh]], rows[earlier[fresh]]
        message = "{other} already transfers this value"
        self._report("duplicate-transfer", Defect(message, "remove one of the two", second, others=earlier))

    def _not_made(self) -> None:
        unmet = self.inspection.graph.missing.with_reason(Why.NOT_LOCAL)
        rows, values = self._given(unmet.take(is_kind(self.inspection.lowered.columns.kind[unmet.row], Send)))
        message = "worker {other.worker} computes this value, not worker {worker}"
        hint = "move the send to the worker that runs its producer"
        self._report("not-made-here", Defect(message, hint, rows, others=self._maker[values]))

    def _given(self, unmet: Unmet) -> tuple[Rows, Rows]:
        unmet = unmet.take(self.inspection.origin[unmet.row] >= 0)
        values = self._values(unmet.value, unmet.stage, unmet.micro_batch)
        fresh = self._fresh(values)
        return self.inspection.origin[unmet.row[fresh]], values[fresh]

    def _is_run_by(self, workers: Rows | Ints, rows: Rows) -> Flags:
        is_run: Flags = (rows >= 0) & (self.columns.worker[rows] == workers)
        return is_run

    def _lacking(self, rows: Rows, is_send: bool) -> None:
        rows = rows[self._fresh(self.values(rows))]
        values = self.values(rows)
        kind, stage, micro_batch = self._read(values)
        peers = [self.shape.worker_at(peer) for peer in self.columns.peer[rows].tolist()]
        if is_send:
            code, verb, where, no_use = (
                "unreceived",
                "receives",
                "before its consumer",
                "needs this value: remove the send",
            )
        else:
            code, verb, where, no_use = (
                "unsent",
                "sends",
                "after its producer",
                "computes this value: remove the receive",
            )

        def hint(entry: int) -> str:
            end = CARRIERS[ValueKind(kind[entry])][is_send]
            other_stage = stage[entry] - end.row.needs[0].offset
            if not 0 <= other_stage < self.shape.stages:
                return f"no stage {no_use}"
            micro_batch_text = self.inspection.micro_batch(micro_batch[entry])
            return f"add {other_stage}{end.token}{micro_batch_text}@{{worker}} to worker {peers[entry]} {where}"

        message = lambda entry: f"worker {peers[entry]} never {verb} this value"  # noqa: E731
        self._report(code, Defect(message, hint, rows, others=(self._user if is_send else self._maker)[values]))

    def _mismatched(self, sends: Rows, receives: Rows) -> None:
        c = self.columns
        _, first_send, first_receive = np.intersect1d(self.values(sends), self.values(receives), return_indices=True)
        sends, receives = sends[first_send], receives[first_receive]
        fresh = self._fresh(self.values(sends))
        sends, receives = sends[fresh], receives[fresh]
        values = self.values(sends)
        if not len(values):
            return
        # The end that disagrees with where the value is made and needed is the wrong one.
        user = self._user[values]
        is_needed = self._is_run_by(c.worker[receives], user)
        send_fits = self._is_run_by(c.worker[sends], self._maker[values]) & self._is_run_by(c.peer[sends], user)
        blamed = send_fits | ~is_needed
        rows, others = np.where(blamed, receives, sends), np.where(blamed, sends, receives)
        moved = np.where(user >= 0, c.worker[user], c.worker[receives])
        named = np.where(blamed, c.worker[sends], c.worker[receives])

        def hint(entry: int) -> str:
            if is_needed[entry]:
                return f"name worker {self.shape.worker_at(named[entry])} in it"
            return f"move it to worker {self.shape.worker_at(moved[entry])}"

        message = "the other end is {other}, and the two do not match"
        self._report("wrong-peer", Defect(message, hint, rows, others=others))

    def _untransferred(self) -> None:
        rows, values = self._given(self.inspection.graph.missing.with_reason(Why.NOT_RECEIVED))
        kind, _, _ = self._read(values)

        def hint(entry: int) -> str:
            send, receive = CARRIERS[ValueKind(kind[entry])]
            return f"add a {send.token} there and a {receive.token} here"

        message = "it needs the result of {other}, but no transfer brings it here"
        self._report("no-transfer", Defect(message, hint, rows, others=self._maker[values]))

    def _unused(self, rows: Rows) -> None:
        ops, workers = self.inspection.operations, self.shape.worker_count
        needed = []
        for cls in KIND_CLASSES:
            for need in cls.row.needs if issubclass(cls, Compute) else ():
                if need.origin == Origin.ANY_WORKER:
                    users = ops.select(cls)
                    values = self._values(need.value, ops.stage[users] + need.offset, ops.micro_batch[users])
                    needed.append(values * workers + ops.worker[users])
        brought = self.values(rows)
        unused = rows[~np.isin(brought * workers + self.columns.worker[rows], np.concatenate(needed))]
        unused = unused[self._fresh(self.values(unused))]
        message = "nothing on worker {worker} needs this value"
        self._report("unused-transfer", Defect(message, "remove the receive and its send", unused))
