"""The schedule that torch ran, from traces of torch's profiler.

torch's pipeline runtime labels each action that it performs "PP:<action>" (torch 2.13: `_PipelineScheduleRuntime` and
the schedules built on it; ScheduleGPipe and Schedule1F1B, which are not, label nothing of the kind). A rank writes its
own file, with its number under `distributedInfo`; files of one pipeline are taken in the order of these numbers. In a
merged file ranks are processes: in the order of their `pid` if these count from 0, else of their first stages.

A rank's actions are ordered by when they began. Where an instruction comes again a new iteration begins; the last of
those with most actions is kept. `torch_actions` says what follows from the actions. Times are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, NamedTuple

import msgspec

from recycle.errors import ScheduleError, errors_as
from recycle.ir import chrome
from recycle.ir.formats.torch_actions import (
    OTHER_END,
    Actions,
    computes,
    parse_action,
    schedule_of,
)
from recycle.ir.instruction import Instruction, Transfer
from recycle.ir.schedule import Schedule
from recycle.shape import Worker

_log = logging.getLogger(__name__)

_LABEL = "PP:"
_MARK = f'"{_LABEL}'.encode()
"""What an event with a label has in its text; the others, of any kind and by any tool, are left as they are."""
_ON_DEVICE = "gpu_user_annotation"
"""Category under which the profiler repeats labels on the streams of a GPU."""


def loads(content: bytes, name: str) -> Schedule:
    """The schedule in one file, whose ranks are its processes; `name` begins every error message. Logs what is dropped.

    Raises:
        ScheduleError: there is no label, a labelled event is not whole (names it), or the ranks make no pipeline.
    """
    actions = _actions(content, name)
    if not actions:
        raise ScheduleError(
            f"{name}: no event is named {_LABEL}<action>: it is neither a timeline nor a trace that recycle wrote, nor"
            " one of torch's profiler from a pipeline whose schedule labels its actions"
        )
    ranks: dict[int | str, list[_Action]] = {}
    for action in actions:
        ranks.setdefault(action.pid, []).append(action)
    warnings = []
    pids = sorted(ranks, key=lambda pid: (_first_stage(ranks[pid]), str(pid)))
    if set(pids) == set(range(len(pids))):
        pids = list(range(len(pids)))
    elif len(pids) > 1:
        warnings.append(f"took the processes {', '.join(map(str, pids))} for ranks, by their first stages")
    return _from_ranks({f"process {pid}": ranks[pid] for pid in pids}, name, warnings)


def load_ranks(traces: Iterable[tuple[str, bytes]], name: str) -> Schedule:
    """The schedule in several files, one per rank.

    Args:
        traces: (file name, content); held one at a time.
        name: of the whole, for error messages.

    Raises:
        ScheduleError: as `loads`, and where a file does not name its rank or two name the same.
    """
    ranks: dict[int, tuple[str, list[_Action]]] = {}
    for file, content in traces:
        rank = chrome.head(content, file).distributedInfo.get("rank")
        if not isinstance(rank, int):
            raise ScheduleError(f"{file}: distributedInfo.rank is missing: it is no rank's trace of torch's profiler")
        if rank in ranks:
            raise ScheduleError(f"{file}: is of rank {rank}, as {ranks[rank][0]} is: keep one trace of each rank")
        ranks[rank] = file, _actions(content, file)
    return _from_ranks({f"rank {rank}": actions for rank, (_, actions) in sorted(ranks.items())}, name, [])


class _Event(msgspec.Struct, frozen=True):
    """An event that may be a label."""

    ph: Any = None
    name: Any = None
    cat: Any = None
    pid: Any = None
    ts: Any = None


class _Action(NamedTuple):
    """A label of torch's: when it begins (microseconds, then place in the file), in which process, and what it says.

    `what` is an instruction, or the name of a sharding action.
    """

    begin: float
    place: int
    pid: int | str
    what: Instruction | str


def _first_stage(actions: Iterable[_Action]) -> int:
    return min((piece.stage for piece in computes(action.what for action in actions)), default=-1)


def _actions(content: bytes, name: str) -> list[_Action]:
    """The labelled actions of a trace of torch's profiler, in file order."""
    if content.lstrip().startswith(b"["):
        events = chrome.decode(content, list[msgspec.Raw], name)
    else:
        events = chrome.decode(content, chrome.Events[msgspec.Raw], name).traceEvents
    found = []
    for place, text in enumerate(events):
        raw = bytes(text)
        if raw.startswith(b"{") and _MARK not in raw:
            continue
        event = chrome.decode(raw, _Event, f"{name}: traceEvents[{place}]")
        if not isinstance(event.name, str) or not event.name.startswith(_LABEL) or str(event.cat).lower() == _ON_DEVICE:
            continue
        where = f"{name}: traceEvents[{place}]: {event.name[:60]!r}"
        if event.ph != "X":
            raise ScheduleError(f'{where}: ph must be "X", a slice with its duration, got {event.ph!r}')
        if not isinstance(event.ts, int | float) or isinstance(event.ts, bool):
            raise ScheduleError(f"{where}: ts must be a number of microseconds, got {event.ts!r}")
        if not isinstance(event.pid, int | str):
            raise ScheduleError(f"{where}: pid must be a number or text, got {event.pid!r}")
        try:
            what = parse_action(event.name.removeprefix(_LABEL), Worker(0, 0))
        except ScheduleError as error:
            raise ScheduleError(f"{name}: traceEvents[{place}]: {error}") from None
        found.append(_Action(event.ts, place, event.pid, what))
    return found


