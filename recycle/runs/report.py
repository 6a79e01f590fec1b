"""Report of where a run's time went: pure functions of metrics, events and logs.

Recorded times cut the wall clock: a generation was proposed, it began to run, its iterations were committed, a death
was detected. Every interval between two cuts belongs to one part, so the parts add up to the wall clock. The workers'
logs divide committed iterations further: the mean computing time of a live worker is useful, the rest is waiting
(bubbles, transfers, the commit).

Limits: the time between a launcher's death and its restart is not counted; the time of a cluster without agents counts
as starting. A death is known from its detection on: the time before it counts as redone while workers computed, then as
waiting. Without logs (`[train] trace = "off"`) whole iterations are useful.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Any


class TimePart(StrEnum):
    USEFUL = "useful"
    """computing iterations that count, and stepping, as the mean over the live workers"""
    REPLAYING = "replaying"
    """work done twice on purpose: redundant forwards, replays"""
    WAITING = "waiting"
    """bubbles and transfers of such iterations, silence before detection of a failure or until another node leads, and
    waits for re-joins"""
    REDONE = "redone"
    """iterations that began and did not count"""
    PLANNING = "planning"
    """from the end of a generation to the proposal of the next, while a plan is made and dead processes end"""
    FORMING = "forming"
    """from there until the process groups are formed"""
    MOVING = "moving"
    """as forming, for a generation in which state is copied"""
    CHECKPOINTING = "checkpointing"
    """copying state for checkpoints, and waiting for the last one"""
    EVALUATING = "evaluating"
    STARTING = "starting"
    """until the first generation is proposed, at the start and after a return to a checkpoint"""
    ENDING = "ending"
    """after the last iteration"""


@dataclass
class Activity:
    """Logged activity of the workers in one attempt of an iteration.

    `busy` are seconds over all workers spent computing and stepping, `replayed` seconds of work done twice on purpose.
    """

    workers: int = 0
    busy: float = 0.0
    replayed: float = 0.0
    first: float = float("inf")
    last: float = 0.0


@dataclass(frozen=True)
class Span:
    """An interval of the wall clock, in seconds since the run's start; `step` is an iteration that counts."""

    start: float
    end: float
    part: TimePart
    step: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class GenerationChange:
    """The end of a generation, and its cost until the next one ran.

    Attributes:
        time, step: when the generation ended; the first iteration of the next one.
        kind: one of `CHANGES`.
        costs: part -> seconds.
        slower: seconds that the following iterations took longer, by their plans, than with all workers; None if the
            unit of the plans' times is unknown.
    """

    time: float
    step: int
    kind: str
    what: str
    costs: dict[TimePart, float]
    slower: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of all costs, without slower iterations."""
        return sum(self.costs.values())


@dataclass(frozen=True)
class RunReport:
    """Breakdown of a run's time.

    `expected`: seconds of its iterations by their plans; `fault_free`: by the plan for all workers; None if unknown.
    """

    spans: list[Span]
    changes: list[GenerationChange]
    steps: int
    expected: float | None
    fault_free: float | None

    @property
    def wall(self) -> float:
        """Seconds from the run's start to its end, or to the last recorded time."""
        return self.spans[-1].end if self.spans else 0.0

    @property
    def parts(self) -> dict[TimePart, float]:
        seconds_by_part = dict.fromkeys(TimePart, 0.0)
        for span in self.spans:
            seconds_by_part[span.part] += span.seconds
        return seconds_by_part

    @property
    def measured(self) -> float:
        """Measured seconds of the iterations that count, comparable with `expected`."""
        return sum(
            span.seconds for span in self.spans if span.step is not None and span.part is not TimePart.EVALUATING
        )

    @property
    def effective_ratio(self) -> float:
        """Effective training time: share of the wall clock in iterations that count; 0 before the first one."""
        return self.measured / self.wall if self.wall else 0.0


@dataclass
class _Generation:
    number: int
    proposed: float
    step: int
    began: float | None = None
    commits: list[Mapping[str, Any]] = field(default_factory=list)
    joins: bool = False
    moves: bool = False


Attempts = Mapping[tuple[int, int], Activity]
"""(generation, step) -> logged activity."""
_CAUSES = {
    "detected": ("failure", "{worker} {cause}"),
    "restored": ("restart", "back to {checkpoint}"),
    "drained": ("drain", "{worker} left"),
    "rejoined": ("re-join", "{worker} re-joined"),
    "replanned": ("plan", "{cause}"),
    "moved": ("layout", "layers moved to {worker}"),
    "undone": ("repetition", "{cause}"),
    "layout": ("layout", "another layout, without copies"),
}
"""Events that explain a change, most specific first -> (kind of change, text)."""
CHANGES = (*dict.fromkeys(kind for kind, _ in _CAUSES.values()), "formation")
"""Kinds of changes."""
_STEP_EVENTS = ("drained", "undone", "rejoined", "replanned", "moved", "layout")
"""Events that name the first step of a generation, written after the commit before, maybe in an evaluation."""


