"""The reports of an iteration: whether hosts agree, and what their losses, norms and times amount to.

Thousands of reports come at once. One loop compares each with the first one of the same stage; only where two differ
does `disagreement.compare` find out who is odd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite, nan

from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.members import parse_members
from recycle.exec.protocol import Replayed, Report
from recycle.shape import Worker

_Parts = Sequence[float]
_NOT_FINITE: _Parts = (nan,)


@dataclass(frozen=True, eq=False)
class ReportColumns:
    """The reports of all processes of an iteration. Create them with `of`."""

    _reports: Mapping[str, Report]
    _rows: Sequence[tuple[Worker, int, Report]]
    _hosts_agree: bool
    _norms: Sequence[_Parts]

    @classmethod
    def of(cls, reports: Mapping[str, Report]) -> ReportColumns:
        """The reports of an iteration, by process."""
        members = parse_members(tuple(reports))
        rows = [(worker, rank, report) for (worker, rank), report in zip(members, reports.values(), strict=True)]
        agree, is_finite = True, True
        hosted: dict[tuple[int, int], tuple[_Parts, _Parts | None, int | None, tuple[int, int] | None]] = {}
        norms: dict[int, _Parts] = {}
        norm: _Parts
        shared: _Parts | None
        for _, rank, report in rows:
            replicated, checksums, states = report.replicated, report.checksums, report.states
            for stage, norm in report.norms.items():
                shared, checksum = replicated.get(stage), checksums.get(stage)
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
        return cls(reports, rows, agree, [*own, *norms.values()] if is_finite else [_NOT_FINITE])

    def reports(self) -> Mapping[str, Report]:
        """Process -> its report."""
        return self._reports

    @property
    def replayed(self) -> list[tuple[str, Replayed]]:
        """(process, what it reports) of each micro-batch that was replayed."""
        return [(member, work) for member, report in self._reports.items() for work in report.replayed]

    def agree(self) -> bool:
        """Whether all numbers are equal that must be equal; may be False also where `disagreement.compare` passes."""
        return self._hosts_agree and _ranks_agree((worker, report) for worker, _, report in self._rows)

    @property
    def has_states(self) -> bool:
        """Whether every process that hosts a stage reports the state that it began with, in part if it still copies
        shards."""
        states = [report.states for _, _, report in self._rows if report.norms]
        return bool(states) and all(states)

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
        losses = {
            member: report.loss
            for member, (_, rank, report) in zip(self._reports, self._rows, strict=True)
            if rank == 0 and report.loss is not None
        }
        total = 0.0
        for member in sorted(losses):  # not sum(): from Python 3.12 on it compensates for rounding
            total += losses[member]
        return total

    def times(self) -> ComputeTimes:
        """What the workers computed, by their processes of tensor rank 0."""
        firsts = {worker: report for worker, rank, report in self._rows if rank == 0}
        return ComputeTimes.of(
            {worker: report.compute for worker, report in firsts.items()},
            {worker: report.links for worker, report in firsts.items()},
        )


def _ranks_agree(rows: Iterable[tuple[Worker, Report]]) -> bool:
    first: dict[Worker, tuple[float | None, dict[int, list[float]]]] = {}
    return all(
        first.setdefault(worker, (report.loss, report.replicated)) == (report.loss, report.replicated)
        for worker, report in rows
    )
