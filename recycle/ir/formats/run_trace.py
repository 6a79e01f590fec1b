"""The schedule that a run executed: the programs of the last whole step of a trace that `recycle train` wrote.

What a trace does not hold is lost: pairs ran as an F and then a B; workers without any instruction are failed; a
worker hosts the stages it worked for, and one without instructions those of its first live peer; whether steps waited
for a barrier is not recorded, "staggered" is assumed. Names are roles, those of the plan.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir import trace
from recycle.ir.columns import Columns
from recycle.ir.graph import Rows
from recycle.ir.instruction import Kind
from recycle.ir.schedule import Placement, Schedule, loop_placement
from recycle.shape import Shape

_log = logging.getLogger(__name__)


def loads(content: bytes, name: str) -> Schedule:
    """The schedule in a file's content; `name` begins every error message. Logs what is dropped.

    Raises:
        ScheduleError: the file is no such trace, or no step of it ran completely.
    """
    executed = trace.loads(content, name)
    shape = executed.shape
    for step in reversed(executed.steps):
        ran = executed.window(step, step, executed.generations_of(step)[-1])
        if _is_whole(ran):
            break
    else:
        raise ScheduleError(
            f"{name}: no step of it ran completely: in one, every stage forwards all"
            f" {shape.global_micro_batches} micro-batches"
        )
    generation = int(ran.generation[0])
    others = f" {len(executed.steps) - 1} other step(s) and" if len(executed.steps) > 1 else ""
    _log.warning(
        "%s: kept step %d of generation %d, in role names; left out%s all times and events",
        *(name, step, generation, others),
    )
    schedule, _ = executed_schedule(ran)
    return schedule.with_metadata(executed={"step": step, "generation": generation})


def executed_schedule(ran: trace.Trace) -> tuple[Schedule, Rows]:
    """(the programs that ran, in role names; the row of `ran` of each of their rows), of one generation of one step."""
    shape = ran.shape
    rows = np.argsort(ran.role, kind="stable")
    counts = np.bincount(ran.role, minlength=shape.worker_count)
    columns = ran.columns.take(rows, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    failed = frozenset(worker for worker, count in zip(shape.workers(), counts.tolist(), strict=True) if not count)
    return Schedule(shape, columns, _placement_of(shape, columns), failed), rows


def _is_whole(ran: trace.Trace) -> bool:
    """Whether every stage forwarded every micro-batch."""
    c, shape = ran.columns, ran.shape
    forwards = c.kind == Kind.FORWARD
    found = np.unique(np.stack([c.stage[forwards], c.pipeline[forwards], c.index[forwards]]), axis=1)
    return bool(found.shape[1] == shape.stages * shape.global_micro_batches)


def _placement_of(shape: Shape, columns: Columns) -> Placement:
    """The stages that each worker worked for; of one without instructions those of its first live peer."""
    usual, found = loop_placement(shape), dict[int, tuple[int, ...]]()
    for w, (first, end) in enumerate(pairwise(columns.offsets.tolist())):
        if first < end:
            stages = np.unique(columns.stage[first:end])
            found[w] = tuple(stages[stages < shape.stages].tolist())
    of_rank = {w % shape.ranks: stages for w, stages in reversed(found.items())}
    return tuple(found.get(w, of_rank.get(w % shape.ranks, usual[w])) for w in range(shape.worker_count))
