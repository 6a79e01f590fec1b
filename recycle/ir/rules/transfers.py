"""Transfers: each value that crosses to another worker is sent once and received once, in the same order at both ends.

The rules share one table of what is wrong with which value, so that one defect (a transfer whose peer was changed,
say) is reported once, by its nearest cause, and not again for each of its ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.columns import Rows
from recycle.ir.dependencies import Value, Why
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
from recycle.ir.rules.rule import Defect, Inspection, firsts, repeats, rule
from recycle.shape import MicroBatch, Worker


def _reported_as(inspection: Inspection, code: str) -> list[Defect]:
    return _examined(inspection).found.get(code, [])


def is_reported(inspection: Inspection, row: int) -> bool:
    """Whether a finding about the value of the transfer in a given row is there, so that no more need be said of it."""
    examination = _examined(inspection)
    return examination.is_reported(examination.value(row))


@rule("wrong-peer", "the two ends of a transfer name different workers")
def wrong_peer(inspection: Inspection) -> list[Defect]:
    """A SEND names the worker that receives, the RECV the worker that sends. Where the value is sent to one worker
    and awaited by another (or from another), both ends wait for ever. A transfer from a worker to itself is wrong
    too: a value that stays on its worker needs none."""
    return _reported_as(inspection, "wrong-peer")


@rule("duplicate-transfer", "a value sent or received twice")
def duplicate_transfer(inspection: Inspection) -> list[Defect]:
    """Transfers are matched by their order between two workers, so a second SEND or RECV of the same value shifts
    every later one onto wrong data. Remove it."""
    return _reported_as(inspection, "duplicate-transfer")


@rule("not-made-here", "a send of a value that its worker does not make")
def not_made_here(inspection: Inspection) -> list[Defect]:
    """A worker can send only what one of its own instructions makes: SEND_F the activation of an F, SEND_B the
    gradient of an I or B, of the same stage and micro-batch. Move the SEND to the worker that runs the producer."""
    return _reported_as(inspection, "not-made-here")


@rule("unreceived", "a send that nobody receives")
def unreceived(inspection: Inspection) -> list[Defect]:
    """A SEND without a RECV at the other end fills a buffer that is never emptied, or blocks, and shifts later
    transfers between the two workers onto wrong data. Add the RECV, or remove the SEND."""
    return _reported_as(inspection, "unreceived")


@rule("unsent", "a receive that nobody sends to")
def unsent(inspection: Inspection) -> list[Defect]:
    """A RECV without a SEND at the other end waits for ever. Add the SEND, or remove the RECV."""
    return _reported_as(inspection, "unsent")


@rule("no-transfer", "a value that is needed on another worker and never sent")
def no_transfer(inspection: Inspection) -> list[Defect]:
    """In a schedule with transfers every value that crosses to another worker needs its SEND and RECV. Add the pair,
    or take all transfers out and `lower` the schedule again."""
    return _reported_as(inspection, "no-transfer")


@rule("unused-transfer", "a value received where nothing needs it", "warning")
def unused_transfer(inspection: Inspection) -> list[Defect]:
    """The transfer is in order at both ends, but no instruction of the receiving worker needs the value. It costs
    time on its lane and a buffer. Remove both ends."""
    return _reported_as(inspection, "unused-transfer")


@rule("fifo", "receives in another order than the sends")
def fifo(inspection: Inspection) -> Iterator[Defect]:
    """Transfers between two workers are matched by order alone: the n-th SEND goes into the n-th RECV. With the two
    ends in different orders a worker computes on the wrong micro-batch, and nothing raises. Reported once per
    directed pair of workers, at the first RECV that gets another value."""
    if not inspection.has_transfers:
        return
    c, workers = inspection.schedule.columns, inspection.schedule.shape.worker_count
    sends = inspection.graph.sends
    receive = np.flatnonzero(sends >= 0)
    given = inspection.origin
    receive, send = given[receive], given[sends[receive]]
    known = (receive >= 0) & (send >= 0)
    receive, send = receive[known], send[known]
    lane = c.peer[receive].astype(np.int64) * workers + c.worker[receive]
    by_receive, by_send = np.lexsort((receive, lane)), np.lexsort((send, lane))
    differ = np.flatnonzero(send[by_receive] != send[by_send])
    for _, place, wrong in firsts(lane[by_receive][differ]):
        row, arrives = int(receive[by_receive[differ[place]]]), int(send[by_send[differ[place]]])
        yield Defect(
            f"what arrives here is {inspection.at(arrives)}, matched by order ({wrong} receives of this pair of workers"
            f" get another value)",
            "receive in the order in which the peer sends",
            row,
            others=(arrives,),
        )


def _examined(inspection: Inspection) -> _TransferExamination:
    if _examined not in inspection.shared:
        inspection.shared[_examined] = _TransferExamination(inspection)
    examination: _TransferExamination = inspection.shared[_examined]
    return examination


def _consumer(value: Value) -> int:
    """The stage that a transfer brings the value to."""
    return value.stage - CARRIERS[value.kind][1].row.needs[0].offset


class _TransferExamination:
    """Looks for defects of transfers, from the nearest causes to the farthest, and reports each value once.

    Attributes:
        found: code of the rule that reports it -> defects.
        reported: the values that have a defect here, or a dead worker at one end.
    """

    def __init__(self, inspection: Inspection) -> None:
        self.inspection, self.schedule, self.shape = inspection, inspection.schedule, inspection.schedule.shape
        self.columns = self.schedule.columns
        self.found: dict[str, list[Defect]] = {}
        self.reported: set[Value] = set()
        if inspection.has_transfers:
            self._examine()

    def value(self, row: int) -> Value:
        """What the transfer in a given row carries."""
        c = self.columns
        need = KIND_CLASSES[c.kind[row]].row.needs[0]
        return Value(need.value, int(c.stage[row]) + need.offset, MicroBatch(int(c.pipeline[row]), int(c.index[row])))

    def is_reported(self, value: Value) -> bool:
        """Whether a defect of the value is reported, or its producer or consumer has one from which others follow."""
        broken, micro_batch = self.inspection.is_broken, value.micro_batch
        return value in self.reported or broken(value.stage, micro_batch) or broken(_consumer(value), micro_batch)

    def _examine(self) -> None:
        inspection, c, pieces = self.inspection, self.columns, self.inspection.pieces
        rows = np.flatnonzero(is_kind(pieces.kind, Transfer) & pieces.valid)  # a transfer's row is its piece
        gone = inspection.dead[c.worker[rows]] | inspection.dead[c.peer[rows]]
        self.reported.update(self.value(row) for row in rows[gone].tolist())
        rows = rows[~gone]
        self._to_itself(rows[c.peer[rows] == c.worker[rows]])
        self._twice(rows)
        self._not_made()
        received = np.zeros(len(c), dtype=np.bool_)
        sends_of = inspection.graph.sends
        matched = np.flatnonzero(sends_of >= 0)
        receives = inspection.origin[matched]
        received[receives] = received[inspection.origin[sends_of[matched]]] = True
        self._loose(rows[~received[rows]])
        self._untransferred()
        self._unused(np.sort(receives))

    def _report(self, code: str, row: int, message: str, hint: str, *others: int, value: Value | None = None) -> None:
        """Report a row for a value, that of the transfer which it holds when left out."""
        value = value or self.value(row)
        if not self.is_reported(value):
            self.reported.add(value)
            self.found.setdefault(code, []).append(Defect(message, hint, row, others=others))

    def _to_itself(self, rows: Rows) -> None:
        for row in rows.tolist():
            self._report(
                "wrong-peer", row, "a transfer from a worker to itself",
                "remove both ends if the consumer is on this worker, else name the other worker",
            )  # fmt: skip

    def _twice(self, rows: Rows) -> None:
        c = self.columns
        ends = (c.worker[rows].astype(np.int64) * self.shape.worker_count + c.peer[rows]) * MOST_KINDS + c.kind[rows]
        keys = np.unique(ends, return_inverse=True)[1].astype(np.int64)
        again, first = repeats(keys * self.inspection.cells + self.inspection.cell[rows])
        for row, original in zip(rows[again].tolist(), rows[first].tolist(), strict=True):
            verb = "sent" if issubclass(KIND_CLASSES[c.kind[row]], Send) else "received"
            self._report(
                "duplicate-transfer", row, f"the value is {verb} already: {self.inspection.at(original)}",
                "remove one of the two", original,
            )  # fmt: skip

    def _not_made(self) -> None:
        is_send = is_kind(self.inspection.lowered.columns.kind, Send)
        for missing in self.inspection.graph.missing:
            row, value = self.inspection.given(missing.row), missing.value
            if missing.why != Why.NOT_LOCAL or not is_send[missing.row] or value is None or row is None:
                continue
            makers = self._workers_with(value.stage, value)
            where = f"worker {makers[0]} makes this value" if makers else "nobody makes this value"
            self._report(
                "not-made-here", row, f"{where}, not worker {self.schedule.position(row)[0]}",
                "move the send to the worker that runs its producer",
                *self._rows_with(value.stage, value)[:1],
            )  # fmt: skip

    def _rows_with(self, stage: int, value: Value) -> list[int]:
        """Rows that run `stage` of the micro-batch (its forward's side for activations, else its backward's)."""
        inspection = self.inspection
        if not 0 <= stage < self.shape.stages:
            return []
        classes = (Forward,) if value.kind == ValueKind.ACTIVATION else (Backward, BackwardInput)
        here = inspection.in_cell(inspection.cell_of(stage, value.micro_batch), *classes)
        rows: list[int] = inspection.pieces.row[here].tolist()
        return rows

    def _workers_with(self, stage: int, value: Value) -> list[Worker]:
        return [self.schedule.position(row)[0] for row in self._rows_with(stage, value)]

    def _loose(self, rows: Rows) -> None:
        """Ends without a partner: two of one value belong together, one alone lacks the other."""
        is_send = is_kind(self.columns.kind[rows], Send)
        sends = {self.value(row): row for row in rows[is_send][::-1].tolist()}
        receives = {self.value(row): row for row in rows[~is_send][::-1].tolist()}
        for value in sends.keys() & receives.keys():
            self._mismatch(value, sends[value], receives[value])
        for row in rows[is_send].tolist():
            value = self.value(row)
            self._lacks(row, value, "unreceived", "receives", _consumer(value), CARRIERS[value.kind][1])
        for row in rows[~is_send].tolist():
            value = self.value(row)
            self._lacks(row, value, "unsent", "sends", value.stage, CARRIERS[value.kind][0])

    def _lacks(self, row: int, value: Value, code: str, verb: str, stage: int, end: type[Transfer]) -> None:
        """Report a transfer in `row` whose other `end`, that of `stage`, is missing."""
        worker, peer = self.schedule.position(row)[0], self.shape.worker_at(self.columns.peer[row])
        place = "before its consumer" if issubclass(end, Receive) else "behind its producer"
        hint = f"add {stage}{end.token}{value.micro_batch}@{worker} to worker {peer} {place}"
        if not 0 <= stage < self.shape.stages:
            needs, this = ("needs", "send") if issubclass(end, Receive) else ("makes", "receive")
            hint = f"no stage {needs} this value: remove the {this}"
        self._report(code, row, f"worker {peer} never {verb} it", hint, *self._rows_with(stage, value)[:1])

    def _mismatch(self, value: Value, send: int, receive: int) -> None:
        """The end that disagrees with where the value is made and needed is the wrong one."""
        at, schedule = self.inspection.at, self.schedule
        sender, receiver = schedule.position(send)[0], schedule.position(receive)[0]
        makers = self._workers_with(value.stage, value)
        users = self._workers_with(_consumer(value), value)
        send_fits = sender in makers and self.shape.worker_at(self.columns.peer[send]) in users
        row, other = (receive, send) if send_fits or receiver not in users else (send, receive)
        right = (sender if row == receive else receiver) if receiver in users else None
        hint = f"name worker {right} in it" if right else f"move it to worker {(users or [receiver])[0]}"
        self._report("wrong-peer", row, f"the other end is {at(other)}, and the two do not match", hint, other)

    def _untransferred(self) -> None:
        for missing in self.inspection.graph.missing:
            row, value = self.inspection.given(missing.row), missing.value
            if missing.why != Why.NOT_RECEIVED or value is None or row is None:
                continue
            makers = self._workers_with(value.stage, value)
            send, receive = (end.token for end in CARRIERS[value.kind])
            where = f" on worker {makers[0]}" if makers else ""
            self._report(
                "no-transfer", row,
                f"it needs what stage {value.stage} makes of micro-batch {value.micro_batch}{where}, and no transfer"
                " brings it here",
                f"add a {send} there and a {receive} here", *self._rows_with(value.stage, value)[:1], value=value,
            )  # fmt: skip

    def _unused(self, rows: Rows) -> None:
        pieces = self.inspection.pieces
        for value, (_, receive) in CARRIERS.items():
            needed = []
            for cls in KIND_CLASSES:
                for need in cls.row.needs if issubclass(cls, Compute) else ():
                    if (need.value, need.origin) == (value, Origin.ANY_WORKER):
                        users = np.flatnonzero((pieces.kind == cls.kind) & pieces.valid)
                        needed.append(self._made_for(users, need.offset))
            mine = rows[self.columns.kind[rows] == receive.kind]
            brought = self._made_for(mine, receive.row.needs[0].offset)
            for row in mine[~np.isin(brought, np.concatenate(needed))].tolist():
                self._report(
                    "unused-transfer", row, f"nothing on worker {self.schedule.position(row)[0]} needs this value",
                    "remove the receive and its send",
                )  # fmt: skip

    def _made_for(self, pieces: Rows, offset: int) -> Rows:
        """The worker of each piece, and the value that the stage `offset` from it makes of its micro-batch, as one
        number."""
        made = self.inspection.cell[pieces] + offset * self.shape.global_micro_batches
        return made * self.shape.worker_count + self.inspection.pieces.worker[pieces]
