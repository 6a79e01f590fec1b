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
from recycle.shape import Worker

_Parts = Sequence[float]
_Values: TypeAlias = tuple[_Parts, _Parts | None, int | None, tuple[int, int] | None]
_NOT_FINITE: _Parts = (nan,)


@dataclass(frozen=True, eq=False)
class ReportColumns:
    """The reports of all processes of an iteration. Create them with `of`.

    Attributes:
        replayed: (process, what it reports) of each micro-batch that was replayed.
        has_states: every process that hosts a stage reports the state that it began with, in part if it still copies
            shards.
    """

    _reports: Mapping[str, Report]
    _rows: Sequence[tuple[Worker, int, Report]]
    _agree: bool
    _norms: Sequence[_Parts]
    _losses: Mapping[str, float]
    replayed: Sequence[tuple[str, Replayed]]
    has_states: bool

    @classmethod
    def of(cls, reports: Mapping[str, Report]) -> ReportColumns:
        """The reports of an iteration, by process."""
        members = parse_members(tuple(reports))
        rows: list[tuple[Worker, int, Report]] = []
        agree, is_finite, hosts, hosts_with_states = True, True, 0, 0
        hosted: dict[tuple[int, int], _Values] = {}
        norms: dict[int, _Parts] = {}
        losses: dict[str, float] = {}
        firsts: dict[Worker, Report] = {}
        replayed: list[tuple[str, Replayed]] = []
        norm: _Parts
        values: _Values
        for (worker, rank), (member, report) in zip(members, reports.items(), strict=True):
            rows.append((worker, rank, report))
            loss, replicated, checksums, states = report.loss, report.replicated, report.checksums, report.states
            first = firsts.setdefault(worker, report)
            if first is not report and (first.loss != loss or first.replicated != replicated):
                agree = False
            if loss is not None and rank == 0:
                losses[member] = loss
            if report.replayed:
                replayed += [(member, work) for work in report.replayed]
            if report.norms:
                hosts += 1
                hosts_with_states += bool(states)
            for stage, norm in report.norms.items():
                shared: _Parts | None = replicated.get(stage)
                checksum = checksums.get(stage)
                values = norm, shared, checksum, states.get(stage)
                if hosted.get((rank, stage)) == values:
                    continue  # finite, as the first one is
                if not all(map(isfinite, norm)):
                    norm, checksum, is_finite = _NOT_FINITE, None, False
                if shared is not None:
                    if not all(map(isfinite, shared)):
                        shared, checksum, is_finite = _NOT_FINITE, None, False
                    norms.setdefault(stage, shared)
                values = norm, shared, checksum, states.get(stage)
                if hosted.setdefault((rank, stage), values) != values:
                    agree = False
        own = [values[0] for values in hosted.values()]
        parts = [*own, *norms.values()] if is_finite else [_NOT_FINITE]
        return cls(reports, rows, agree, parts, losses, replayed, 0 < hosts == hosts_with_states)

    def reports(self) -> Mapping[str, Report]:
        """Process -> its report."""
        return self._reports

    def agree(self) -> bool:
        """Whether all numbers are equal that must be equal; may be False also where `disagreement.compare` passes."""
        return self._agree

    def states(self) -> dict[Worker, set[int]]:
        """Worker -> the numbers of the states that all its tensor ranks report."""
        numbers: dict[Worker, set[int]] = {}
        for worker, _, report in self._rows:
            numbers[worker] = numbers.get(worker, report.states.keys()) & report.states.keys()
        return numbers

    def squared_norms(self) -> list[float]:
        """Numbers whose exact sum is the squared norm of all gradients, by the first host of each stage.

        Only NaN where a number of some host is not finite.
        """
        return list(chain.from_iterable(self._norms))

    def loss_sum(self) -> float:
        """The sum of all workers' losses, in the order of their names."""
        total = 0.0
        for member in sorted(self._losses):  # not sum(): from Python 3.12 on it compensates for rounding
            total += self._losses[member]
        return total

    def times(self) -> ComputeTimes:
        """What the workers computed, by their processes of tensor rank 0."""
        firsts = {worker: report for worker, rank, report in self._rows if rank == 0}
        return ComputeTimes.of(
            {worker: report.compute for worker, report in firsts.items()},
            {worker: report.links for worker, report in firsts.items()},
        )
