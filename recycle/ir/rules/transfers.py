"""Transfers: each value that crosses to another worker is sent once and received once, in the same order at both ends.

The rules share one table of what is wrong with which value, so that one defect (a transfer whose peer was changed,
say) is reported once, by its nearest cause, and not again for each of its ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from itertools import chain

import numpy as np

from recycle.ir.columns import Flags, Ints, Rows
from recycle.ir.dependencies import Unmet, Why
from recycle.ir.instruction import (
    CARRIERS,
    KIND_CLASSES,
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Receive,
    Send,
    Transfer,
    is_kind,
)
from recycle.ir.kinds import MOST_KINDS, Origin, ValueKind
from recycle.ir.rules.rule import Defect, Inspection, Place, Rule, Severity, Tells, firsts, repeats, rule
from recycle.job.shape import MicroBatch, Worker


def are_reported(inspection: Inspection, rows: Rows) -> Flags:
    """Whether a finding about the value of the transfer in each given row is there, so that no more need be said."""
    examination = _examined(inspection)
    return examination.are_reported(examination.values(rows))


def _examined_rule(code: str, title: str, documentation: str, severity: Severity = "error") -> Rule:
    found = lambda inspection: _examined(inspection).found.get(code, [])  # noqa: E731
    return Rule(code, title, inspect.cleandoc(documentation), found, severity)


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
    c, workers = inspection.schedule.columns, inspection.schedule.shape.worker_count
    sends, given = inspection.graph.sends, inspection.origin
    receive = np.flatnonzero(sends >= 0)
    receive, send = given[receive], given[sends[receive]]
    lane = c.peer[receive].astype(np.int64) * workers + c.worker[receive]
    by_receive, by_send = np.lexsort((receive, lane)), np.lexsort((send, lane))
    differ = np.flatnonzero(send[by_receive] != send[by_send])
    yield Defect(
        "what arrives here is {other}, matched by order ({count} receives of this pair of workers get another value)",
        "receive in the order in which the peer sends",
        receive[by_receive[differ]],
        others=send[by_send[differ]],
        per=lane[by_receive][differ],
        tells={"count": lambda place: place.count},
    )


def _examined(inspection: Inspection) -> _TransferExamination:
    if _examined not in inspection.shared:
        inspection.shared[_examined] = _TransferExamination(inspection)
    examination: _TransferExamination = inspection.shared[_examined]
    return examination


_CONSUMER = np.array([-receive.row.needs[0].offset for _, receive in CARRIERS.values()], dtype=np.int64)
"""`ValueKind` -> where a transfer brings such a value: the stage, relative to that which makes it."""
_CARRIED, _MAKER = (np.zeros(MOST_KINDS, dtype=np.int64) for _ in range(2))
"""Number of a transfer's kind -> what it carries; the stage that makes that, relative to the transfer's own."""
for _end in chain.from_iterable(CARRIERS.values()):
    _CARRIED[_end.kind], _MAKER[_end.kind] = _end.row.needs[0].value, _end.row.needs[0].offset
_SIDES = {ValueKind.ACTIVATION: (Forward,), ValueKind.INPUT_GRADIENT: (Backward, BackwardInput)}
"""What makes and needs a value that is transferred."""


class _TransferExamination:
    """Looks for defects of transfers, from the nearest causes to the farthest, and reports each value once.

    Attributes:
        found: code of the rule that reports it -> defects.
    """

    def __init__(self, inspection: Inspection) -> None:
        self.inspection, self.shape = inspection, inspection.schedule.shape
        self.columns = inspection.schedule.columns
        self.found: dict[str, list[Defect]] = {}
        self._span = (self.shape.stages + 2) * self.shape.global_micro_batches
        self._reported = np.zeros(len(CARRIERS) * self._span, np.bool_)
        if inspection.has_transfers:
            self._examine()

    def values(self, rows: Rows) -> Rows:
        """What the transfers in given rows carry."""
        kind, pieces = self.columns.kind[rows], self.inspection.pieces
        return self._values(_CARRIED[kind], pieces.stage[rows] + _MAKER[kind], pieces.micro_batch[rows])

    def _values(self, kind: Rows, stage: Rows, micro_batch: Rows) -> Rows:
        """Values as one number each.

        Args:
            kind: `ValueKind`.
            stage, micro_batch: who makes it, -1 or P * V where there is no such stage; the micro-batch as global id.
        """
        return kind * self._span + (stage + 1) * self.shape.global_micro_batches + micro_batch

    def _read(self, value: int, onward: bool = False) -> tuple[ValueKind, int, MicroBatch]:
        """(kind, the stage that makes it, or `onward` the one that needs it, micro-batch) of a value."""
        kind, rest = divmod(int(value), self._span)
        stage, micro_batch = divmod(rest, self.shape.global_micro_batches)
        return ValueKind(kind), stage - 1 + int(_CONSUMER[kind]) * onward, self.inspection.micro_batch(micro_batch)

    def _runs_at(self, values: Rows, onward: bool) -> Rows:
        """The kind and the cell that makes each value, or `onward` the one that needs it, as one number; -1 where the
        model has no such stage."""
        kind, rest = np.divmod(values, self._span)
        cell = rest + (_CONSUMER[kind] * onward - 1) * self.shape.global_micro_batches
        cells = self.inspection.cells
        return np.where((cell >= 0) & (cell < cells), kind * cells + cell, -1)

    def are_reported(self, values: Rows) -> Flags:
        """Whether a defect of each value is reported, or its producer or consumer has one from which others follow."""
        reported: Flags = self._reported[values]
        for onward in (False, True):
            at = self._runs_at(values, onward)
            reported = reported | ((at >= 0) & self.inspection.broken[at % self.inspection.cells])
        return reported

    def _examine(self) -> None:
        inspection, c, pieces = self.inspection, self.columns, self.inspection.pieces
        rows = pieces.of(Transfer)  # a transfer's row is its piece
        gone = inspection.dead[c.worker[rows]] | inspection.dead[c.peer[rows]]
        self._reported[self.values(rows[gone])] = True
        rows = rows[~gone]
        self._to_itself(rows[c.peer[rows] == c.worker[rows]])
        self._twice(rows)
        self._not_made()
        received = np.zeros(len(c), dtype=np.bool_)
        sends_of = inspection.graph.sends
        matched = np.flatnonzero(sends_of >= 0)
        receives = inspection.origin[matched]
        received[receives] = received[inspection.origin[sends_of[matched]]] = True
        # Ends without a partner: two of one value belong together, one alone lacks the other.
        loose = rows[~received[rows]]
        is_send = is_kind(c.kind[loose], Send)
        self._mismatched(loose[is_send], loose[~is_send])
        self._lacking("unreceived", "receives", loose[is_send])
        self._lacking("unsent", "sends", loose[~is_send])
        self._untransferred()
        self._unused(np.sort(receives))

    def _fresh(self, values: Rows) -> Rows:
        """The places of the values that are not reported already, each value once; they are reported then."""
        fresh = np.flatnonzero(~self.are_reported(values))
        self._reported[values[fresh]] = True
        return fresh[np.sort(firsts(values[fresh])[1])]

    def _report(self, code: str, defect: Defect) -> None:
        self.found.setdefault(code, []).append(defect)

    def _to_itself(self, rows: Rows) -> None:
        message = "a transfer from a worker to itself"
        hint = "remove both ends if the consumer is on this worker, else name the other worker"
        self._report("wrong-peer", Defect(message, hint, rows[self._fresh(self.values(rows))]))

    def _twice(self, rows: Rows) -> None:
        c = self.columns
        ends = (c.worker[rows].astype(np.int64) * self.shape.worker_count + c.peer[rows]) * MOST_KINDS + c.kind[rows]
        keys = np.unique(ends, return_inverse=True)[1].astype(np.int64)
        again, first = repeats(keys * self.inspection.cells + self.inspection.cell[rows])
        fresh = self._fresh(self.values(rows[again]))
        again, first = rows[again[fresh]], rows[first[fresh]]

        is_send = is_kind(c.kind[again], Send)
        tells = {"done": np.where(is_send, "sent", "received")}
        message = "the value is {done} already: {other}"
        self._report("duplicate-transfer", Defect(message, "remove one of the two", again, others=first, tells=tells))

    def _not_made(self) -> None:
        far = self.inspection.graph.missing.with_reason(Why.NOT_LOCAL)
        rows, values = self._given(far.take(is_kind(self.inspection.lowered.columns.kind[far.row], Send)))

        def maker(place: Place) -> str:
            return f"worker {place.others[0].worker} makes" if place.others else "nobody makes"

        message = "{maker} this value, not worker {worker}"
        hint, first = "move the send to the worker that runs its producer", self._first_row(values)
        self._report("not-made-here", Defect(message, hint, rows, others=first, tells={"maker": maker}))

    def _given(self, unmet: Unmet) -> tuple[Rows, Rows]:
        """The given rows that miss a value which is not reported yet, and that value."""
        unmet = unmet.take(self.inspection.origin[unmet.row] >= 0)
        values = self._values(unmet.value, unmet.stage, unmet.micro_batch)
        fresh = self._fresh(values)
        return self.inspection.origin[unmet.row[fresh]], values[fresh]

    @cached_property
    def _runs(self) -> Rows:
        """The first row of each kind of value and cell that makes it, or needs it from another stage, -1 for none; and
        -1 behind them."""
        pieces = self.inspection.pieces
        firsts = [pieces.first(self.shape, pieces.of(*classes)) for classes in _SIDES.values()]
        found: Rows = np.append(pieces.row, -1)[np.append(np.concatenate(firsts), -1)]
        return found

    def _first_row(self, values: Rows, onward: bool = False) -> Rows:
        """Row that makes each value, or `onward` the one that needs it: the first of several, -1 for none."""
        return self._runs[self._runs_at(values, onward)] if len(values) else values

    def _is_run_by(self, workers: Rows | Ints, values: Rows, onward: bool = False) -> Flags:
        """Whether each of the workers makes the value, or `onward` needs it."""
        rows = self._first_row(values, onward)
        found: Flags = (rows >= 0) & (self.columns.worker[rows] == workers)
        return found

    def _lacking(self, code: str, verb: str, rows: Rows) -> None:
        """Report transfers whose other end is missing."""
        rows = rows[self._fresh(self.values(rows))]
        values, onward = self.values(rows), code == "unreceived"
        peers = self.columns.peer[rows]

        def peer(place: Place) -> Worker:
            return self.shape.worker_at(peers[place.index])

        def remedy(place: Place) -> str:
            kind, stage, micro_batch = self._read(values[place.index], onward)
            end = CARRIERS[kind][onward]
            receives = issubclass(end, Receive)
            if not 0 <= stage < self.shape.stages:
                needs, this = ("needs", "send") if receives else ("makes", "receive")
                return f"no stage {needs} this value: remove the {this}"
            worker = self.shape.worker_at(self.columns.worker[rows[place.index]])
            where = "before its consumer" if receives else "behind its producer"
            return f"add {stage}{end.token}{micro_batch}@{worker} to worker {peer(place)} {where}"

        message, others = f"worker {{peer}} never {verb} it", self._first_row(values, onward)
        tells = {"peer": peer, "remedy": remedy}
        self._report(code, Defect(message, "{remedy}", rows, others=others, tells=tells))

    def _mismatched(self, sends: Rows, receives: Rows) -> None:
        """Both ends of one value, which do not match."""
        c = self.columns
        _, first_send, first_receive = np.intersect1d(self.values(sends), self.values(receives), return_indices=True)
        sends, receives = sends[first_send], receives[first_receive]
        fresh = self._fresh(self.values(sends))
        sends, receives = sends[fresh], receives[fresh]
        values = self.values(sends)
        if not len(values):
            return
        # The end that disagrees with where the value is made and needed is the wrong one.
        is_needed = self._is_run_by(c.worker[receives], values, onward=True)
        send_fits = self._is_run_by(c.worker[sends], values)
        send_fits &= self._is_run_by(c.peer[sends], values, onward=True)
        blamed = send_fits | ~is_needed
        rows, others = np.where(blamed, receives, sends), np.where(blamed, sends, receives)
        user = self._first_row(values, onward=True)
        moved = np.where(user >= 0, c.worker[user], c.worker[receives])
        named = np.where(blamed, c.worker[sends], c.worker[receives])
        right = np.where(is_needed, named, moved)
        tells = {"right": lambda place: self.shape.worker_at(right[place.index])}
        message = "the other end is {other}, and the two do not match"
        for where, hint in ((is_needed, "name worker {right} in it"), (~is_needed, "move it to worker {right}")):
            self._report("wrong-peer", Defect(message, hint, rows, others=others, where=where, tells=tells))

    def _untransferred(self) -> None:
        rows, values = self._given(self.inspection.graph.missing.with_reason(Why.NOT_RECEIVED))

        def lacks(place: Place) -> str:
            _, stage, micro_batch = self._read(values[place.index])
            where = f" on worker {place.others[0].worker}" if place.others else ""
            return f"what stage {stage} makes of micro-batch {micro_batch}{where}"

        def ends(place: Place) -> tuple[str, ...]:
            return tuple(end.token for end in CARRIERS[self._read(values[place.index])[0]])

        tells: Tells = {"lacks": lacks, "ends": ends}
        message = "it needs {lacks}, and no transfer brings it here"
        hint, first = "add a {ends[0]} there and a {ends[1]} here", self._first_row(values)
        self._report("no-transfer", Defect(message, hint, rows, others=first, tells=tells))

    def _unused(self, rows: Rows) -> None:
        pieces, c = self.inspection.pieces, self.columns
        for value, (_, receive) in CARRIERS.items():
            needed = []
            for cls in KIND_CLASSES:
                for need in cls.row.needs if issubclass(cls, Compute) else ():
                    if (need.value, need.origin) == (value, Origin.ANY_WORKER):
                        users = pieces.of(cls)
                        needed.append(self._made_for(users, need.offset))
            mine = rows[c.kind[rows] == receive.kind]
            brought = self._made_for(mine, receive.row.needs[0].offset)
            unused = mine[~np.isin(brought, np.concatenate(needed))]
            unused = unused[self._fresh(self.values(unused))]

            message = "nothing on worker {worker} needs this value"
            self._report("unused-transfer", Defect(message, "remove the receive and its send", unused))

    def _made_for(self, pieces: Rows, offset: int) -> Rows:
        """The worker of each piece, and the value that the stage `offset` from it makes of its micro-batch, as one
        number."""
        made = self.inspection.cell[pieces] + offset * self.shape.global_micro_batches
        return made * self.shape.worker_count + self.inspection.pieces.worker[pieces]
