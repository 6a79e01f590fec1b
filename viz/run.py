"""Run: a run directory for the viewer, with metrics, events, plans, trace, and segments between membership changes.

Missing or broken files become lines in `problems`. The logs of a live run, without `trace.json`, are merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from recycle.errors import RecycleError, errors_as
from recycle.ir.lower import lowered_graph
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, simulate
from recycle.ir.trace import Trace, executed_timeline
from recycle.job import Job
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.runs.logs import plan_file
from recycle.runs.read_report import load_report
from recycle.runs.report import RunReport
from viz.lane_cache import Limits, TimedLanes, TimelineContext
from viz.lanes import LaneTable, Panel
from viz.numbers import is_number

T = TypeVar("T")
Choices = dict[str, tuple[str, Callable[[], TimedLanes | None]]]
"""Timelines to compare: key -> (title, what makes it)."""


def read_or_report(read: Callable[[], T], problems: list[str], default: T, suffix: str = "") -> T:
    """Return the result of `read`; if it fails, return `default` and add the error, with `suffix`, to `problems`."""
    try:
        return read()
    except RecycleError as error:
        if f"{error}{suffix}" not in problems:
            problems.append(f"{error}{suffix}")
        return default


@dataclass(frozen=True)
class RunSegment:
    """Consecutive steps of one generation with one plan."""

    first: int
    last: int
    plan: str | None
    failed: tuple[Worker, ...]

    @property
    def steps(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"

    @property
    def workers(self) -> str:
        return f"without {', '.join(map(str, self.failed))}" if self.failed else "all workers"


def typical_step(segment: RunSegment) -> int:
    """Return a typical step of a segment: the second one, because the first runs with the optimizer's barrier."""
    return min(segment.first + 1, segment.last)


STEPS_OFFERED = 500
"""Maximum number of executed steps offered for comparison."""
STALL_SECONDS = 60.0
"""Seconds without a new line after which an unfinished run counts as stalled."""


