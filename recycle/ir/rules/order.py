"""Rules for the order: dependencies precede their users, and no instructions wait for each other in a cycle.

Late dependencies on the same worker are found edge by edge. Cycles over several workers are found in the event graph
without these edges and those that the optimizer rules report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from recycle.ir.columns import Flags, Rows, compute_order
from recycle.ir.dependencies import Cause
from recycle.ir.event_graph import EventGraph, event_graph, group_edges, topological_order
from recycle.ir.kinds import Send, StageWide, Transfer, is_kind
from recycle.ir.rules.optimizer import conflicting_reduces
from recycle.ir.rules.rule import Defect, Inspection, and_more, extremes, firsts, rule
from recycle.ir.rules.transfers import are_reported

_CYCLES = 5
_SHOWN_WAITS = 40
"""Instructions of a cycle that a message names, half from its beginning and half from its end."""


@rule("order", "an instruction before what it needs on its own worker")
def order(inspection: Inspection) -> Iterator[Defect]:
    """A worker runs its program in order. An instruction must come after everything that it needs from its own
    worker: a B or I after its F and RELOAD (and after the next stage's B on the same worker), a W after its I, a SEND
    after its producer, a RECV before its consumer, a STEP after its REDUCE_GRAD."""
    source, target = _local_disorder(inspection)
    needs, rows = inspection.origin[source], inspection.origin[target]
    first = firsts(rows)[1]
    yield Defect(
        "it needs {other}, which comes later",
        "move {other.instruction} before it",
        rows[first],
        others=needs[first],
        where=~inspection.rows_in(inspection.misplaced)[rows[first]],
    )


def _local_disorder(inspection: Inspection) -> tuple[Rows, Rows]:
    graph, c = inspection.graph, inspection.lowered.columns
    edges = graph.between_rows
    edges = edges[graph.cause[edges] != Cause.TRANSFER]
    source, target = graph.source[edges], graph.target[edges]
    wrong = (source > target) & (c.worker[source] == c.worker[target])
    wrong &= (inspection.origin[source] >= 0) & (inspection.origin[target] >= 0)
    source, target = source[wrong], target[wrong]
    by_row = np.lexsort((source, target))
    return source[by_row], target[by_row]


@rule("deadlock", "instructions that wait for each other in a cycle")
def deadlock(inspection: Inspection) -> Iterator[Defect]:
    """Each instruction waits for its inputs and for the previous instruction of its worker, and a transfer for the
    previous one between the same two workers. These waits form a cycle, so the run would hang. The message follows
    the cycle once, each instruction with what it waits for. Change the order on one of the workers in the cycle."""
    events = inspection.events
    if events.is_acyclic:
        return
    source, target = events.edges
    keep = ~_explained(inspection, source, target)
    reported = inspection.rows_in(inspection.broken) | inspection.stray_updates
    for end in _local_disorder(inspection):
        reported[inspection.origin[end]] = True
    for cycle in cycles(source[keep], target[keep], events.dependencies.nodes):
        if any(reported[given] for given in map(inspection.given, cycle) if given is not None):
            continue  # a consequence of another finding
        hint = "change the order on one of these workers so that what the others wait for comes first"
        yield _cycle_defect(inspection, events, cycle, "a cycle of waits", hint)


@rule(
    "serialised-transport",
    "a deadlock on transports that carry one transfer of a worker at a time",
    "warning",
    presumes_valid=True,
)
def serialised_transport(inspection: Inspection) -> Iterator[Defect]:
    """On a transport that carries one transfer of a worker at a time, unbuffered and in program order (one NCCL
    stream), some transfers wait for each other in a cycle. On other transports the order is valid. Remove all
    transfers and lower the schedule again: `lower` writes them in one global order."""
    yield from _deadlocks_of_shared(inspection, "with one transfer at a time", serialised=True)


@rule("shared-communicators", "a deadlock of transfers that share a communicator", presumes_valid=True)
def shared_communicators(inspection: Inspection) -> Iterator[Defect]:
    """Over NCCL a worker with many lanes, as after a failure, has communicators for several lanes each, which carry one
    transfer at a time, unbuffered and in program order. Some of them wait for each other in a cycle. Checked before
    workers run a schedule. Remove all transfers and lower the schedule again: `lower` writes them in one global order.
    """
    if inspection.about_to_run:
        yield from _deadlocks_of_shared(inspection, "on the communicators that lanes share", serialised=False)


def _deadlocks_of_shared(inspection: Inspection, how: str, serialised: bool) -> Iterator[Defect]:
    if not inspection.has_transfers:
        return
    events = event_graph(inspection.lowered, serialised, shared=not serialised)
    if events.is_acyclic:
        return
    for cycle in cycles(*events.edges, events.dependencies.nodes)[:1]:
        message = f"{how} this deadlocks, in a cycle of waits"
        hint = "write sends and receives in one global order (remove them, then lower), or use a transport with lanes"
        yield _cycle_defect(inspection, events, cycle, message, hint)


def _explained(inspection: Inspection, source: Rows, target: Rows) -> Flags:
    nodes, rows = inspection.graph.nodes, inspection.graph.rows
    late_source, late_target = _local_disorder(inspection)
    explained = np.isin(source * nodes + target, late_source * nodes + late_target)
    lowered_of = np.full(len(inspection.columns) + 1, -1, dtype=np.int64)
    lowered_of[inspection.origin] = np.arange(len(inspection.origin))
    conflicting = [int(lowered_of[row]) for pair in conflicting_reduces(inspection) for row in pair]
    explained |= np.isin(target, conflicting) & (source >= rows)
    # A join that waits for a row at or after its waiter on the same worker: an early or duplicate update.
    kind, worker = inspection.lowered.columns.kind, inspection.lowered.columns.worker
    out = np.flatnonzero((source >= rows) & (target < rows))
    out = out[is_kind(kind[target[out]], StageWide)]
    into = np.flatnonzero((target >= rows) & (source < rows))
    workers = inspection.shape.worker_count
    joined = target[into] * workers + worker[source[into]]
    first = extremes(np.minimum, source[out] * workers + worker[target[out]], target[out], joined, nodes)
    explained[into[source[into] >= first]] = True
    return explained


def cycles(source: Rows, target: Rows, nodes: int) -> list[list[int]]:
    """Return up to `_CYCLES` short cycles without common nodes; each node waits for the next one."""
    result: list[list[int]] = []
    while len(result) < _CYCLES:
        alive = _on_or_between_cycles(source, target, nodes)
        keep = alive[source] & alive[target]
        source, target = source[keep], target[keep]
        if not len(source):
            break
        offsets, before = group_edges(source, target, nodes)
        cycle = _shortest(_walk(offsets, before, int(target.min())), offsets, before)
        result.append(cycle)
        is_used = np.isin(source, cycle) | np.isin(target, cycle)
        source, target = source[~is_used], target[~is_used]
    return result


def _on_or_between_cycles(source: Rows, target: Rows, nodes: int) -> Flags:
    alive = np.ones(nodes, dtype=np.bool_)
    for before, after in ((source, target), (target, source)):
        alive[topological_order(before, after, nodes)] = False
    return alive


def _walk(offsets: Rows, before: Rows, node: int) -> list[int]:
    place = np.full(len(offsets) - 1, -1, dtype=np.int64)
    path: list[int] = []
    while place[node] < 0:
        place[node] = len(path)
        path.append(node)
        node = int(before[offsets[node]])
    return path[place[node] :]


def _shortest(cycle: list[int], offsets: Rows, before: Rows) -> list[int]:
    start, came_from = cycle[0], dict[int, int]()
    queue = deque([start])
    while start not in came_from:
        node = queue.popleft()
        for previous in before[offsets[node] : offsets[node + 1]].tolist():
            if previous not in came_from:
                came_from[previous] = node
                queue.append(previous)
    path = [start]
    while came_from[path[-1]] != start:
        path.append(came_from[path[-1]])
    return [start, *reversed(path[1:])]


def _cycle_defect(inspection: Inspection, events: EventGraph, cycle: list[int], message: str, hint: str) -> Defect:
    """Return a defect for a cycle, from its first given row; added rows are omitted, steps of one program merged."""
    given = {node: row for node in cycle if (row := inspection.given(node)) is not None}
    if not given:
        return Defect(f"{message}: {len(cycle)} events that lowering added", hint)
    turn = list(given).index(min(given))
    shown = [*list(given)[turn:], *list(given)[:turn]]
    follows = _program_steps(events, np.array(shown[1:] + shown[:1]), np.array(shown)).tolist()
    begins = [place for place in range(len(shown)) if not (follows[place] and follows[place - 1])]
    if begins[0]:  # the first steps merge with the last steps
        begins = begins[-1:] + begins[:-1]
    rows = [given[shown[place]] for place in begins]
    name = inspection.schedule.instruction
    waits = list(zip(begins, rows, rows[1:] + rows[:1], strict=True))
    left_out = len(waits) - _SHOWN_WAITS
    if left_out > 0:
        waits[_SHOWN_WAITS // 2 : -_SHOWN_WAITS // 2] = []
    parts = [
        f"{inspection.at(row)} {'comes after' if follows[place] else 'waits for'} {name(needed)}"
        for place, row, needed in waits
    ]
    if left_out > 0:
        parts.insert(_SHOWN_WAITS // 2, f"... and {left_out} more ...")
    others = np.array([[row for _, row, _ in waits[1:]]], dtype=np.int64)
    return Defect(f"{message}: {'; '.join(parts)}", hint, rows[0], others=others)


def _program_steps(events: EventGraph, before: Rows, after: Rows) -> Flags:
    nodes = events.dependencies.nodes

    def among(source: Rows, target: Rows) -> Flags:
        near = np.isin(target, after)
        return np.isin(before * nodes + after, source[near] * nodes + target[near])

    data = events.dependencies
    return among(*compute_order(events.schedule.columns)) & ~among(data.source, data.target)


@rule("late-send", "a send that does not follow its producer", "warning")
def late_send(inspection: Inspection) -> Iterator[Defect]:
    """A SEND should follow the instruction that computes its value. With other work in between the receiver waits
    longer; sends never delay compute. Reported once per worker."""
    if not inspection.has_transfers:
        return
    graph, c = inspection.graph, inspection.lowered.columns
    sends = (graph.target < graph.rows) & (graph.source < graph.target)
    sends[sends] = is_kind(c.kind[graph.target[sends]], Send)
    producer, send = graph.source[sends], graph.target[sends]
    own = c.worker[producer] == c.worker[send]
    producer, send = producer[own], send[own]
    worked = np.cumsum(~is_kind(c.kind, Transfer))
    late = worked[send] > worked[producer]
    late[late] = ~are_reported(inspection, inspection.origin[send[late]])
    producer, send = producer[late], send[late]
    by_row = np.argsort(send)
    producer, send = producer[by_row], send[by_row]
    _, first, count = firsts(c.worker[send])
    yield Defect(
        lambda entry: (
            "other work runs between it and its producer, {other}" + and_more(count[entry], "sends of this worker")
        ),
        "move the send directly after its producer",
        inspection.origin[send[first]],
        others=inspection.origin[producer[first]],
    )
