"""The reports of an iteration as columns: one row per process, per stage that it hosts, per kind of instruction it ran.

Thousands of reports come at once, so nothing here is done one by one: texts of one layout are read as one array
(packed_report.py), and who agrees with whom is found in whole columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.exec.leader.compute_times import ComputeTimes, LinkTimes
from recycle.exec.members import Members, members_columns
from recycle.exec.membership.packed_report import (
    HAS_CHECKSUM,
    HAS_REPLICATED,
    HAS_STATE,
    HEAD_CHARACTERS,
    has_loss,
    pack_report,
    replayed_of,
    unpack_report,
    unpack_rows,
)
from recycle.exec.protocol import Replayed, Report
from recycle.shape import Worker

Column = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class ReportColumns:
    """Reports of processes.

    Attributes:
        members: names of the processes.
        losses: of each process, and whether it has one.
        host, stage, flags, norms, replicated, checksum, state: of each hosted stage, ordered by process: the place of
            the process in `members`, and what its report says of the stage. Norms are filled up with zeros.
        ran, of_stage, token, count, seconds: of each kind of instruction, likewise.
        linked, link_pipeline, link_rank, sent, link_seconds, waited: of each other process that it has messages with,
            likewise.
        replayed: (process, what it says) of each micro-batch that was replayed.
    """

    members: Sequence[str]
    texts: Sequence[str]
    losses: Column
    has_loss: Column
    host: Column
    stage: Column
    flags: Column
    norms: Column
    replicated: Column
    checksum: Column
    state: Column
    ran: Column
    of_stage: Column
    token: Column
    count: Column
    seconds: Column
    linked: Column
    link_pipeline: Column
    link_rank: Column
    sent: Column
    link_seconds: Column
    waited: Column
    replayed: Sequence[tuple[str, Replayed]] = field(default=(), kw_only=True)

    @classmethod
    def read(cls, texts: Mapping[str, str]) -> ReportColumns:
        """Of process -> the text of its report. Raises ValueError when one is not a report."""
        alike: dict[str, list[int]] = {}
        written = list(texts.values())
        for place, text in enumerate(written):
            alike.setdefault(text[:HEAD_CHARACTERS], []).append(place)
        losses, said = np.zeros(len(written)), np.zeros(len(written), bool)
        stages, computed, links = list[dict[str, Column]](), list[dict[str, Column]](), list[dict[str, Column]]()
        replayed: list[tuple[str, Replayed]] = []
        members = list(texts)
        for places in alike.values():
            rows = unpack_rows([written[place] for place in places])
            losses[places], said[places] = rows["loss"], has_loss(rows)
            if rows["replayed"].size:
                of_processes = zip(places, rows["replayed"], strict=True)
                replayed += [(members[place], one) for place, of in of_processes for one in replayed_of(of)]
            for found, name in ((stages, "stages"), (computed, "computed"), (links, "links")):
                of = rows[name]
                columns = {field: of[field].reshape(of.size, *of[field].shape[2:]) for field in of.dtype.names or ()}
                found.append({"process": np.repeat(places, of.shape[1]), **columns})
        one, other, third = _joined(stages), _joined(computed), _joined(links)
        return cls(
            members,
            written,
            losses,
            said,
            *(one[name] for name in ("process", "stage", "flags", "norms", "replicated", "checksum", "state")),
            *(other[name] for name in ("process", "stage", "token", "count", "seconds")),
            *(third[name] for name in ("process", "pipeline", "rank", "sent", "seconds", "waited")),
            replayed=replayed,
        )

    @classmethod
    def of(cls, reports: Mapping[str, Report]) -> ReportColumns:
        """Of process -> its report."""
        return cls.read({member: pack_report(report) for member, report in reports.items()})

    def reports(self) -> dict[str, Report]:
        """Process -> its report."""
        return {member: unpack_report(text) for member, text in zip(self.members, self.texts, strict=True)}

    @cached_property
    def _of(self) -> Members:
        return members_columns(tuple(self.members))

    @cached_property
    def is_finite(self) -> Column:
        """Of each hosted stage: whether its own norm is, and that of what all tensor ranks hold."""
        return np.stack([np.isfinite(self.norms).all(axis=1), np.isfinite(self.replicated).all(axis=1)])

    def agree(self) -> bool:
        """Whether all numbers have the same bits that must have them; False also where they may be the same."""
        own, common = self.is_finite
        finite = own & common
        said = [
            np.where(own[:, None], self.norms, np.nan).view(np.uint64),
            np.where(common[:, None], self.replicated, np.nan).view(np.uint64),
            np.where(finite, self.checksum, 0)[:, None],
            np.where(finite, self.flags & HAS_CHECKSUM, 0).astype(np.uint64)[:, None],
            self.state,
            (self.flags & HAS_STATE).astype(np.uint64)[:, None],
        ]
        ranks = self._of.tensor_ranks
        if not _equal_within((ranks[self.host], self.stage), np.concatenate(said, axis=1)):
            return False
        if not ranks.any():
            return True
        workers = self._of.worker
        held = np.concatenate([said[1], (self.flags & HAS_REPLICATED).astype(np.uint64)[:, None]], axis=1)
        losses = np.stack([self.losses.view(np.uint64), self.has_loss.astype(np.uint64)], axis=1)
        return _equal_within((workers[self.host], self.stage), held) and _equal_within((workers,), losses)

    @property
    def has_states(self) -> bool:
        """Whether every process that hosts a stage says what state it began with, in part if it still copies shards."""
        said = self.host[(self.flags & HAS_STATE) > 0]
        return len(said) > 0 and bool(np.isin(self.host, said).all())

    def states(self) -> dict[Worker, set[int]]:
        """Worker -> the numbers of the states that all its tensor ranks say."""
        said = np.flatnonzero(self.flags & HAS_STATE)
        processes = Counter(self._of.worker.tolist())
        told = Counter(zip(self._of.worker[self.host[said]].tolist(), self.stage[said].tolist(), strict=True))
        numbers: dict[Worker, set[int]] = {worker: set() for worker in self._of.workers}
        for (place, number), count in told.items():
            if count == processes[place]:
                numbers[self._of.workers[place]].add(number)
        return numbers

    def squared_norms(self) -> list[float]:
        """Numbers whose exact sum is the squared norm of all gradients, by the first host of each stage.

        Not a number is among them where one of the hosts has that.
        """
        if not self.is_finite.all():
            return [float("nan")]
        ranks = self._of.tensor_ranks[self.host]
        firsts = _first_of((ranks, self.stage))
        shared = np.flatnonzero(self.flags & HAS_REPLICATED)
        common = shared[_first_of((self.stage[shared],))]
        return [*self.norms[firsts].ravel().tolist(), *self.replicated[common].ravel().tolist()]

    def loss_sum(self) -> float:
        """The sum of all workers' losses, in the order of their names."""
        places = np.flatnonzero(self.has_loss & (self._of.tensor_ranks == 0)).tolist()
        return float(sum(loss for _, loss in sorted((self.members[place], self.losses[place]) for place in places)))

    def times(self) -> ComputeTimes:
        """What the workers computed, by their processes of tensor rank 0."""
        mine = self._of.tensor_ranks[self.ran] == 0
        tokens, kinds = np.unique(self.token[mine], return_inverse=True)
        return ComputeTimes(
            self._of.workers,
            self._of.worker[self.ran[mine]],
            self.of_stage[mine].astype(np.int64),
            [token.decode() for token in tokens],
            kinds,
            self.count[mine].astype(np.float64),
            self.seconds[mine],
            self._links(),
        )

    def _links(self) -> LinkTimes:
        firsts = self._of.tensor_ranks[self.linked] == 0
        workers = self._of.workers
        mine = np.array([(worker.pipeline, worker.rank) for worker in workers], np.int64).reshape(-1, 2)
        peers = np.stack([self.link_pipeline[firsts], self.link_rank[firsts]], axis=1).astype(np.int64)
        return LinkTimes(
            mine[self._of.worker[self.linked[firsts]]],
            peers,
            self.sent[firsts].astype(np.int64),
            self.link_seconds[firsts].astype(np.float64),
            self.waited[firsts].astype(np.float64),
        )


