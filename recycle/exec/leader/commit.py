"""Turns the reports of an iteration into a commit, the next step mode and the verified state: pure functions.

`ReportColumns` compares each report with the first of its stage; `disagreement.compare` runs only if two differ.

A staggered step has clip factor 1. If the norm turns out above the limit or not finite, the iteration is repeated.

**Verified states.** Hosts compare the state at the start of a generation and at a fixed interval. A kept state is a
candidate until all work has been replayed since, within one generation and without differences. Then it becomes the
verified state, which training restores after a disagreement. Agreement alone does not suffice: with one host's wrong
addend all hosts hold the same wrong state. While there is a candidate, later states are compared and not kept, so two
copies suffice. Without replays, a state is verified when its iteration is committed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite, nan
from typing import NamedTuple, TypeAlias

import msgspec

from recycle.errors import RunError
from recycle.exec.checksums import PARAMETERS
from recycle.exec.leader.disagreement import compare, count_votes, stage_name, votes_of
from recycle.exec.leader.metrics import ComputeTimes
from recycle.exec.members import parse_members, split_member
from recycle.exec.protocol import (
    Commit,
    Evaluated,
    EvaluationReport,
    GenerationRecord,
    Replayed,
    Report,
    StepMode,
    Verified,
)
from recycle.job import Job
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts
from recycle.plans.shards import Shards

_Parts = Sequence[float]
_Values: TypeAlias = tuple[_Parts | None, _Parts | None, int | None, tuple[int, int] | None]
_NOT_FINITE: _Parts = (nan,)


@dataclass(frozen=True, eq=False)
class ReportColumns:
    """The reports of all processes for one iteration. Create instances with `from_reports`.

    Attributes:
        reports: process -> report.
        members: worker and tensor rank of each process.
        agree: all numbers that must be equal are equal; may be False where `disagreement.compare` passes.
        squared_norms: numbers whose exact sum is the squared norm of all gradients, by the first host of each stage.
            Only NaN if a number of some host is not finite.
        loss_sum: sum of all workers' losses, in the order of their names.
        replayed: (process, report) of each replayed micro-batch.
        has_states: every process with a stage reports the iteration's first state, in part while it copies shards.
    """

    reports: Mapping[str, Report]
    members: Sequence[tuple[Worker, int]]
    agree: bool
    squared_norms: Sequence[float]
    loss_sum: float
    replayed: Sequence[tuple[str, Replayed]]
    has_states: bool

    @classmethod
    def from_reports(cls, reports: Mapping[str, Report]) -> ReportColumns:
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
                    continue  # the first equal row was finite
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
        for member in sorted(losses):  # from Python 3.12 on, sum() would compensate for rounding
            loss_sum += losses[member]
        return cls(reports, members, agree, list(chain(*norms)), loss_sum, replayed, compared == {True})

    def states(self) -> dict[Worker, set[int]]:
        """Return worker -> numbers of the states that all tensor ranks of the worker report."""
        numbers: dict[Worker, set[int]] = {}
        for (worker, _), report in zip(self.members, self.reports.values(), strict=True):
            numbers[worker] = numbers.get(worker, report.states.keys()) & report.states.keys()
        return numbers

    def times(self) -> ComputeTimes:
        """Return the workers' compute times, as reported by tensor rank 0."""
        rows = zip(self.members, self.reports.values(), strict=True)
        return ComputeTimes.from_reports({worker: report for (worker, rank), report in rows if rank == 0})


def _finite(parts: _Parts | None) -> _Parts | None:
    return parts if parts is None or all(map(isfinite, parts)) else _NOT_FINITE


NEAR = 0.5
"""Share of the clipping limit from which a norm counts as near the limit."""
MOST_LINKS = 24
"""Peers for which a report carries message times, about 50 bytes each."""
WINDOW = 4
"""Recent iterations whose norms decide the step mode."""


def step_mode(recent: Sequence[float], clip: float) -> StepMode:
    """Choose the next step mode: staggered if the last `WINDOW` norms are finite and below half of the limit.

    A wrong staggered step costs an iteration and a new generation, the barrier only part of an iteration.
    """
    window = recent[-WINDOW:]
    return "staggered" if window and all(norm < NEAR * clip for norm in window) else "barrier"


def clip_factor(clip: float, norm_squared: float) -> float:
    """Factor on all gradients that clips a finite global norm: min(1, clip / (norm + 1e-6))."""
    return min(1.0, clip / (math.sqrt(norm_squared) + 1e-6))


def norm_within_limit(commit: Commit) -> bool:
    """Return whether a staggered step, taken with clip factor 1, was the step that the commit requires."""
    return commit.clip_factor == 1.0


def soonest_end(step: int, mode: StepMode, before: Commit | None) -> int:
    """Return the first iteration after which all workers can stop together when `step` commits.

    After a staggered step it is the next, which has begun, unless the previous commit announced `step` as the last.
    """
    return step if mode == "barrier" or (before is not None and before.last == step) else step + 1


def exact_parts(addends: Sequence[float]) -> list[float]:
    """Return a few numbers (rarely over three) with the exact sum of `addends`; NaN if an addend is not finite."""
    if not all(map(math.isfinite, addends)):
        return [math.nan]
    parts: list[float] = []
    while remainder := math.fsum([*addends, *(-part for part in parts)]):
        parts.append(remainder)
    return parts