@dataclass(eq=False)
class Run:
    """A run directory, read once. Build with `viz.run_files.load_run`.

    Attributes:
        job: the resolved job; None if it cannot be read.
        metrics: the committed steps, ascending, one entry per step.
        problems: a line per failed read.
        live: whether the run has not merged its trace yet.
    """

    path: Path
    job: Job | None
    shape: Shape | None
    profile: Profile
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    trace: Trace | None
    problems: list[str]
    live: bool
    _results: dict[object, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def _read_once(self, key: object, read: Callable[[], T]) -> T | None:
        if key not in self._results:
            self._results[key] = read_or_report(read, self.problems, None)
        result: T | None = self._results[key]
        return result

    def plan(self, digest: str | None) -> Schedule | None:
        """Return the plan of a content hash; None if absent, and a problem if unreadable."""
        if digest is None:
            return None
        return self._read_once(("plan", digest), lambda: Schedule.load(plan_file(self.path / "plans", digest)))

    def plan_context(self, digest: str | None) -> TimelineContext | None:
        """Return the context of a plan; None, and a problem, if it cannot be timed."""
        plan = self.plan(digest)
        if plan is None:
            return None

        def time_plan() -> TimelineContext:
            with errors_as(RecycleError, f"plan {digest}"):
                return TimelineContext.of_plan(simulate(plan, self.profile), self._limits)

        return self._read_once(("context", digest), time_plan)

    @property
    def report(self) -> RunReport | None:
        """Breakdown of the run's time; None, and a problem, if it cannot be read."""
        return self._read_once("report", lambda: load_report(self.path))

    @cached_property
    def generations(self) -> dict[int | None, dict[str, Any]]:
        return {
            event["generation"]: event
            for event in self.events
            if event.get("kind") == "generation" and isinstance(event.get("generation"), int)
        }

    @cached_property
    def further_deaths(self) -> list[int]:
        """Further failures that each stage tolerates without losing optimizer state; [] without a sharded optimizer."""
        logged = (event.get("further_deaths") for event in reversed(self.events) if event.get("kind") == "shards")
        stages = next(logged, None)
        return stages if isinstance(stages, list) and all(type(count) is int for count in stages) else []

    @cached_property
    def _metrics_of(self) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in self.metrics}

    @property
    def is_active(self) -> bool:
        """Return whether metrics or logs were written within the last `STALL_SECONDS` seconds."""
        files = [self.path / "metrics.jsonl", self.path / "events.jsonl", *(self.path / "logs").glob("*")]
        written = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
        return time.time() - written < STALL_SECONDS

    @cached_property
    def steps(self) -> list[int]:
        """All known steps, ascending; for a live run only the committed ones."""
        traced = self.trace.steps if self.trace else ()
        if self.live and self._metrics_of:
            last = max(self._metrics_of)
            traced = [step for step in traced if step <= last]
        return sorted({*self._metrics_of, *traced})

    def generations_of(self, step: int) -> list[int]:
        """Return the generations that tried `step`, ascending; the last one counted."""
        tried = self.trace.generations_of(step) if self.trace else []
        counted = self._metrics_of.get(step, {}).get("generation")
        return sorted({*tried, *([counted] if isinstance(counted, int) else [])})

    def _attempt(self, step: int, generation: int | None) -> int | None:
        tried = self.generations_of(step)
        return tried[-1] if generation is None and tried else generation

    def plan_of(self, step: int, generation: int | None = None) -> str | None:
        """Return the hash of the plan of `step` in `generation`; None: in its last generation."""
        generation = self._attempt(step, generation)
        event = self.generations.get(generation)
        line = self._metrics_of.get(step, {})
        # A step's line describes its last generation; its event describes an earlier attempt.
        if line.get("plan") is not None and (event is None or line.get("generation") in (None, generation)):
            return str(line["plan"])
        return str(event["plan"]) if event and event.get("plan") is not None else None

    def failed_in(self, step: int, generation: int | None = None) -> tuple[Worker, ...]:
        """Return the processes that were dead in that attempt of `step`, or died in it."""
        if self.shape is None:
            return ()
        generation = self._attempt(step, generation)
        later = [other for other in self.generations_of(step) if generation is not None and other > generation]
        events = [self.generations.get(number, {}) for number in (generation, *later[:1])]
        lives = [live for event in events if isinstance(live := event.get("live"), list)]
        if lives:
            return tuple(worker for worker in self.shape.workers() if any(str(worker) not in live for live in lives))
        plan = self.plan(self.plan_of(step, generation))
        return tuple(sorted(plan.failed)) if plan else ()

    @cached_property
    def segments(self) -> list[RunSegment]:
        def key(step: int) -> tuple[int, str]:
            tried = self.generations_of(step)
            return (tried[-1] if tried else -1, self.plan_of(step) or "")

        runs = [(plan, list(steps)) for (_, plan), steps in groupby(self.steps, key=key)]
        return [RunSegment(s[0], s[-1], plan or None, self.failed_in(s[0])) for plan, s in runs]

    @cached_property
    def notable_steps(self) -> dict[str, int]:
        """Steps worth looking at, by why: before, during and after the first failure; one without failures.

        The second step of a segment is preferred: the first runs with the optimizer's barrier.
        """
        segments = self.segments
        first_failed = next((i for i, segment in enumerate(segments) if segment.failed), None)
        if first_failed is None:
            return {"a step of the run": typical_step(segments[0])} if segments else {}
        steps = {"before the failure": segments[first_failed - 1].last} if first_failed else {}
        steps["during the failure"] = typical_step(segments[first_failed])
        after = next((segment for segment in segments[first_failed + 1 :] if not segment.failed), None)
        if after is not None:
            steps["after the return"] = typical_step(after)
        return steps

    def planned_lanes(self, step: int, generation: int | None = None) -> TimedLanes | None:
        """Return the lanes of the plan of `step`, until the deadlock if it has one; None without a plan."""
        attempt = self._attempt(step, generation)
        return self._planned(self.plan_of(step, attempt), _process_of_role(self.generations.get(attempt, {})))

    def executed_lanes(self, step: int, generation: int | None = None) -> TimedLanes | None:
        """Return the executed lanes of `step` in a generation (None: its last); None if nothing was traced."""
        attempt = self._attempt(step, generation)
        if self.trace is None or attempt not in self.trace.generations_of(step):
            return None
        window = self.trace.window(step, step, attempt)
        timeline = executed_timeline(window, self.profile)
        context = TimelineContext(timeline, self._limits, executed=True)
        return TimedLanes(self._lanes_of(window, step, timeline), context)

    def evaluation_lanes(self, step: int) -> TimedLanes | None:
        window = self.trace.evaluation(step) if self.trace is not None else None
        return None if window is None else TimedLanes(self._lanes_of(window, step))

    def _lanes_of(self, window: Trace, step: int, timeline: Timeline | None = None) -> LaneTable:
        return LaneTable.from_trace(window, self.profile, self.failed_in(step, int(window.generation[0])), timeline)

    @cached_property
    def evaluations(self) -> dict[int, float]:
        losses = {line["step"]: line.get("eval_loss") for line in self.metrics}
        return {step: float(loss) for step, loss in losses.items() if is_number(loss) and np.isfinite(loss)}

    def panels(self) -> list[Panel]:
        lanes = [
            (f"{title.capitalize()}, step {step}: {phase}", view(step))
            for title, step in self.notable_steps.items()
            for phase, view in (("planned", self.planned_lanes), ("executed", self.executed_lanes))
        ]
        return [Panel(title, shown.table) for title, shown in lanes if shown is not None and len(shown.table)]

    def choices(self, place: int) -> Choices:
        """Return the plans, then the last `STEPS_OFFERED` executed steps, for comparison."""
        result: Choices = {}
        for segment in self.segments:
            if segment.plan:
                title = f"{self.name}: plan of steps {segment.steps}, {segment.workers}"
                result.setdefault(f"plan/{place}/{segment.plan}", (title, partial(self._planned, segment.plan)))
        for step in (self.trace.steps if self.trace else [])[-STEPS_OFFERED:]:
            title = f"{self.name}: executed step {step}"
            result[f"step/{place}/{step}"] = title, partial(self.executed_lanes, step)
        return result

    @property
    def step_to_show(self) -> int | None:
        """The step to show first: during the failure, if any; None before any step."""
        steps = self.notable_steps
        return steps.get("during the failure", next(iter(steps.values()), None))

    def suggested_choices(self, place: int) -> list[str]:
        """Return the keys of a plan and an executed step of it, during the failure if there was one."""
        step = self.step_to_show
        plan = self.plan_of(step) if step is not None else None
        was_traced = self.trace is not None and step in self.trace.steps
        return [f"plan/{place}/{plan}", f"step/{place}/{step}"] if plan and was_traced else []

    def _planned(self, digest: str | None, process_of: Mapping[Worker, Worker] = {}) -> TimedLanes | None:
        plan, context = self.plan(digest), self.plan_context(digest)
        if plan is None:
            return None
        if context is None:
            return TimedLanes(LaneTable.until_deadlock(lowered_graph(plan), self.profile))
        unit = self.job.seconds_per_unit if self.job else None
        lanes = LaneTable.from_timeline(context.timeline, "s" if unit == 1 else "", process_of=process_of)
        return TimedLanes(lanes, context, seconds_per_unit=unit)

    @cached_property
    def _limits(self) -> Limits:
        with suppress(RecycleError):  # the limit is in bytes, and the profile is gone
            if self.job and (limits := self.job.activation_limits()) is not None:
                return tuple(limits)
        return None


def _process_of_role(event: Mapping[str, Any]) -> dict[Worker, Worker]:
    roles = event.get("roles")
    try:
        return {Worker.parse(role): Worker.parse(process) for process, role in roles.items()} if roles else {}
    except (RecycleError, AttributeError, TypeError):
        return {}
