"""Transfers: each value that crosses to another worker is sent once and received once, in the same order at both ends.

The rules share one table of what is wrong with which value, so that one defect (a transfer whose peer was changed,
say) is reported once, by its nearest cause, and not again for each of its ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from recycle.ir.columns import Flags, Rows
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
from recycle.ir.rules.rule import Defect, Inspection, Rest, described, firsts, repeats, rest, rule
from recycle.ir.unmet import Unmet, Why
from recycle.shape import Worker


def _reported_as(inspection: Inspection, code: str) -> list[Defect | Rest]:
    return _examined(inspection).found.get(code, [])


def are_reported(inspection: Inspection, rows: Rows) -> Flags:
    """Whether a finding about the value of the transfer in each given row is there, so that no more need be said."""
    examination = _examined(inspection)
    return examination.are_reported(examination.values(rows))


@rule("wrong-peer", "the two ends of a transfer name different workers")
def wrong_peer(inspection: Inspection) -> list[Defect | Rest]:
    """A SEND names the worker that receives, the RECV the worker that sends. Where the value is sent to one worker
    and awaited by another (or from another), both ends wait for ever. A transfer from a worker to itself is wrong
    too: a value that stays on its worker needs none."""
    return _reported_as(inspection, "wrong-peer")


@rule("duplicate-transfer", "a value sent or received twice")
def duplicate_transfer(inspection: Inspection) -> list[Defect | Rest]:
    """Transfers are matched by their order between two workers, so a second SEND or RECV of the same value shifts
    every later one onto wrong data. Remove it."""
    return _reported_as(inspection, "duplicate-transfer")


@rule("not-made-here", "a send of a value that its worker does not make")
def not_made_here(inspection: Inspection) -> list[Defect | Rest]:
    """A worker can send only what one of its own instructions makes: SEND_F the activation of an F, SEND_B the
    gradient of an I or B, of the same stage and micro-batch. Move the SEND to the worker that runs the producer."""
    return _reported_as(inspection, "not-made-here")


@rule("unreceived", "a send that nobody receives")
def unreceived(inspection: Inspection) -> list[Defect | Rest]:
    """A SEND without a RECV at the other end fills a buffer that is never emptied, or blocks, and shifts later
    transfers between the two workers onto wrong data. Add the RECV, or remove the SEND."""
    return _reported_as(inspection, "unreceived")


@rule("unsent", "a receive that nobody sends to")
def unsent(inspection: Inspection) -> list[Defect | Rest]:
    """A RECV without a SEND at the other end waits for ever. Add the SEND, or remove the RECV."""
    return _reported_as(inspection, "unsent")


@rule("no-transfer", "a value that is needed on another worker and never sent")
def no_transfer(inspection: Inspection) -> list[Defect | Rest]:
    """In a schedule with transfers every value that crosses to another worker needs its SEND and RECV. Add the pair,
    or take all transfers out and `lower` the schedule again."""
    return _reported_as(inspection, "no-transfer")


@rule("unused-transfer", "a value received where nothing needs it", "warning")
def unused_transfer(inspection: Inspection) -> list[Defect | Rest]:
    """The transfer is in order at both ends, but no instruction of the receiving worker needs the value. It costs
    time on its lane and a buffer. Remove both ends."""
    return _reported_as(inspection, "unused-transfer")


@rule("fifo", "receives in another order than the sends")
def fifo(inspection: Inspection) -> Iterator[Defect | Rest]:
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
    _, places, counts = firsts(lane[by_receive][differ])
    rows, arriving = receive[by_receive[differ[places]]], send[by_send[differ[places]]]
    for row, arrives, wrong in described(rows, arriving, counts):
        yield Defect(
            f"what arrives here is {inspection.at(arrives)}, matched by order ({wrong} receives of this pair of workers"
            f" get another value)",
            "receive in the order in which the peer sends",
            row,
            others=(arrives,),
        )
    yield rest(places)


def _examined(inspection: Inspection) -> _TransferExamination:
    if _examined not in inspection.shared:
        inspection.shared[_examined] = _TransferExamination(inspection)
    examination: _TransferExamination = inspection.shared[_examined]
    return examination


@dataclass(frozen=True)
class _Values:
    """What some transfers carry or some instructions wait for, as columns.

    Attributes:
        kind: `ValueKind`.
        stage, micro_batch: who makes it, -1 or P * V where there is no such stage; the micro-batch as global id.
    """

    kind: Rows
    stage: Rows
    micro_batch: Rows

    def take(self, places: Rows | Flags) -> _Values:
        return _Values(self.kind[places], self.stage[places], self.micro_batch[places])


def _consumer(kind: int) -> int:
    """Where a transfer brings a value of this kind: the stage, relative to that which makes it."""
    return -CARRIERS[ValueKind(kind)][1].row.needs[0].offset


_CONSUMER = np.array([_consumer(kind) for kind in CARRIERS], dtype=np.int64)
_CARRIED, _MAKER = (np.zeros(MOST_KINDS, dtype=np.int64) for _ in range(2))
"""Number of a transfer's kind -> what it carries; the stage that makes that, relative to the transfer's own."""
for _end in chain.from_iterable(CARRIERS.values()):
    _CARRIED[_end.kind], _MAKER[_end.kind] = _end.row.needs[0].value, _end.row.needs[0].offset


class _TransferExamination:
    """Looks for defects of transfers, from the nearest causes to the farthest, and reports each value once.

    Attributes:
        found: code of the rule that reports it -> defects, and how many more there are.
    """

    def __init__(self, inspection: Inspection) -> None:
        self.inspection, self.schedule, self.shape = inspection, inspection.schedule, inspection.schedule.shape
        self.columns = self.schedule.columns
        self.found: dict[str, list[Defect | Rest]] = {}
        self._reported = np.zeros((len(CARRIERS), self.shape.stages + 2, self.shape.global_micro_batches), np.bool_)
        if inspection.has_transfers:
            self._examine()

    def values(self, rows: Rows) -> _Values:
        """What the transfers in given rows carry."""
        kind, pieces = self.columns.kind[rows], self.inspection.pieces
        return _Values(_CARRIED[kind], pieces.stage[rows] + _MAKER[kind], pieces.micro_batch[rows])

    def are_reported(self, values: _Values) -> Flags:
        """Whether a defect of each value is reported, or its producer or consumer has one from which others follow."""
        reported: Flags = self._reported[values.kind, values.stage + 1, values.micro_batch]
        for stage in (values.stage, values.stage + _CONSUMER[values.kind]):
            inside = (stage >= 0) & (stage < self.shape.stages)
            cells = np.where(inside, stage, 0) * self.shape.global_micro_batches + values.micro_batch
            reported = reported | (inside & self.inspection.broken[cells])
        return reported

    def _examine(self) -> None:
        inspection, c, pieces = self.inspection, self.columns, self.inspection.pieces
        rows = np.flatnonzero(is_kind(pieces.kind, Transfer) & pieces.valid)  # a transfer's row is its piece
        gone = inspection.dead[c.worker[rows]] | inspection.dead[c.peer[rows]]
        self._mark(self.values(rows[gone]))
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

    def _keys(self, values: _Values) -> Rows:
        """Each value as one number."""
        stage = values.kind * (self.shape.stages + 2) + values.stage + 1
        return stage * self.shape.global_micro_batches + values.micro_batch

    def _mark(self, values: _Values) -> None:
        self._reported[values.kind, values.stage + 1, values.micro_batch] = True

    def _report(self, code: str, values: _Values, describe: Callable[[int], Defect]) -> None:
        """Report each of the values once, unless it is reported already.

        Args:
            describe: place among the values -> defect.
        """
        fresh = np.flatnonzero(~self.are_reported(values))
        kept = values.take(fresh)
        places = fresh[np.sort(np.unique(self._keys(kept), return_index=True)[1])]
        self._mark(kept)
        self.found.setdefault(code, []).extend((*(describe(place) for (place,) in described(places)), rest(places)))

    def _to_itself(self, rows: Rows) -> None:
        self._report(
            "wrong-peer",
            self.values(rows),
            lambda place: Defect(
                "a transfer from a worker to itself",
                "remove both ends if the consumer is on this worker, else name the other worker",
                int(rows[place]),
            ),
        )

    def _twice(self, rows: Rows) -> None:
        c = self.columns
        ends = (c.worker[rows].astype(np.int64) * self.shape.worker_count + c.peer[rows]) * MOST_KINDS + c.kind[rows]
        keys = np.unique(ends, return_inverse=True)[1].astype(np.int64)
        again, first = repeats(keys * self.inspection.cells + self.inspection.cell[rows])
        again, first = rows[again], rows[first]

        def describe(place: int) -> Defect:
            row, original = int(again[place]), int(first[place])
            verb = "sent" if issubclass(KIND_CLASSES[c.kind[row]], Send) else "received"
            message = f"the value is {verb} already: {self.inspection.at(original)}"
            return Defect(message, "remove one of the two", row, others=(original,))

        self._report("duplicate-transfer", self.values(again), describe)

    def _not_made(self) -> None:
        far = self.inspection.graph.missing.with_reason(Why.NOT_LOCAL)
        rows, values = self._given(far.take(is_kind(self.inspection.lowered.columns.kind[far.row], Send)))

        def describe(place: int) -> Defect:
            row, made_in = int(rows[place]), self._rows_with(values, place)
            where = f"worker {self._worker(made_in[0])} makes this value" if made_in else "nobody makes this value"
            message = f"{where}, not worker {self._worker(row)}"
            return Defect(message, "move the send to the worker that runs its producer", row, others=made_in[:1])

        self._report("not-made-here", values, describe)

    def _given(self, unmet: Unmet) -> tuple[Rows, _Values]:
        """The given rows among those that miss something, and what they miss."""
        unmet = unmet.take(self.inspection.origin[unmet.row] >= 0)
        return self.inspection.origin[unmet.row], _Values(unmet.value, unmet.stage, unmet.micro_batch)

    def _worker(self, row: int) -> Worker:
        return self.schedule.position(row)[0]

    def _rows_with(self, values: _Values, place: int, onward: int = 0) -> tuple[int, ...]:
        """Rows that run the stage `onward` from the one that makes a value (its forward's side for activations, else
        its backward's)."""
        inspection, stage = self.inspection, int(values.stage[place]) + onward
        if not 0 <= stage < self.shape.stages:
            return ()
        classes = (Forward,) if values.kind[place] == ValueKind.ACTIVATION else (Backward, BackwardInput)
        cell = stage * self.shape.global_micro_batches + int(values.micro_batch[place])
        return tuple(inspection.pieces.row[inspection.in_cell(cell, *classes)].tolist())

    def _loose(self, rows: Rows) -> None:
        """Ends without a partner: two of one value belong together, one alone lacks the other."""
        is_send = is_kind(self.columns.kind[rows], Send)
        self._mismatched(rows[is_send], rows[~is_send])
        self._lacking("unreceived", "receives", rows[is_send])
        self._lacking("unsent", "sends", rows[~is_send])

    def _lacking(self, code: str, verb: str, rows: Rows) -> None:
        """Report transfers whose other end is missing."""
        values = self.values(rows)

        def describe(place: int) -> Defect:
            row, kind = int(rows[place]), int(values.kind[place])
            worker, peer = self._worker(row), self.shape.worker_at(self.columns.peer[row])
            onward = _consumer(kind) if code == "unreceived" else 0
            end = CARRIERS[ValueKind(kind)][code == "unreceived"]
            stage = int(values.stage[place]) + onward
            micro_batch = self.inspection.micro_batch(values.micro_batch[place])
            where = "before its consumer" if issubclass(end, Receive) else "behind its producer"
            hint = f"add {stage}{end.token}{micro_batch}@{worker} to worker {peer} {where}"
            if not 0 <= stage < self.shape.stages:
                needs, this = ("needs", "send") if issubclass(end, Receive) else ("makes", "receive")
                hint = f"no stage {needs} this value: remove the {this}"
            others = self._rows_with(values, place, onward)[:1]
            return Defect(f"worker {peer} never {verb} it", hint, row, others=others)

        self._report(code, values, describe)

    def _mismatched(self, sends: Rows, receives: Rows) -> None:
        """Both ends of one value, which do not match."""
        sent, received = self._keys(self.values(sends)), self._keys(self.values(receives))
        _, first_send, first_receive = np.intersect1d(sent, received, return_indices=True)
        sends, receives = sends[first_send], receives[first_receive]
        values = self.values(sends)

        def describe(place: int) -> Defect:
            send, receive = int(sends[place]), int(receives[place])
            sender, receiver = self._worker(send), self._worker(receive)
            makers = [self._worker(row) for row in self._rows_with(values, place)]
            users = [self._worker(row) for row in self._rows_with(values, place, _consumer(values.kind[place]))]
            # The end that disagrees with where the value is made and needed is the wrong one.
            send_fits = sender in makers and self.shape.worker_at(self.columns.peer[send]) in users
            row, other = (receive, send) if send_fits or receiver not in users else (send, receive)
            right = (sender if row == receive else receiver) if receiver in users else None
            hint = f"name worker {right} in it" if right else f"move it to worker {(users or [receiver])[0]}"
            message = f"the other end is {self.inspection.at(other)}, and the two do not match"
            return Defect(message, hint, row, others=(other,))

        self._report("wrong-peer", values, describe)

    def _untransferred(self) -> None:
        rows, values = self._given(self.inspection.graph.missing.with_reason(Why.NOT_RECEIVED))

        def describe(place: int) -> Defect:
            stage, micro_batch = values.stage[place], self.inspection.micro_batch(values.micro_batch[place])
            made_in = self._rows_with(values, place)
            send, receive = (end.token for end in CARRIERS[ValueKind(values.kind[place])])
            where = f" on worker {self._worker(made_in[0])}" if made_in else ""
            needed = f"what stage {stage} makes of micro-batch {micro_batch}{where}"
            return Defect(
                f"it needs {needed}, and no transfer brings it here",
                f"add a {send} there and a {receive} here",
                int(rows[place]),
                others=made_in[:1],
            )

        self._report("no-transfer", values, describe)

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
            self._report_unused(mine[~np.isin(brought, np.concatenate(needed))])

    def _report_unused(self, rows: Rows) -> None:
        def describe(place: int) -> Defect:
            row = int(rows[place])
            message = f"nothing on worker {self._worker(row)} needs this value"
            return Defect(message, "remove the receive and its send", row)

        self._report("unused-transfer", self.values(rows), describe)

    def _made_for(self, pieces: Rows, offset: int) -> Rows:
        """The worker of each piece, and the value that the stage `offset` from it makes of its micro-batch, as one
        number."""
        made = self.inspection.cell[pieces] + offset * self.shape.global_micro_batches
        return made * self.shape.worker_count + self.inspection.pieces.worker[pieces]