def _joined(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """The rows of all parts, ordered by process; what is narrower than elsewhere is filled up with zeros."""
    joined: dict[str, Column] = {}
    order = np.argsort(np.concatenate([part["process"] for part in parts]), kind="stable")
    for name in parts[0]:
        columns = [part[name] for part in parts]
        if columns[0].ndim == 2:
            width = max(column.shape[1] for column in columns)
            columns = [np.pad(column, ((0, 0), (0, width - column.shape[1]))) for column in columns]
        joined[name] = np.concatenate(columns)[order]
    return joined


def _first_of(keys: tuple[Column, ...]) -> Column:
    """The first row of each group of rows that have the same keys."""
    order, begins = _groups(keys)
    return order[begins]


def _equal_within(keys: tuple[Column, ...], rows: Column) -> bool:
    """Whether rows with the same keys are the same."""
    order, begins = _groups(keys)
    ordered = rows[order]
    same = (ordered[1:] == ordered[:-1]).all(axis=1)
    return bool((same | begins[1:]).all())


def _groups(keys: tuple[Column, ...]) -> tuple[Column, Column]:
    """An order of the rows in which those with the same keys are neighbours, and where another group begins in it."""
    order = np.lexsort(keys)
    begins = np.ones(len(order), bool)
    if len(order):
        begins[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    return order, begins