def decide(job: Job, step: int, reports: ReportColumns, recent: Sequence[float] = ()) -> Commit:
    """Compute the commit from the reports of all live workers: mean loss, global norm, clip factor (None: not finite).

    Squared norms are added exactly, so the global norm does not depend on the split into stages. `recent` holds the
    norms of the previous iterations, oldest first. Raises Disagreement if hosts of a stage, or tensor ranks, differ.
    """
    if not reports.agree:
        compare(step, reports.reports, names_of_numbers(job))
    squared = math.fsum(reports.squared_norms)
    loss = reports.loss_sum / (job.shape.pipelines * job.micro_batches_in(step))
    finite = math.isfinite(squared)
    norm = math.sqrt(squared) if finite else math.nan
    kept = [*recent, norm][-WINDOW:]
    return Commit(
        step,
        loss,
        norm,
        clip_factor(job.train.clip, squared) if finite else None,
        next_mode=step_mode(kept, job.train.clip),
        recent=kept,
    )


def names_of_numbers(job: Job) -> Callable[[int], str]:
    """Return a function that names a number in reports: a stage, or a shard if the optimizer is sharded."""
    if not job.train.sharded_optimizer:
        return stage_name
    shards = Shards(job, Hosts.at_start(job, None))
    return lambda number: shards.named(number) if number < PARAMETERS else stage_name(number)


def evaluation_report(losses: Sequence[tuple[float, float]]) -> EvaluationReport:
    """Build a worker's evaluation report from (sum of losses, tokens) of each micro-batch."""
    sums, tokens = ([pair[place] for pair in losses] for place in (0, 1))
    return EvaluationReport(exact_parts(sums), exact_parts(tokens))


def evaluate(step: int, reports: Mapping[str, EvaluationReport]) -> Evaluated:
    """Compute the result of an evaluation; exact sums make it independent of the assignment of micro-batches."""
    counted = [report for member, report in reports.items() if split_member(member)[1] == 0]
    losses = math.fsum(part for report in counted for part in report.losses)
    tokens = math.fsum(part for report in counted for part in report.tokens)
    return Evaluated(step, losses / tokens if tokens else math.nan, tokens)


def only_generation(workers: Sequence[Worker], before: int = -1) -> GenerationRecord:
    """Return the only generation of a run without failures and leader, after the iteration `before`."""
    names = [str(worker) for worker in workers]
    return GenerationRecord(1, names, {name: name for name in names}, "", committed=before)


def commit_of(job: Job, step: int, steps: int, reports: Mapping[str, Report]) -> Commit:
    """Return the commit of `step` in a run without a leader. Raises RunError if hosts disagree."""
    columns = ReportColumns.from_reports(reports)
    commit = decide(job, step, columns)
    if unlike := count_votes(step, votes_of(columns.replayed)):
        raise RunError(f"{unlike}: one of them computes wrong")
    is_last = step + 1 >= steps
    return msgspec.structs.replace(
        commit, next_mode="barrier", last=steps - 1, finished=is_last, evaluate=job.is_evaluated(step, is_last)
    )


class Comparison(NamedTuple):
    """A comparison of the state after `step` between the hosts of each stage.

    Attributes:
        step: the iteration that produced the state; -1 for the initial state.
        is_kept: whether the state is also kept.
        besides: step of the older state to keep; None for the newest state kept before.
    """

    step: int
    is_kept: bool = True
    besides: int | None = None


def comparison(iteration: int, first: int, every: int, rounds: int, verified: int | None) -> Comparison | None:
    """Return the comparison for the state at the start of `iteration`; None if the state is not compared.

    Args:
        first: first iteration of the generation.
        every: iterations between comparisons, counted from iteration 0; 0 for none.
        rounds: iterations after which all work has been replayed once; 0 without replays.
        verified: step of the verified state at the start of the generation; None if there was none.
    """
    if not every:
        return None
    if iteration == first:
        return Comparison(first - 1, True, verified)
    if iteration % every:
        return None
    stride = _least_multiple(every, max(rounds, 1))
    since = iteration - _least_multiple(every, first + max(rounds, 1))
    if since < 0 or since % stride:
        return Comparison(iteration - 1, False)
    return Comparison(iteration - 1, True, iteration - stride - 1 if since else first - 1)


def _least_multiple(factor: int, at_least: int) -> int:
    return -(-at_least // factor) * factor


def verified_after(
    record: GenerationRecord, has_states: bool, holds: Callable[[], str] | None = None
) -> tuple[Verified | None, Verified | None]:
    """Return (verified state, candidate) after the iteration that follows the record is committed.

    Args:
        has_states: whether the hosts have compared the states at the start of the iteration.
        holds: returns the name of the holdings in the kept states; None for `record.holds`.
    """
    verified, candidate, rounds = record.verified, record.candidate, max(record.rounds, 1)
    if has_states and (candidate is None or record.committed - candidate.step >= rounds):
        held = record.holds if holds is None else holds()
        candidate = Verified(record.committed, _without_orders(record.commit), holds=held)
        if verified is None or verified.step == candidate.step:  # kept again, now also by workers that joined
            verified = candidate
    if candidate is not None and record.committed + 1 - candidate.step >= rounds:
        verified = candidate
    return verified, candidate


def _without_orders(commit: Commit | None) -> Commit | None:
    if commit is None:
        return None
    return msgspec.structs.replace(commit, last=None, finished=False, checkpoint=False, evaluate=False)
