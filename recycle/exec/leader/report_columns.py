"""The reports of an iteration: whether hosts agree, and what their losses, norms and times amount to.

Thousands of reports come at once. One loop compares each with the first one of the same stage; only where two differ
does `disagreement.compare` find out who is odd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite, nan
from typing import TypeAlias

from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.members import parse_members
from recycle.exec.protocol import Replayed, Report
from recycle.job.shape import Worker

_Parts = Sequence[float]
_Values: TypeAlias = tuple[_Parts | None, _Parts | None, int | None, tuple[int, int] | None]
_NOT_FINITE: _Parts = (nan,)


@dataclass(frozen=True, eq=False)
class ReportColumns:
    """The reports of all processes of an iteration. Create them with `of`.

    Attributes:
        reports: process -> its report.
        members: worker and tensor rank of each.
        agree: all numbers are equal that must be equal; may be False also where `disagreement.compare` passes.
        squared_norms: numbers whose exact sum is the squared norm of all gradients, by the first host of each stage.
            Only NaN where a number of some host is not finite.
        loss_sum: of all workers' losses, in the order of their names.
        replayed: (process, what it reports) of each micro-batch that was replayed.
        has_states: every process that hosts a stage reports the state that it began with, in part if it still copies
            shards.
    """

    reports: Mapping[str, Report]
    members: Sequence[tuple[Worker, int]]
    agree: bool
    squared_norms: Sequence[float]
    loss_sum: float
    replayed: Sequence[tuple[str, Replayed]]
    has_states: bool

    @classmethod
    def of(cls, reports: Mapping[str, Report]) -> ReportColumns:
        """The reports of an iteration, by process."""
        members = parse_members(tuple(reports))
        agree, is_finite, compared = True, True, set[bool]()
        hosted: dict[tuple[int, int], _Values] = {}
        replicated: dict[int, _Parts] = {}
        losses: dict[str, float] = {}
        firsts: dict[Worker, Report] = {}
        replayed: list[tuple[str, Replayed]] = []
        for (worker, rank), (member, report) in zip(members, reports.items(), strict=True):
            first = firsts.setdefault(worker, report)
            if first is not report and (first.loss != report.loss or first.replicated != report.replicated):
                agree = False
            if report.loss is not None and rank == 0:
                losses[member] = report.loss
            if report.replayed:
                replayed += [(member, work) for work in report.replayed]
            if report.norms:
                compared.add(bool(report.states))
            for stage, norm in report.norms.items():
                checksum, state = report.checksums.get(stage), report.states.get(stage)
                values: _Values = norm, report.replicated.get(stage), checksum, state
                if hosted.get((rank, stage)) == values:
                    continue  # finite, as the first one is
                own, shared = _finite(norm), _finite(values[1])
                if own is _NOT_FINITE or shared is _NOT_FINITE:
                    is_finite, checksum = False, None
                if shared is not None:
                    replicated.setdefault(stage, shared)
                values = own, shared, checksum, state
                if hosted.setdefault((rank, stage), values) != values:
                    agree = False
        norms = [*(values[0] or () for values in hosted.values()), *replicated.values()] if is_finite else [_NOT_FINITE]
        loss_sum = 0.0
        for member in sorted(losses):  # not sum(): from Python 3.12 on it compensates for rounding
            loss_sum += losses[member]
        return cls(reports, members, agree, list(chain(*norms)), loss_sum, replayed, compared == {True})

    def states(self) -> dict[Worker, set[int]]:
        """Worker -> the numbers of the states that all its tensor ranks report."""
        numbers: dict[Worker, set[int]] = {}
        for (worker, _), report in zip(self.members, self.reports.values(), strict=True):
            numbers[worker] = numbers.get(worker, report.states.keys()) & report.states.keys()
        return numbers

    def times(self) -> ComputeTimes:
        """What the workers computed, by their processes of tensor rank 0."""
        rows = zip(self.members, self.reports.values(), strict=True)
        return ComputeTimes.of({worker: report for (worker, rank), report in rows if rank == 0})


def _finite(parts: _Parts | None) -> _Parts | None:
    return parts if parts is None or all(map(isfinite, parts)) else _NOT_FINITE
