"""Run: a run directory for the viewer, with metrics, events, plans, trace, and segments between membership changes.

Missing or broken files become lines in `problems`, and the rest is shown; only a folder that is not a run directory is
an error. For a live run, which has no `trace.json`, the logs are merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recycle.errors import RecycleError
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, simulate
from recycle.ir.trace import Trace, executed_schedule, executed_timeline
from recycle.job import Job
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.runs.logs import plan_file
from recycle.runs.read_report import load_report
from recycle.runs.report import RunReport
from viz.lane_cache import Drawn, Explainer, Limits, Operand, stated_limits
from viz.lanes import LaneTable, Panel, weight_share


@dataclass(frozen=True)
class RunSegment:
    """Consecutive steps of one generation with one plan."""

    first: int
    last: int
    plan: str | None
    generation: int | None
    failed: tuple[Worker, ...]

    @property
    def steps(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"

    @property
    def alive(self) -> str:
        return f"without {', '.join(map(str, self.failed))}" if self.failed else "all workers"


class NotableStep(NamedTuple):
    """A step worth looking at, and why."""

    title: str
    step: int


@dataclass(frozen=True)
class PlanFigures:
    """Promised figures of a plan: seconds (or units of the profile) per iteration, and the gap to the bound."""

    period: float
    makespan: float
    lower_bound: float | None
    gap: float | None
    optimizer: str


def settled(segment: RunSegment) -> int:
    """Return a typical step of a segment: the second one, because the first runs with the optimizer's barrier."""
    return min(segment.first + 1, segment.last)


