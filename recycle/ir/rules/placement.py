"""Rules for placement and memory: live hosts, memory limits, and useful redundant work (R and REPLAY)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.columns import Flags, Rows, occurrences
from recycle.ir.dependencies import Why, find
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    Offload,
    ReduceGradients,
    RedundantForward,
    Reload,
    Replay,
    WaitSend,
)
from recycle.ir.kinds import Transfer, is_kind
from recycle.ir.memory import TOLERANCE, held_activations, static_bytes
from recycle.ir.operations import Operations
from recycle.ir.rules.rule import Defect, Inspection, and_more, firsts, listed, rule


@rule("no-host", "a stage without a live host")
def no_host(inspection: Inspection) -> Iterator[Defect]:
    """A stage whose hosts have all failed, or that the placement gives to no worker, has no live copy of its
    parameters: no schedule can run it. Place it on another worker that can copy them, or restore a checkpoint."""
    stages = np.flatnonzero(~inspection.hosts.any(axis=0))

    def message(entry: int) -> str:
        dead = inspection.workers(np.flatnonzero(inspection.hosted[:, stages[entry]]))
        why = f"its hosts {dead} have all failed" if dead else "the placement gives it to no worker"
        return f"stage {stages[entry]} has no live host: {why}"

    yield Defect(message, "place it on a live worker, or restart from a checkpoint", np.full(len(stages), -1))


@rule("failed-worker", "work on, or a transfer with, a failed worker")
def failed_worker(inspection: Inspection) -> Iterator[Defect]:
    """A failed worker computes, sends and receives nothing. Move its micro-batches and their transfers to peers of
    its stage. Reported once per failed worker that has a program, and once per live worker and failed peer
    otherwise."""
    shape, c = inspection.shape, inspection.columns
    sizes = np.diff(c.offsets)
    busy = np.flatnonzero(inspection.dead & (sizes > 0))
    yield Defect(
        lambda entry: f"worker {{worker}} has failed, yet it has a program of {sizes[busy[entry]]} instruction(s)",
        "give its micro-batches to peers of its stage, or remove it from the failed workers",
        c.offsets[busy],
    )
    silent = inspection.dead & (sizes == 0)
    rows = np.flatnonzero(is_kind(c.kind, Transfer))
    rows = rows[silent[c.peer[rows]] & ~inspection.dead[c.worker[rows]]]
    pairs, first, count = firsts(c.worker[rows].astype(np.int64) * shape.worker_count + c.peer[rows])
    yield Defect(
        lambda entry: (
            f"worker {shape.worker_at(pairs[entry] % shape.worker_count)} has failed and takes no part in any transfer"
            + and_more(count[entry], "transfers with it")
        ),
        "exchange the value with the peer that took over the micro-batch",
        rows[first],
    )


@rule("not-hosted", "a stage run by a worker that does not host it")
def not_hosted(inspection: Inspection) -> Iterator[Defect]:
    """A worker can compute, reduce and step only the stages that the placement gives it. Work moves between workers
    of different pipelines that host the same stage, never along a pipeline. Reported once per worker and stage, at
    the first instruction."""
    shape, ops = inspection.shape, inspection.operations
    at = np.flatnonzero(~is_kind(ops.kind, Transfer) & ops.valid)
    at = at[~inspection.hosted.ravel()[ops.host[at]] & ~inspection.dead[ops.worker[at]]]
    at = at[np.argsort(ops.row[at], kind="stable")]
    pairs, first, count = firsts(ops.host[at])
    workers, stages = np.divmod(pairs, shape.stages)

    def message(entry: int) -> str:
        hosted = listed(inspection.schedule.placement[workers[entry]]) or "none"
        times = f", {count[entry]} times in all" if count[entry] > 1 else ""
        return f"worker {{worker}} hosts stage {hosted}, not {stages[entry]}{times}"

    def hint(entry: int) -> str:
        hosts = inspection.workers(np.flatnonzero(inspection.hosts[:, stages[entry]])) or "none is alive"
        return f"move it to a host of stage {stages[entry]} ({hosts}), or change the placement"

    yield Defect(message, hint, ops.row[at[first]])


_LESS_MEMORY = "run a B or W of a held micro-batch before it, delay this forward, or raise the limit"


@rule("activation-limit", "more activations held than allowed")
def activation_limit(inspection: Inspection) -> Iterator[Defect]:
    """An activation is held from the start of its F to the end of its W or B; between I and W the profile's
    `weight_stash` share of it. Counted in chunks, in program order, against the limit of the worker's rank. The
    finding names the instruction that reaches the peak, and its start. Incomplete schedules are not checked."""
    if inspection.limits is None or not inspection.complete.all():
        return
    shape = inspection.shape
    peaks, rows = map(np.array, held_activations(inspection.schedule, inspection.profile, in_bytes=False))
    limits = np.tile(np.array(inspection.limits, dtype=float), shape.pipelines)
    over = (rows >= 0) & (peaks > limits + TOLERANCE) & ~inspection.dead
    yield Defect(
        lambda entry: (
            f"worker {{worker}} holds {peaks[entry]:g} activations here{inspection.time_of(rows[entry])}, the limit of"
            f" rank {entry % shape.ranks} is {limits[entry]:g}"
        ),
        _LESS_MEMORY,
        rows,
        where=over,
    )


@rule("byte-limit", "more bytes held than allowed")
def byte_limit(inspection: Inspection) -> Iterator[Defect]:
    """The bytes of activations held, by the profile's weight of each stage, and the static bytes of the worker's
    stages, against one limit for all workers. The finding names the instruction that reaches the peak, and its
    start, or the worker if its stages alone exceed the limit."""
    if inspection.byte_limit is None or not inspection.complete.all():
        return
    schedule, profile, limit = inspection.schedule, inspection.profile, inspection.byte_limit
    static = np.array(static_bytes(schedule, profile))
    peaks, rows = map(np.array, held_activations(schedule, profile, in_bytes=True))
    over = ~inspection.dead & (static + peaks > limit * (1 + TOLERANCE))
    by_stages = (static > limit) | (rows < 0)
    yield Defect(
        lambda entry: f"its stages alone need {static[entry]:.6g} bytes, the limit is {limit:.6g}",
        "place fewer stages on it, split the model further, or raise the limit",
        worker=np.arange(len(rows)),
        where=over & by_stages,
    )
    yield Defect(
        lambda entry: (
            f"worker {{worker}} holds {static[entry] + peaks[entry]:.6g} bytes here{inspection.time_of(rows[entry])}"
            f" ({static[entry]:.6g} static, {peaks[entry]:.6g} of activations), the limit is {limit:.6g}"
        ),
        _LESS_MEMORY,
        rows,
        where=over & ~by_stages,
    )


@rule("redundant", "a redundant forward that cannot replace anything")
def redundant(inspection: Inspection) -> Iterator[Defect]:
    """R runs a stage's forward a second time, on the worker of the previous stage. That worker would take over the
    backward if the stage's worker died. The input of R is the output of an F on the same worker. R runs once, before
    that worker's own backward of the micro-batch, on a worker that does not run the stage's F. The first stage has no
    R."""
    ops, shape = inspection.operations, inspection.shape
    at, key = _hosted(inspection, RedundantForward), ops.worker_cell
    rows, stages, backward = ops.row[at], ops.stage[at], ops.select(Backward, BackwardInput)
    backward_of = find(key[backward], key[at] - shape.global_micro_batches)
    shown_live = np.append(ops.row[backward], len(inspection.columns))[backward_of]
    not_local = inspection.origin[inspection.graph.missing.with_reason(Why.NOT_LOCAL).row]
    first, repeated, doubled, apart, late = _first_case(
        stages == 0,
        occurrences(key[at]) > 0,
        _runs_forward(ops, at),
        np.isin(rows, not_local),
        shown_live < rows,
    )
    remove = "stage 0 has no stage before it, whose worker would hold its copy"
    yield Defect(remove, "remove it", rows, where=first)
    yield Defect("the same redundant forward occurs earlier", "remove one of the two", rows, where=repeated)
    yield Defect(
        lambda entry: f"this worker runs the forward of stage {stages[entry]} itself",
        "remove the redundant one",
        rows,
        where=doubled,
    )
    yield Defect(
        lambda entry: (
            f"the output of stage {stages[entry] - 1} is computed on another worker, and is never sent for a redundant"
            " forward"
        ),
        lambda entry: f"move it to the worker that runs stage {stages[entry] - 1} of this micro-batch",
        rows,
        where=apart,
    )
    yield Defect(
        lambda entry: f"{{other}} comes before it, and shows that the worker of stage {stages[entry]} is alive",
        "move it before that backward, or remove it",
        rows,
        others=shown_live,
        where=late,
    )


@rule("replay", "a replay that cannot check anything")
def replay(inspection: Inspection) -> Iterator[Defect]:
    """REPLAY runs a stage on a micro-batch again, to compare the result with that of another host of the stage. It
    runs once, on a host that does not run the forward itself. It runs before that host's REDUCE_GRAD of the stage:
    a difference must be known when the iteration is committed."""
    ops, at = inspection.operations, _hosted(inspection, Replay)
    rows, reduces = ops.row[at], ops.select(ReduceGradients)
    reduce = np.append(ops.row[reduces], len(inspection.columns))[find(ops.host[reduces], ops.host[at])]
    own, repeated, late = _first_case(_runs_forward(ops, at), occurrences(ops.worker_cell[at]) > 0, reduce < rows)
    move = "move the replay to another host of the stage"
    yield Defect("this worker runs the forward itself", move, rows, where=own)
    yield Defect("the same replay occurs earlier", "remove one of the two", rows, where=repeated)
    yield Defect(
        "{other} comes before it, so the iteration may be committed without it",
        "move the replay before that reduce",
        rows,
        where=late,
        others=reduce,
    )


@rule("wait-send", "a wait for a send that does not exist")
def wait_send(inspection: Inspection) -> Iterator[Defect]:
    """WAIT_SEND_F and WAIT_SEND_B wait until the worker's transfer of their stage and micro-batch has arrived. The
    worker sends no such value. Remove the instruction, or move it to the worker that sends the value."""
    rows = inspection.graph.missing.with_reason(Why.NO_PREDECESSOR).row
    rows = inspection.origin[rows[is_kind(inspection.lowered.columns.kind[rows], WaitSend)]]
    c = inspection.columns
    rows = rows[inspection.hosted[c.worker[rows], c.stage[rows]]]
    hint = "remove it, or move it to the worker that sends the value"
    yield Defect("worker {worker} sends no such value", hint, rows)


@rule("offload", "an activation that does not leave for the host and return once")
def offload(inspection: Inspection) -> Iterator[Defect]:
    """OFFLOAD copies the activation of a forward of its own worker to the host, and frees it. RELOAD copies it back,
    before the backward. Either needs the other, on the same worker, and occurs once per stage and micro-batch."""
    ops, at = inspection.operations, _hosted(inspection, Offload, Reload)
    pair = 2 * ops.worker_cell[at] + (ops.kind[at] == Offload.kind)
    away, repeated, alone = _first_case(~_runs_forward(ops, at), occurrences(pair) > 0, find(pair, pair ^ 1) < 0)
    move = "move it to the worker that runs the forward of this stage and micro-batch"
    yield Defect("the forward does not run on this worker", move, ops.row[at], where=away)
    yield Defect("the same copy occurs earlier", "remove one of the two", ops.row[at], where=repeated)
    message = f"{Offload.token} and {Reload.token} of an activation need each other, and the other is missing"
    yield Defect(message, "add the other, or remove this one", ops.row[at], where=alone)


def _hosted(inspection: Inspection, *classes: type[Instruction]) -> Rows:
    at = inspection.operations.select(*classes)
    return at[inspection.hosted.ravel()[inspection.operations.host[at]]]


def _runs_forward(ops: Operations, at: Rows) -> Flags:
    return find(ops.worker_cell[ops.select(Forward)], ops.worker_cell[at]) >= 0


def _first_case(*cases: Flags) -> list[Flags]:
    number = np.select(cases, range(len(cases)), -1)
    return [number == place for place in range(len(cases))]