def report_of(
    metrics: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    attempts: Attempts,
    unit: float | None = None,
    is_over: bool = False,
) -> RunReport:
    """Compute the breakdown of a run's time.

    Args:
        metrics: lines of `metrics.jsonl`, ascending.
        unit: seconds per unit of the plans' periods; None if unknown.
        is_over: whether the run has ended, so that the time after its last iteration counts.
    """
    generations = _generations(metrics, events, attempts)
    cutter = _Cutter(events, attempts, {int(e["step"]): _seconds(e, "stalled") for e in _of_kind(events, "checkpoint")})
    for place, generation in enumerate(generations):
        cutter.cut(generation, generations[place + 1] if place + 1 < len(generations) else None)
    if is_over:
        cutter.end(max((_seconds(line, "time") for line in [*events, *metrics]), default=0.0))
    usual = _usual_period(metrics)
    known = unit is not None and usual > 0
    expected = sum(_seconds(line, "period") for line in metrics) * unit if known and unit is not None else None
    changes = _with_slower(cutter.changes, metrics, usual, unit if known else None)
    fault_free = usual * unit * len(metrics) if known and unit is not None else None
    return RunReport(cutter.spans, changes, len(metrics), expected, fault_free)


def _usual_period(metrics: Iterable[Mapping[str, Any]]) -> float:
    lines = list(metrics)
    most = max((line.get("live_workers", 0) for line in lines), default=0)
    periods = [_seconds(line, "period") for line in lines if line.get("live_workers") == most]
    return min((period for period in periods if period > 0), default=0.0)


def _with_slower(
    changes: Sequence[GenerationChange], metrics: Iterable[Mapping[str, Any]], usual: float, unit: float | None
) -> list[GenerationChange]:
    if unit is None:
        return list(changes)
    slower = [0.0] * len(changes)
    for line in metrics:
        earlier = [place for place, change in enumerate(changes) if change.step <= line["step"]]
        if earlier:
            slower[earlier[-1]] += (_seconds(line, "period") - usual) * unit
    return [replace(change, slower=seconds) for change, seconds in zip(changes, slower, strict=True)]


def _generations(
    metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], attempts: Attempts
) -> list[_Generation]:
    generations: dict[int, _Generation] = {}
    for event in _of_kind(events, "generation"):
        number = int(event["generation"])
        generations.setdefault(number, _Generation(number, _seconds(event, "time"), int(event["step"])))
    for line in metrics:
        number, time = int(line.get("generation", 1)), _seconds(line, "time")
        generation = generations.setdefault(
            number, _Generation(number, _seconds(line, "began") or time, int(line["step"]))
        )
        if not generation.commits and "began" in line:
            generation.began = _seconds(line, "began")
        generation.commits.append(line)
    for (number, _), activity in attempts.items():
        if activity.workers and (started := generations.get(number)) is not None:
            started.began = activity.first if started.began is None else min(started.began, activity.first)
    for event in _of_kind(events, "recovered"):
        recovered = generations.get(int(event.get("generation", 0)))
        if recovered is not None and recovered.began is None:  # it committed nothing, and may have evaluated
            recovered.began = _seconds(event, "time")
    ordered = sorted(generations.values(), key=lambda generation: generation.number)
    for event in events:
        if event.get("kind") not in ("rejoined", "moved") or event.get("while_running"):
            continue
        before = [
            generation
            for generation in ordered
            if generation.proposed <= _seconds(event, "time") and generation.step == event.get("step")
        ]
        if before:
            before[-1].moves = True
            before[-1].joins |= event["kind"] == "rejoined"
    return ordered


