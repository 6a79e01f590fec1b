"""From the reports of an iteration to its commit, and to how the next iteration steps: pure functions.

A staggered step is taken before the global norm is known, with clip factor 1. It is right if the norm turns out finite
and within the limit; else the iteration is repeated, which costs more than the barrier would have. So steps are
staggered only while the norms stay well below the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from recycle.errors import RunError
from recycle.exec.checksums import PARAMETERS
from recycle.exec.leader.disagreement import compare, stage_name
from recycle.exec.leader.replay_votes import count_votes, votes_of
from recycle.exec.leader.report_columns import ReportColumns
from recycle.exec.members import split_member
from recycle.exec.protocol import (
    Commit,
    Evaluated,
    EvaluationReport,
    GenerationRecord,
    Report,
    StepMode,
)
from recycle.job import Job
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts
from recycle.plans.shards import shards_of

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
    shards = shards_of(job, Hosts.at_start(job, None))
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


def finite_or_none(number: float) -> float | None:
    """As JSON can hold it."""
    return number if math.isfinite(number) else None


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
