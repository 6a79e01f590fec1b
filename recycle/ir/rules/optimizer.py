"""Rules for the optimizer, for schedules with any REDUCE_GRAD or STEP; otherwise `lower` adds both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from recycle.ir.columns import Rows
from recycle.ir.dependencies import Cause
from recycle.ir.instruction import GatherParameters, Instruction, OptimizerStep, ReduceBucket, ReduceGradients
from recycle.ir.rules.rule import Defect, Inspection, extremes, listed, repeats, rule
from recycle.job.shape import MOST_BUCKETS


def _hosted_rows(inspection: Inspection, cls: type[Instruction]) -> tuple[Rows, Rows]:
    ops = inspection.operations
    at = ops.select(cls)
    at = at[inspection.hosts.ravel()[ops.host[at]]]
    return ops.row[at], ops.host[at]


def _absent(inspection: Inspection, cls: type[Instruction], verb: str, hint: str) -> Iterator[Defect]:
    if not inspection.has_optimizer:
        return
    absent = inspection.hosts.copy()
    absent.ravel()[_hosted_rows(inspection, cls)[1]] = False
    if not (inspection.operations.kind == cls.kind).any():
        yield Defect(f"the schedule has no {cls.token} at all: no stage {verb}", hint)
        return
    workers = np.flatnonzero(absent.any(axis=1))

    def stages(entry: int) -> Rows:
        return np.flatnonzero(absent[workers[entry]])

    yield Defect(
        lambda entry: f"worker {{worker}} hosts stage {listed(stages(entry))} but never {verb} it",
        lambda entry: f"add {stages(entry)[0]}{cls.token}: {hint}",
        worker=workers,
    )


@rule("missing-reduce", "a host that never reduces its stage")
def missing_reduce(inspection: Inspection) -> Iterator[Defect]:
    """REDUCE_GRAD sums a stage's gradient over all live workers that host it, also those that computed nothing.
    Each of them needs one REDUCE_GRAD per stage; the others wait for it."""
    hint = "every live host of a stage reduces once, before its STEP"
    yield from _absent(inspection, ReduceGradients, "reduces", hint)


@rule("missing-step", "a host that never steps its stage")
def missing_step(inspection: Inspection) -> Iterator[Defect]:
    """Every live worker that hosts a stage has its own copy of the parameters and must step it in each iteration.
    One STEP per host and stage, after its REDUCE_GRAD."""
    hint = "every live host of a stage steps once, after its REDUCE_GRAD"
    yield from _absent(inspection, OptimizerStep, "steps", hint)


@rule("missing-gather", "a host that never gathers its stage")
def missing_gather(inspection: Inspection) -> Iterator[Defect]:
    """With GATHER_PARAMS each host of a stage steps its own part of the parameters and needs the rest from the
    others. If a schedule has one, every host gathers every stage that it hosts once, after its STEP."""
    if (inspection.operations.kind == GatherParameters.kind).any():
        hint = "every live host of a stage gathers once, after its STEP"
        yield from _absent(inspection, GatherParameters, "gathers", hint)


@rule("missing-bucket", "a host that never starts the sum of a bucket")
def missing_bucket(inspection: Inspection) -> Iterator[Defect]:
    """REDUCE_BUCKET sums a bucket of a stage's gradients over all live workers that host the stage, also those that
    computed nothing. One per host, stage and bucket except the last, which REDUCE_GRAD sums."""
    shape, count = inspection.shape, inspection.schedule.buckets - 1
    rows, hosts = _hosted_rows(inspection, ReduceBucket)
    if not count or not (len(rows) or inspection.has_optimizer):
        return
    wanted = inspection.hosts.ravel()
    is_summed = np.zeros((wanted.size, count), dtype=np.bool_)
    is_summed[hosts, inspection.columns.bucket[rows]] = True
    absent = np.flatnonzero(wanted & ~is_summed.all(axis=1))
    workers, stages = np.divmod(absent, shape.stages)

    def buckets(entry: int) -> Rows:
        return np.flatnonzero(~is_summed[absent[entry]])

    yield Defect(
        lambda entry: (
            f"worker {{worker}} hosts stage {stages[entry]} but never begins the sum of bucket {listed(buckets(entry))}"
        ),
        lambda entry: (
            f"add {stages[entry]}{ReduceBucket.token}/{buckets(entry)[0]}, before its REDUCE_GRAD; or remove every"
            " reduce and step, so that all are implied"
        ),
        worker=workers,
    )


@rule("duplicate-update", "a stage reduced or stepped twice on one worker")
def duplicate_update(inspection: Inspection) -> Iterator[Defect]:
    """A second REDUCE_GRAD would sum sums, a second STEP would apply a gradient twice, a second GATHER_PARAMS would
    wait for peers that have one. Remove it."""
    for cls in (ReduceGradients, OptimizerStep, ReduceBucket, GatherParameters):
        rows, keys = _hosted_rows(inspection, cls)
        yield Defect(
            f"the stage already has a {cls.token} on this worker",
            "each host runs it once per iteration and stage: remove one of the two",
            rows[repeats(keys * MOST_BUCKETS + inspection.columns.bucket[rows])[0]],
        )


@rule("early-reduce", "a reduce before the stage's last gradient")
def early_reduce(inspection: Inspection) -> Iterator[Defect]:
    """A gradient that W or B adds after the REDUCE_GRAD is lost. REDUCE_GRAD comes after the last W or B of its
    stage, and of the stages tied to it, on its worker."""
    message = "{other} adds to this gradient later"
    hint = "move the REDUCE_GRAD after the stage's last W or B on this worker"
    yield _early(inspection, Cause.REDUCE, ReduceGradients, message, hint)


@rule("early-bucket", "the sum of a bucket before the last gradient in it")
def early_bucket(inspection: Inspection) -> Iterator[Defect]:
    """A gradient that a W, a B or a part adds to the bucket after its REDUCE_BUCKET is lost. REDUCE_BUCKET comes
    after the last of them on its worker; parts for other buckets may follow."""
    message = "{other} adds to this bucket later"
    hint = "move the REDUCE_BUCKET after the last W, B or part for its bucket on this worker"
    yield _early(inspection, Cause.REDUCE, ReduceBucket, message, hint)


@rule("early-step", "a step before a reduce that the barrier waits for")
def early_step(inspection: Inspection) -> Iterator[Defect]:
    """With optimizer = "barrier" no stage steps before all stages have reduced. A worker that hosts several stages
    must reduce all of them before it steps any, or it waits for itself."""
    message = "the barrier waits for {other}, which comes later"
    hint = 'move every REDUCE_GRAD of the worker before its first STEP, or use optimizer = "staggered"'
    yield _early(inspection, Cause.STEP, OptimizerStep, message, hint)


def _early(inspection: Inspection, cause: Cause, cls: type[Instruction], message: str, hint: str) -> Defect:
    graph, kind, worker = inspection.graph, inspection.lowered.columns.kind, inspection.lowered.columns.worker
    into, out = graph.into_joins, graph.out_of_joins
    out = out[(graph.cause[out] == cause) & (kind[graph.target[out]] == cls.kind)]
    workers, waiting = inspection.shape.worker_count, graph.target[out]
    joined = graph.target[into] * workers + worker[graph.source[into]]
    late = extremes(np.maximum, joined, graph.source[into], graph.source[out] * workers + worker[waiting], -1)
    given, later = inspection.origin[waiting[late > waiting]], inspection.origin[late[late > waiting]]
    known = (given >= 0) & (later >= 0)
    known[known] = ~(inspection.stray_updates[given[known]] | inspection.stray_updates[later[known]])
    given, later = given[known], later[known]
    by_row = np.lexsort((later, given))
    return Defect(message, hint, given[by_row], others=later[by_row])


@rule("reduce-order", "peers that reduce two stages in different orders")
def reduce_order(inspection: Inspection) -> Iterator[Defect]:
    """REDUCE_GRAD is collective: it ends when all live hosts of the stage have reached it. Workers that host the
    same stages must reduce them in the same order, or they wait for each other. The same holds for the buckets of
    stages and for GATHER_PARAMS."""
    rows, others = np.array(conflicting_reduces(inspection), dtype=np.int64).reshape(-1, 2).T
    yield Defect(
        "worker {other.worker} reduces its stages in another order: {other} comes first there",
        "reduce shared stages and buckets in the same order on both workers, for example last stage first",
        rows,
        others=others,
    )


def conflicting_reduces(inspection: Inspection) -> list[tuple[int, int]]:
    """Return the pairs of `reduce_conflicts` among the sums and gathers on hosts of their stage."""
    buckets, numbers = inspection.schedule.buckets, inspection.columns.bucket
    reduces = [_hosted_rows(inspection, cls) for cls in (ReduceGradients, ReduceBucket, GatherParameters)]
    rows, hosts = (np.concatenate(column) for column in zip(*reduces, strict=True))
    order = np.argsort(rows)
    rows, (workers, stages) = rows[order], np.divmod(hosts[order], inspection.shape.stages)
    # REDUCE_GRAD has no bucket column and sums the last bucket.
    bucket = np.where(numbers[rows] >= 0, numbers[rows], buckets - 1)
    numbers = stages * (buckets + 1) + bucket
    # A gather follows all buckets of its stage.
    gathers = inspection.columns.kind[rows] == GatherParameters.kind
    return reduce_conflicts(rows, workers, np.where(gathers, stages * (buckets + 1) + buckets, numbers))


def reduce_conflicts(rows: Rows, workers: Rows, stages: Rows) -> list[tuple[int, int]]:
    """Find workers that reduce the same two stages, or buckets of stages, in different orders.

    Returns:
        (reduce that comes first here, reduce that comes first on an earlier worker with both stages), one per worker.
    """
    orders: dict[int, dict[int, int]] = {}
    for row, worker, stage in zip(rows.tolist(), workers.tolist(), stages.tolist(), strict=True):
        orders.setdefault(worker, {}).setdefault(stage, row)
    hosts = Counter(stage for order in orders.values() for stage in order)
    agreed: list[dict[int, int]] = []
    at_odds: dict[tuple[int, ...], tuple[int, int, dict[int, int]] | None] = {}
    conflicts = []
    for _, order in sorted(orders.items()):
        sequence = tuple(stage for stage in order if hosts[stage] > 1)
        if len(sequence) > 1 and sequence not in at_odds:
            candidates = [(*pair, other) for other in agreed if (pair := _first_swapped(sequence, other))]
            at_odds[sequence] = min(candidates, key=lambda candidate: candidate[:2], default=None)
            agreed += [] if candidates else [order]
        if conflict := at_odds.get(sequence):
            position, other_position, other = conflict
            conflicts.append((order[sequence[position]], other[sequence[other_position]]))
    return conflicts


def _first_swapped(sequence: tuple[int, ...], other: dict[int, int]) -> tuple[int, int] | None:
    both = [place for place, stage in enumerate(sequence) if stage in other]
    pairs = ((first, second) for first, second in pairwise(both) if other[sequence[second]] < other[sequence[first]])
    return next(pairs, None)