STEPS_OFFERED = 500
"""Maximum number of executed steps offered for comparison."""
STILL = 60.0
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
    _plans: dict[str, Schedule | None] = field(default_factory=dict)
    _timelines: dict[str, Timeline | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def workers(self) -> int:
        """Number of workers of the job; the largest number of live workers if the shape is unknown."""
        alive = [line["live_workers"] for line in self.metrics if isinstance(line.get("live_workers"), int)]
        return self.shape.worker_count if self.shape else max(alive, default=0)

    def plan(self, digest: str | None) -> Schedule | None:
        """Return the plan of a content hash; None if absent, and a problem if unreadable."""
        if digest is None:
            return None
        if digest not in self._plans:
            self._plans[digest] = None
            try:
                self._plans[digest] = Schedule.load(plan_file(self.path / "plans", digest))
            except RecycleError as error:
                self.problems.append(str(error))
        return self._plans[digest]

    def _timeline(self, digest: str | None) -> Timeline | None:
        plan = self.plan(digest)
        if digest is not None and plan is not None and digest not in self._timelines:
            self._timelines[digest] = None
            try:
                self._timelines[digest] = simulate(plan, self.profile)
            except RecycleError as error:
                self._complain(f"plan {digest}: {error}")
        return self._timelines.get(digest or "")

    @cached_property
    def report(self) -> RunReport | None:
        """Breakdown of the run's time; None if it cannot be read."""
        try:
            return load_report(self.path)
        except RecycleError as error:
            self._complain(str(error))
            return None

    @cached_property
    def generations(self) -> dict[int, dict[str, Any]]:
        """generation -> its event."""
        return {
            event["generation"]: event
            for event in self.events
            if event.get("kind") == "generation" and isinstance(event.get("generation"), int)
        }

    @cached_property
    def further_deaths(self) -> list[int]:
        """Further failures that each stage can tolerate without losing optimizer state.

        From the last generation's event; [] without a sharded optimizer.
        """
        logged = (event.get("further_deaths") for event in reversed(self.events) if event.get("kind") == "shards")
        stages = next(logged, None)
        return stages if isinstance(stages, list) and all(type(each) is int for each in stages) else []

    @cached_property
    def _metrics_of(self) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in self.metrics}

    @property
    def is_written(self) -> bool:
        """Return whether metrics or logs were written within the last `STILL` seconds."""
        files = [self.path / "metrics.jsonl", self.path / "events.jsonl", *(self.path / "logs").glob("*")]
        times = [file.stat().st_mtime for file in files if file.exists()]
        return bool(times) and time.time() - max(times) < STILL

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

    def _chosen(self, step: int, generation: int | None) -> int | None:
        tried = self.generations_of(step)
        return tried[-1] if generation is None and tried else generation

    def plan_of(self, step: int, generation: int | None = None) -> str | None:
        """Return the hash of the plan of `step` in `generation`; None: in its last generation."""
        generation = self._chosen(step, generation)
        event = self.generations.get(generation) if generation is not None else None
        line = self._metrics_of.get(step, {})
        # A step's line describes its last generation; its event describes an earlier attempt.
        if line.get("plan") is not None and (event is None or line.get("generation") in (None, generation)):
            return str(line["plan"])
        return str(event["plan"]) if event and event.get("plan") is not None else None

    def failed_in(self, step: int, generation: int | None = None) -> tuple[Worker, ...]:
        """Return the processes that were dead in that attempt of `step`, or died in it."""
        if self.shape is None:
            return ()
        generation = self._chosen(step, generation)
        later = [other for other in self.generations_of(step) if generation is not None and other > generation]
        dead: set[Worker] = set()
        known = False
        for number in (generation, *later[:1]):
            live = self.generations.get(number, {}).get("live") if number is not None else None
            if isinstance(live, list):
                known = True
                dead |= {worker for worker in self.shape.workers() if str(worker) not in live}
        if not known:
            plan = self.plan(self.plan_of(step, generation))
            dead = set(plan.failed) if plan else set()
        return tuple(sorted(dead))

    @cached_property
    def segments(self) -> list[RunSegment]:
        """The run as intervals of steps between changes of plan or generation."""

        def key(step: int) -> tuple[int, str]:
            tried = self.generations_of(step)
            return (tried[-1] if tried else -1, self.plan_of(step) or "")

        segments = []
        for (generation, plan), steps in groupby(self.steps, key=key):
            members = list(steps)
            failed = self.failed_in(members[0])
            segments.append(
                RunSegment(members[0], members[-1], plan or None, generation if generation >= 0 else None, failed)
            )
        return segments

    @cached_property
    def notable_steps(self) -> list[NotableStep]:
        """Steps before, during and after the first failure; one step for a run without failures.

        The second step of a segment is preferred: the first runs with the optimizer's barrier.
        """
        segments = self.segments
        broken = next((i for i, segment in enumerate(segments) if segment.failed), None)
        if broken is None:
            return [NotableStep("a step of the run", settled(segments[0]))] if segments else []
        moments = [NotableStep("before the failure", segments[broken - 1].last)] if broken else []
        moments.append(NotableStep("during the failure", settled(segments[broken])))
        after = next((segment for segment in segments[broken + 1 :] if not segment.failed), None)
        if after is not None:
            moments.append(NotableStep("after the return", settled(after)))
        return moments

    def figures(self, digest: str | None) -> PlanFigures | None:
        """Return period, bound and gap of a plan, as planned or else simulated; None if it cannot be timed."""
        plan, timeline = self.plan(digest), self._timeline(digest)
        if plan is None or timeline is None:
            return None
        stated = {name: _number(plan.metadata.get(name)) for name in ("period", "lower_bound", "gap")}
        period = stated["period"] if stated["period"] is not None else timeline.period
        return PlanFigures(period, timeline.makespan, stated["lower_bound"], stated["gap"], plan.optimizer)

    def measured(self, first: int, last: int) -> float | None:
        """Return the median seconds between executed steps from `first` to `last`; see `Trace.period`."""
        return self.trace.period(first, last) if self.trace is not None else None

    def planned(self, step: int, generation: int | None = None) -> Drawn | None:
        """Return the lanes of the plan of `step`, until the deadlock if it has one; None without a plan."""
        chosen = self._chosen(step, generation)
        digest = self.plan_of(step, chosen)
        plan, timeline = self.plan(digest), self._timeline(digest)
        if plan is None:
            return None
        if timeline is None:
            return Drawn(LaneTable.until_stuck(plan, self.profile))
        event = self.generations.get(chosen, {}) if chosen is not None else {}
        lanes = LaneTable.from_timeline(timeline, players=_players(event))
        return Drawn(lanes, Explainer(timeline, limits=stated_limits(timeline.schedule)))

    def executed(self, step: int, generation: int | None = None) -> Drawn | None:
        """Return the executed lanes of `step` in a generation (None: its last); None if nothing was traced."""
        window = self._ran(step, generation)
        if window is None:
            return None
        explainer = Explainer(executed_timeline(window, self.profile), executed_schedule(window)[1], executed=True)
        return Drawn(self._lanes_of(window, step), explainer)

    def evaluated(self, step: int) -> Drawn | None:
        """Return the lanes of all batches of the evaluation after `step`; None if it was not traced."""
        window = self.trace.evaluation(step) if self.trace is not None else None
        return None if window is None else Drawn(self._lanes_of(window, step))

    def _lanes_of(self, window: Trace, step: int) -> LaneTable:
        failed = self.failed_in(step, int(window.generation[0]))
        return LaneTable.from_trace(window, failed=failed, weight_share=weight_share(self.profile, window.shape))

    @cached_property
    def evaluations(self) -> dict[int, float]:
        found = ((line["step"], _number(line.get("eval_loss"))) for line in self.metrics)
        return {step: loss for step, loss in found if loss is not None}

    def _ran(self, step: int, generation: int | None) -> Trace | None:
        tried = self.trace.generations_of(step) if self.trace is not None else []
        if self.trace is None or not tried or (generation is not None and generation not in tried):
            return None
        return self.trace.window(step, step, tried[-1] if generation is None else generation)

    def panels(self) -> list[Panel]:
        """Return the notable steps, planned and executed."""
        shown = []
        for step in self.notable_steps:
            for what, drawn in (("planned", self.planned(step.step)), ("executed", self.executed(step.step))):
                if drawn is not None and len(drawn.lanes):
                    shown.append(Panel(f"{step.title.capitalize()}, step {step.step}: {what}", drawn.lanes))
        return shown

    def choices(self, place: int) -> dict[str, tuple[str, Callable[[str], Operand]]]:
        """Return the plans, then the last `STEPS_OFFERED` executed steps, for comparison."""
        found: dict[str, tuple[str, Callable[[str], Operand]]] = {}
        for segment in self.segments:
            if segment.plan:
                title = f"{self.name}: plan of steps {segment.steps}, {segment.alive}"
                found.setdefault(f"plan/{place}/{segment.plan}", (title, partial(self._planned_operand, segment.plan)))
        for step in (self.trace.steps if self.trace else [])[-STEPS_OFFERED:]:
            title = f"{self.name}: executed step {step}"
            found[f"step/{place}/{step}"] = title, partial(self._executed_operand, step)
        return found

    @property
    def step_to_show(self) -> int | None:
        """The step to show first: during the failure, if any; None before any step."""
        steps = dict(self.notable_steps)
        return steps.get("during the failure", next(iter(steps.values()), None))

    def suggested(self, place: int) -> list[str]:
        """Return the keys of a plan and an executed step of it, during the failure if there was one."""
        step = self.step_to_show
        plan = self.plan_of(step) if step is not None else None
        was_traced = self.trace is not None and step in self.trace.steps
        return [f"plan/{place}/{plan}", f"step/{place}/{step}"] if plan and was_traced else []

    def _executed_operand(self, step: int, title: str) -> Operand:
        window = self._ran(step, None)
        assert window is not None
        timeline = executed_timeline(window, self.profile)
        lanes = replace(LaneTable.from_timeline(timeline), unit="s")
        return Operand(title, Explainer(timeline, limits=self._limits, executed=True), lanes)

    def _planned_operand(self, digest: str, title: str) -> Operand:
        plan, timeline = self.plan(digest), self._timeline(digest)
        if plan is None or timeline is None:
            raise RecycleError(f"{self.name}: plan {digest} cannot be {'timed' if plan else 'read'}")
        unit = self.job.seconds_per_unit if self.job else None
        explainer = Explainer(timeline, limits=stated_limits(plan) or self._limits)
        return Operand(title, explainer, LaneTable.from_timeline(timeline), unit)

    @cached_property
    def _limits(self) -> Limits:
        try:
            limits = self.job.activation_limits() if self.job else None
        except RecycleError:  # the limit is in bytes, and the profile is gone
            return None
        return None if limits is None else tuple(limits)

    def _complain(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _number(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
    return float(value) if usable else None


def _players(event: Mapping[str, Any]) -> dict[Worker, Worker]:
    roles = event.get("roles")
    try:
        return {Worker.parse(role): Worker.parse(process) for process, role in roles.items()} if roles else {}
    except (RecycleError, AttributeError, TypeError):
        return {}
