"""The schedule that torch executed, from traces of torch's profiler.

torch 2.13's `_PipelineScheduleRuntime` labels each action "PP:<action>". Each rank writes a file, with its number under
`distributedInfo`. In a merged file ranks are processes: ordered by `pid` if these count from 0, else by first stage.

Actions of a rank are ordered by start. A repeated instruction starts a new iteration; the schedule is the last
iteration with the most actions, and across ranks the iterations that started closest to each other. For ranks with a
GPU the labels of the GPU count, since CPU labels state when work was launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from recycle.errors import ScheduleError, errors_as
from recycle.ir import chrome
from recycle.ir.columns import MOST_INSTRUCTIONS, require_few
from recycle.ir.formats.schedule_input import ScheduleInput
from recycle.ir.formats.torch_csv import (
    OLD_NOTATION,
    OTHER_END,
    Actions,
    from_old_notation,
    homes,
    implied_peer,
    parse_action,
    schedule_of,
)
from recycle.ir.instruction import Instruction, Transfer, computes
from recycle.ir.schedule import Schedule
from recycle.ir.trace import Trace, TraceBuilder
from recycle.job.shape import Worker

_LABEL = "PP:"
_MARK = f'"{_LABEL}'.encode()
"""Text of events with a label; other events are not parsed."""
_OLD_LABEL = re.compile(rb'"PP:[0-9]{1,9}BW')
_Microseconds = Annotated[float, msgspec.Meta(ge=-1e17, le=1e17)]
"""Time of a label: at most three thousand years."""
_ON_DEVICE = "gpu_user_annotation"
"""Category of the profiler's copies of labels on GPU streams."""


def loads(content: bytes, name: str, most: int = MOST_INSTRUCTIONS) -> ScheduleInput:
    """Parse one file, whose ranks are its processes; `name` begins every error message.

    Raises:
        ScheduleError: labels are absent, incomplete or more than `most`, or the ranks are not one pipeline.
    """
    actions = _actions(content, name, most)
    if not actions:
        raise ScheduleError(
            f"{name}: no event is named {_LABEL}<action>: the file is neither a timeline or trace that recycle wrote,"
            " nor a trace of torch's profiler of a pipeline schedule that labels its actions"
        )
    ranks: dict[int | str, list[_Action]] = {}
    for action in actions:
        ranks.setdefault(action.pid, []).append(action)
    warnings = []
    pids = sorted(ranks, key=lambda pid: (_first_stage(ranks[pid]), str(pid)))
    if set(pids) == set(range(len(pids))):
        pids = list(range(len(pids)))
    elif len(pids) > 1:
        warnings.append(f"used the processes {', '.join(map(str, pids))} as ranks, ordered by their first stages")
    if _OLD_LABEL.search(content):
        warnings.append(OLD_NOTATION)
    return _from_ranks({f"process {pid}": ranks[pid] for pid in pids}, name, warnings)


def load_ranks(traces: Iterable[tuple[str, bytes]], name: str, most: int = MOST_INSTRUCTIONS) -> ScheduleInput:
    """Parse (file name, content) of one file per rank; at most `most` labels in all files together.

    Raises:
        ScheduleError: as `loads`, and if a file does not name its rank or two files name the same rank.
    """
    ranks: dict[int, tuple[str, list[_Action]]] = {}
    for file, content in traces:
        head = chrome.head(content, file)
        rank = head.distributedInfo.get("rank")
        if not isinstance(rank, int):
            raise ScheduleError(
                f"{file}: distributedInfo.rank is missing: the file is not one rank's trace by torch's profiler"
            )
        if rank in ranks:
            raise ScheduleError(f"{file}: is a trace of rank {rank}, as {ranks[rank][0]} is: keep one trace per rank")
        ranks[rank] = file, _actions(content, file, most, head.baseTimeNanoseconds / 1000)
        require_few(sum(len(actions) for _, actions in ranks.values()), f"{name}: ", most)
    return _from_ranks({f"rank {rank}": actions for rank, (_, actions) in sorted(ranks.items())}, name, [])


class _Event(msgspec.Struct, frozen=True):
    name: Any = None
    cat: Any = None


class _Label(msgspec.Struct, frozen=True):
    ph: Literal["X"]
    ts: _Microseconds
    pid: int | str
    dur: _Microseconds | None = None
    tid: int | str = ""


class _Action(NamedTuple):
    """A label: begin, process, name, action, and execution times in microseconds (`end` None: no duration)."""

    begin: float
    pid: int | str
    name: str
    operation: Instruction | str
    start: float
    end: float | None


def _first_stage(actions: Iterable[_Action]) -> int:
    return min((compute.stage for compute in computes(action.operation for action in actions)), default=-1)