class _Cutter:
    def __init__(self, events: Sequence[Mapping[str, Any]], attempts: Attempts, stalls: Mapping[int, float]) -> None:
        self._events, self._attempts, self._stalls = events, attempts, stalls
        self._now = 0.0
        self._ended: float | None = None
        self._committed = 0.0
        self._open = 0
        self._evaluated, self._step = 0.0, 0
        self._share = _busy_share(attempts)
        self.spans: list[Span] = []
        self.changes: list[GenerationChange] = []

    def _to(self, end: float, part: TimePart, step: int | None = None) -> None:
        if end > self._now:
            self.spans.append(Span(self._now, end, part, step))
            self._now = end

    def cut(self, generation: _Generation, after: _Generation | None) -> None:
        self._gap(generation)
        limit = after.proposed if after is not None else float("inf")
        if generation.began is not None:
            self._to(min(generation.began, limit), TimePart.MOVING if generation.moves else TimePart.FORMING)
            self._note_change(generation)
            self._evaluate(limit)
            for line in generation.commits:
                self._iteration(generation.number, line)
                self._evaluated, self._step = _seconds(line, "time") + _seconds(line, "eval_seconds"), int(line["step"])
                self._evaluate(limit)
            self._ended, self._open = self._now, len(self.spans)
            self._committed = _seconds(generation.commits[-1], "time") if generation.commits else self._now
        self._tail(generation, limit, after)

    def _gap(self, generation: _Generation) -> None:
        since = self._now if self._ended is None else self._ended
        kinds = {e["kind"] for e in self._events if since <= _seconds(e, "time") <= generation.proposed}
        part = TimePart.PLANNING
        if self._ended is None or "restored" in kinds or not self.spans:
            part = TimePart.STARTING
        elif generation.joins and "detected" not in kinds:
            part = TimePart.WAITING
        self._to(generation.proposed, part)

    def _iteration(self, number: int, line: Mapping[str, Any]) -> None:
        step, start, end = int(line["step"]), self._now, _seconds(line, "time")
        length = max(0.0, end - start)
        activity = self._attempts.get((number, step))
        if activity is not None and activity.workers:
            useful, replayed = activity.busy / activity.workers, activity.replayed / activity.workers
        else:
            useful, replayed = self._share * length, 0.0
        stall = self._stalls.get(step - 1, 0.0)
        for part, seconds in (
            (TimePart.CHECKPOINTING, stall),
            (TimePart.USEFUL, useful),
            (TimePart.REPLAYING, replayed),
        ):
            self._to(min(end, self._now + seconds), part, step)
        self._to(end, TimePart.WAITING, step)

    def _evaluate(self, limit: float) -> None:
        """Cut up to the end of the last evaluation, which the next generation repeats if a death interrupts it."""
        ends = [self._first(kind, self._now, limit) for kind in ("detected", "restored")]
        limit = min([limit, *(end for end in ends if end is not None)])
        self._to(min(self._evaluated, limit), TimePart.EVALUATING, self._step)

    def _tail(self, generation: _Generation, limit: float, after: _Generation | None) -> None:
        if generation.began is None:  # it never ran
            self._to(self._first("detected", self._now, limit) or (limit if after else self._now), TimePart.FORMING)
            return
        detected = self._first("detected", self._now, limit) or self._first("coordinator", self._now, limit)
        restored = self._first("restored", self._now, limit)
        ends = {step: each.last for (number, step), each in self._attempts.items() if number == generation.number}
        last_ends = list(ends.values())
        computed = min(max(last_ends, default=self._now), limit)
        if detected is not None:
            self._to(min(detected, computed) if last_ends else detected, TimePart.REDONE)
            self._to(detected, TimePart.WAITING)
        elif restored is not None or self._is_repeated(generation, after):
            committed = int(generation.commits[-1]["step"]) if generation.commits else -1
            repeated = [end for step, end in ends.items() if step > committed]
            self._to(min(max(repeated, default=self._now), limit), TimePart.REDONE)

    def _is_repeated(self, generation: _Generation, after: _Generation | None) -> bool:
        return after is not None and (generation.number, after.step) in self._attempts

    def _first(self, kind: str, since: float, until: float) -> float | None:
        times = (_seconds(event, "time") for event in _of_kind(self._events, kind))
        return next((time for time in times if since - 1e-6 <= time <= until), None)

    def _note_change(self, generation: _Generation) -> None:
        if self._ended is None:
            return
        until = _seconds(generation.commits[0], "time") if generation.commits else self._now
        explaining = [
            event
            for event in self._events
            if (event["kind"] != "layout" or event.get("moves"))
            and (
                event.get("step") == generation.step and _seconds(event, "time") >= self._committed
                if event["kind"] in _STEP_EVENTS
                else self._ended <= _seconds(event, "time") <= until
            )
        ]
        kinds = [str(event["kind"]) for event in explaining]
        kind = next((name for name in _CAUSES if name in kinds), None)
        costs: dict[TimePart, float] = {}
        for span in self.spans[self._open :]:
            costs[span.part] = costs.get(span.part, 0.0) + span.seconds
        what = "; ".join(dict.fromkeys(_words(event) for event in explaining if event["kind"] == kind))
        name = _CAUSES[kind][0] if kind is not None else "formation"
        self.changes.append(GenerationChange(self._ended, generation.step, name, what or "formed again", costs))

    def end(self, end: float) -> None:
        written = [_seconds(event, "time") for event in _of_kind(self._events, "checkpoint")]
        self._to(min(end, max(written, default=0.0)), TimePart.CHECKPOINTING)
        self._to(end, TimePart.ENDING)


def _busy_share(attempts: Attempts) -> float:
    shares = [
        attempt.busy / attempt.workers / (attempt.last - attempt.first)
        for attempt in attempts.values()
        if attempt.workers and attempt.last > attempt.first
    ]
    return min(1.0, median(shares)) if shares else 1.0


def _words(event: Mapping[str, Any]) -> str:
    fields = {name: event.get(name, "?") for name in ("worker", "cause", "checkpoint")}
    return _CAUSES[str(event["kind"])][1].format(**fields)


def _of_kind(events: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("kind") == kind]


def _seconds(line: Mapping[str, Any], key: str) -> float:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
