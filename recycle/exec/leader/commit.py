"""From the reports of an iteration to its commit, to how the next one steps, and to the state that training may go back
to: pure functions.

Thousands of reports come at once. One loop compares each with the first one of the same stage (`ReportColumns`); only
where two differ does `disagreement.compare` find out who is odd.

A staggered step is taken before the global norm is known, with clip factor 1. It is right if the norm turns out finite
and within the limit; else the iteration is repeated, which costs more than the barrier would have. So steps are
staggered only while the norms stay well below the limit.

**Verified states.** Hosts compare the state that an iteration begins with: in the first iteration of a generation, and
every so many iterations. Some of the compared states are kept. A kept state is the candidate until everything was
replayed since, in one generation, and nothing differed: a state on which all agree may still be wrong on all hosts, by
what one host added to the sums, and a host that computes wrong all the time would have shown. Then the candidate is
verified, and training goes back to it where hosts differ. While there is a candidate, later states are compared and not
kept, so two copies are enough. Where nothing is replayed, a state is verified as soon as its iteration is committed.
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


NEAR = 0.5
"""Share of the clipping limit from which a norm counts as near."""
MOST_LINKS = 24
"""Other processes that a report has the times of messages of, in about 50 bytes each."""
WINDOW = 4
"""Iterations whose norms are looked at."""


def step_mode(recent: Sequence[float], clip: float) -> StepMode:
    """How an iteration steps whose predecessors had the norms `recent`: staggered if none came near the limit.

    A wrong step costs an iteration and a new generation, the barrier a part of an iteration, so a step should be wrong
    far less than once in five times. Norms drift slowly but scatter from one iteration to the next; half the limit, in
    each of the last four, leaves a factor of two for both. A norm that is not finite is not below anything.
    """
    window = recent[-WINDOW:]
    return "staggered" if window and all(norm < NEAR * clip for norm in window) else "barrier"


def clip_factor(clip: float, norm_squared: float) -> float:
    """Factor on all gradients that brings a global norm above `clip` down to it: min(1, clip / (norm + 1e-6)).

    Whether the norm is finite is for the caller to test first.
    """
    return min(1.0, clip / (math.sqrt(norm_squared) + 1e-6))


def is_right(commit: Commit) -> bool:
    """Whether a staggered step, taken with clip factor 1, was the step that the commit asks for."""
    return commit.clip_factor == 1.0


def soonest_end(step: int, mode: StepMode, before: Commit | None) -> int:
    """The first iteration after which all workers can still stop together when `step` commits.

    Behind a staggered step the next iteration has begun already, unless the commit before `step` announced that it
    would be the last.
    """
    return step if mode == "barrier" or (before is not None and before.last == step) else step + 1


def exact_parts(addends: Sequence[float]) -> list[float]:
    """A few numbers with the very sum of `addends`, before any rounding; not a number if one addend is not finite.

    Each is the correctly rounded rest that the ones before leave, so three are rarely too few.
    """
    if not all(map(math.isfinite, addends)):
        return [math.nan]
    parts: list[float] = []
    while rest := math.fsum([*addends, *(-part for part in parts)]):
        parts.append(rest)
    return parts


def decide(job: Job, step: int, reports: ReportColumns, recent: Sequence[float] = ()) -> Commit:
    """What the reports of all live workers amount to: mean loss, global norm, clip factor (None: not finite).

    Squared norms are added without rounding on the way, so that the global norm does not depend on how the model is
    split into stages.

    Args:
        recent: norms of the iterations before, the oldest first.

    Raises:
        Disagreement: two hosts of a stage hold different gradients, or tensor ranks of what they should hold alike.
    """
    if not reports.agree:
        compare(step, reports.reports, names_of_numbers(job))
    squared = math.fsum(reports.squared_norms)
    loss = reports.loss_sum / job.shape.global_micro_batches
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
    """What gives the words for a number that reports have: of a stage, or of a shard where the optimizer is sharded."""
    if not job.train.sharded_optimizer:
        return stage_name
    shards = Shards(job, Hosts.at_start(job, None))
    return lambda number: shards.named(number) if number < PARAMETERS else stage_name(number)


def evaluation_report(losses: Sequence[tuple[float, float]]) -> EvaluationReport:
    """What a worker reports of an evaluation, given the sum of losses and the tokens of each micro-batch."""
    sums, tokens = ([pair[place] for pair in losses] for place in (0, 1))
    return EvaluationReport(exact_parts(sums), exact_parts(tokens))


def evaluate(step: int, reports: Mapping[str, EvaluationReport]) -> Evaluated:
    """The result of an evaluation from the reports of all processes.

    Sums are added without rounding on the way, so that they do not depend on who ran which micro-batch. Tensor ranks
    have them in common, and those of the first count.
    """
    counted = [report for member, report in reports.items() if split_member(member)[1] == 0]
    losses = math.fsum(part for report in counted for part in report.losses)
    tokens = math.fsum(part for report in counted for part in report.tokens)
    return Evaluated(step, losses / tokens if tokens else math.nan, tokens)


def only_generation(workers: Sequence[Worker], before: int = -1) -> GenerationRecord:
    """The one generation of a run in which nobody fails, so that nobody coordinates; its workers play themselves.

    Args:
        before: the iteration before its first.
    """
    names = [str(worker) for worker in workers]
    return GenerationRecord(1, names, {name: name for name in names}, "", committed=before)


def commit_of(job: Job, step: int, steps: int, reports: Mapping[str, Report]) -> Commit:
    """The commit of `step` in such a run of `steps` iterations, whose stages step with the barrier.

    Raises:
        RunError: hosts hold different bits, or made different things of one micro-batch.
    """
    columns = ReportColumns.of(reports)
    commit = decide(job, step, columns)
    if unlike := count_votes(step, votes_of(columns.replayed)):
        raise RunError(f"{unlike}: one of them computes wrong")
    is_last = step + 1 >= steps
    return msgspec.structs.replace(
        commit, next_mode="barrier", last=steps - 1, finished=is_last, evaluate=job.is_evaluated(step, is_last)
    )


class Comparison(NamedTuple):
    """The hosts of each stage compare the state after `step`.

    Attributes:
        step: the iteration that the state is from; -1 for the initial one.
        is_kept: whether the state is also kept.
        besides: step of the state that stays kept with it; None for the newest of those kept before.
    """

    step: int
    is_kept: bool = True
    besides: int | None = None


def comparison(iteration: int, first: int, every: int, rounds: int, verified: int | None) -> Comparison | None:
    """The comparison of the state that `iteration` begins with; None where it is not compared.

    Args:
        first: iteration of the generation.
        every: iterations from one comparison to the next, counted from iteration 0; 0 for none.
        rounds: iterations in which everything is replayed once; 0 where nothing is.
        verified: step of the state to go back to when the generation began; None where there was none.
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
    """(state to go back to, candidate) once the iteration after the record is committed.

    Args:
        has_states: whether the hosts have compared the states that the iteration began with.
        holds: gives the name of what workers hold in the states that they have kept; `record.holds` when left out.
    """
    verified, candidate, rounds = record.verified, record.candidate, max(record.rounds, 1)
    if has_states and (candidate is None or record.committed - candidate.step >= rounds):
        held = record.holds if holds is None else holds()
        candidate = Verified(record.committed, _without_orders(record.commit), holds=held)
        if verified is None or verified.step == candidate.step:  # kept again, also by workers that have joined
            verified = candidate
    if candidate is not None and record.committed + 1 - candidate.step >= rounds:
        verified = candidate
    return verified, candidate


def _without_orders(commit: Commit | None) -> Commit | None:
    """The commit for workers that go on from it later: what it announced has been done."""
    if commit is None:
        return None
    return msgspec.structs.replace(commit, last=None, finished=False, checkpoint=False, evaluate=False)