def _actions(content: bytes, name: str, most: int, base: float = 0.0) -> list[_Action]:
    require_few(content.count(_MARK) // 2, f"{name}: ", most)  # GPU traces contain each label twice
    is_old = _OLD_LABEL.search(content) is not None
    if content.lstrip().startswith(b"["):
        events = chrome.decode(content, list[msgspec.Raw], name)
    else:
        events = chrome.decode(content, chrome.Events[msgspec.Raw], name).traceEvents
    actions = []
    on_device: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for place, text in enumerate(events):
        raw = bytes(text)
        if raw.startswith(b"{") and _MARK not in raw:
            continue
        event = chrome.decode(raw, _Event, f"{name}: traceEvents[{place}]")
        if not isinstance(event.name, str) or not event.name.startswith(_LABEL):
            continue
        label = chrome.decode(raw, _Label, f"{name}: traceEvents[{place}]: {event.name[:60]!r}")
        begin, end = base + label.ts, None
        if label.dur is not None and label.dur >= 0:
            end = begin + label.dur
        if str(event.cat).lower() == _ON_DEVICE:
            if end is not None:
                on_device.setdefault((event.name, str(label.tid)), []).append((begin, end))
            continue
        try:
            operation = parse_action(event.name.removeprefix(_LABEL), Worker(0, 0), is_old)
        except ScheduleError as error:
            raise ScheduleError(f"{name}: traceEvents[{place}]: {error}") from None
        actions.append(_Action(begin, label.pid, event.name, operation, begin, end))
    if is_old:
        operations = from_old_notation([action.operation for action in actions])
        actions = [action._replace(operation=operation) for action, operation in zip(actions, operations, strict=True)]
    return _on_device(actions, on_device)


def _on_device(actions: list[_Action], streams: Mapping[tuple[str, str], list[tuple[float, float]]]) -> list[_Action]:
    """Replace the times of one rank's actions by their GPU labels, if every compute has one on the busiest stream."""
    longest: dict[str, list[tuple[float, float]]] = {}
    for (name, _), times in streams.items():
        longest[name] = max(longest.get(name, []), times, key=lambda times: sum(end - begin for begin, end in times))
    if not longest or len({action.pid for action in actions}) > 1:
        return actions
    labels = {name: iter(sorted(times)) for name, times in longest.items()}
    timed = []
    for action in sorted(actions, key=lambda action: action.begin):
        start, end = next(labels.get(action.name, iter(())), (None, None))
        if start is not None:
            action = action._replace(start=start, end=end)
        elif any(computes([action.operation])):
            return actions
        timed.append(action)
    return timed


def _from_ranks(ranks: Mapping[str, list[_Action]], name: str, warnings: list[str]) -> ScheduleInput:
    ran: list[list[list[_Action]]] = []
    for rank, actions in ranks.items():
        if not actions:
            raise ScheduleError(f"{name}: {rank} has no label {_LABEL}<action> of torch's pipeline runtime")
        ran.append(_iterations(sorted(actions, key=lambda action: action.begin)))
    chosen = _simultaneous(ran)
    kept = [[action.operation for action in of_rank[number]] for of_rank, number in zip(ran, chosen, strict=True)]
    _require_one_pipeline(dict(zip(ranks, kept, strict=True)), name)
    with errors_as(ScheduleError, name):
        schedule, dropped = schedule_of(kept)
    most = max(map(len, ran))
    which = [f"kept the last whole one of {most} iterations"] if most > 1 else []
    return ScheduleInput(
        name,
        schedule,
        trace=_trace(schedule, ran, chosen),
        step=max(chosen),
        warnings=(*warnings, *which, *dropped),
    )


def _iterations(actions: Iterable[_Action]) -> list[list[_Action]]:
    iterations: list[list[_Action]] = [[]]
    seen: set[Instruction] = set()
    for action in actions:
        operation = action.operation
        if operation in seen:
            last, following = iterations[-1], list[_Action]()
            while last and last[-1].operation == "UNSHARD":
                following.append(last.pop())
            iterations.append(following)
            seen.clear()
        if not isinstance(operation, str):
            seen.add(operation)
        iterations[-1].append(action)
    return iterations


def _simultaneous(ran: Sequence[list[list[_Action]]]) -> list[int]:
    """Return the iteration of each rank that is used: complete, and closest in time to the other ranks."""
    begins = []
    for iterations in ran:
        longest = max(map(len, iterations))
        begins.append({n: actions[0].begin for n, actions in enumerate(iterations) if len(actions) == longest})
    moment = min(max(of_rank.values()) for of_rank in begins)
    return [min(of_rank, key=lambda n: abs(of_rank[n] - moment)) for of_rank in begins]


def _trace(schedule: Schedule, ranks: Sequence[list[list[_Action]]], chosen: Sequence[int]) -> Trace | None:
    home, last, builder = homes(schedule.placement), max(chosen), TraceBuilder(schedule.shape)
    rows = [
        (Worker(0, rank), number - kept + last, action, action.operation)
        for rank, (iterations, kept) in enumerate(zip(ranks, chosen, strict=True))
        for number, iteration in enumerate(iterations)
        for action in iteration
        if not isinstance(action.operation, str)
    ]
    begin = min(action.start for _, _, action, _ in rows)
    for worker, step, action, operation in rows:
        if action.end is None:
            return None
        if isinstance(operation, Transfer):
            operation = replace(operation, peer=implied_peer(operation, worker, home))
        builder.add(worker, worker, 0, step, str(operation), (action.start - begin) / 1e6, (action.end - begin) / 1e6)
    return builder.build(())


def _require_one_pipeline(programs: Mapping[str, Actions], name: str) -> None:
    home: dict[int, str] = {}
    mentioned: set[int] = set()
    for rank, program in programs.items():
        for compute in computes(program):
            if home.setdefault(compute.stage, rank) != rank:
                both = f"{home[compute.stage]} and in {rank}"
                raise ScheduleError(
                    f"{name}: stage {compute.stage} runs in {both}: give the traces of one pipeline only"
                )
        for instruction in program:
            if isinstance(instruction, Transfer):
                mentioned |= {instruction.stage, max(0, instruction.stage + OTHER_END[type(instruction)])}
    absent = next(stage for stage in count() if stage not in home)
    if absent <= max(mentioned | set(home), default=-1):
        raise ScheduleError(f"{name}: no rank runs stage {absent}: give the traces of all ranks, in one directory")