def _from_ranks(ranks: Mapping[str, list[_Action]], name: str, warnings: list[str]) -> Schedule:
    """The schedule of labelled actions, by rank in order; `warnings` is what to log before what is dropped."""
    kept: dict[str, Actions] = {}
    most = 0
    for rank, actions in ranks.items():
        if not actions:
            raise ScheduleError(f"{name}: {rank} has no label {_LABEL}<action> of torch's pipeline runtime")
        iterations = _iterations(sorted(actions))
        most = max(most, len(iterations))
        longest = max(map(len, iterations))
        kept[rank] = next(iteration for iteration in reversed(iterations) if len(iteration) == longest)
    _require_one_pipeline(kept, name)
    with errors_as(ScheduleError, name):
        schedule, dropped = schedule_of(list(kept.values()))
    warnings.append("left out the times" + (f"; kept the last whole one of {most} iterations" if most > 1 else ""))
    for message in warnings + dropped:
        _log.warning("%s: %s", name, message)
    return schedule


def _iterations(actions: Iterable[_Action]) -> list[list[Instruction | str]]:
    """A rank's actions, cut where an instruction comes again; UNSHARDs just before it go with what follows."""
    iterations: list[list[Instruction | str]] = [[]]
    seen: set[Instruction] = set()
    for _, _, _, what in actions:
        if what in seen:
            last, following = iterations[-1], list[Instruction | str]()
            while last and last[-1] == "UNSHARD":
                following.append(last.pop())
            iterations.append(following)
            seen.clear()
        if not isinstance(what, str):
            seen.add(what)
        iterations[-1].append(what)
    return iterations


def _require_one_pipeline(programs: Mapping[str, Actions], name: str) -> None:
    """Refuses traces of several pipelines, and those of one where ranks are missing."""
    home: dict[int, str] = {}
    mentioned: set[int] = set()
    for rank, program in programs.items():
        for piece in computes(program):
            if home.setdefault(piece.stage, rank) != rank:
                both = f"{home[piece.stage]} and in {rank}"
                raise ScheduleError(f"{name}: stage {piece.stage} runs in {both}: keep the ranks of one pipeline")
        for one in program:
            if isinstance(one, Transfer):
                mentioned |= {one.stage, max(0, one.stage + OTHER_END[type(one)])}
    absent = next(stage for stage in count() if stage not in home)
    if absent <= max(mentioned | set(home), default=-1):
        raise ScheduleError(f"{name}: stage {absent} runs in no rank: give the traces of all ranks, in one directory")
