"""The figures of a timeline that stand above it: period, bound and gap, bubbles, peak memory, ratio to 1F1B."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from recycle.ir.event_graph import EventGraph, event_graph
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, time_graph
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from viz.lane_cache import CachedLanes
from viz.numbers import percent, short
from viz.operands import stated_bound, stated_limits
from viz.scenario import is_loosened


class Figure(NamedTuple):
    """A figure of the headline.

    Attributes:
        name, value: what is shown.
        meaning: a sentence for those who do not know the word.
    """

    name: str
    value: str
    meaning: str


PERIOD = "Distance between two iterations in steady state, which throughput follows."
MAKESPAN = "From the first start to the last end of one iteration that begins idle."
BOUND = (
    "No schedule for these failures, times and limits has a shorter period; the gap is how far this one may be above"
    " the best."
)
BUBBLES = "Share of the time of all live workers in which they do not compute."
PEAK = "Most activations, in chunks, that a worker holds at a time: of all workers, the one closest to its limit."
RATIO = "Period divided by that of 1F1B with all workers, for the same times per layer."


def headline(shown: CachedLanes) -> list[Figure]:
    """The figures of cached lanes; of lanes that nothing explains, none."""
    explainer = shown.explainer
    if explainer is None:
        return []
    timeline, unit = explainer.timeline, shown.unit
    found = []
    if explainer.executed:
        found.append(
            Figure("iteration", unit.amount(timeline.makespan), "From its first start to its last end, as executed.")
        )
    else:
        found.append(Figure("period", unit.amount(timeline.period), PERIOD))
        stated = explainer.bound
        if stated is None and not is_loosened(explainer, stated_limits(timeline.schedule)):
            stated = stated_bound(timeline)
        if stated is not None:
            gap = f"gap {percent(stated[1])}" if stated[1] > 1e-9 else "optimal"
            found.append(Figure("bound", f"{unit.amount(stated[0])} ({gap})", BOUND))
    found.append(Figure("bubbles", percent(timeline.bubble_ratio), BUBBLES))
    peaks = [
        (peak, w % timeline.schedule.shape.ranks)
        for w, peak in enumerate(timeline.peak_activations)
        if peak is not None
    ]
    if peaks and not explainer.executed:
        limits = explainer.limits
        peak, rank = max(peaks, key=lambda one: one[0] / ((limits[one[1]] or 1.0) if limits else 1.0))
        found.append(Figure("peak memory", short(peak) + (f" of {short(limits[rank])}" if limits else ""), PEAK))
    usual = None if explainer.executed else usual_period(timeline)
    if usual:
        found.append(Figure("1F1B", f"× {short(timeline.period / usual)}", RATIO))
    if not explainer.executed and abs(timeline.makespan - timeline.period) > 1e-9 * timeline.makespan:
        found.append(Figure("makespan", unit.amount(timeline.makespan), MAKESPAN))
    return found


def usual_period(timeline: Timeline) -> float | None:
    """The period of 1F1B with all workers in the times of `timeline`; None where nothing is alike: workers or links of
    unlike speed, or layers cut anew.

    Its pipelines are alike and have no work in common, so one of them has the period of all.
    """
    shape, profile = timeline.schedule.shape, timeline.profile
    hosted = _stages_per_rank(timeline.schedule)
    if shape.cut or profile.speed or profile.links or hosted is None:
        return None
    times = {name: profile.per_stage(name, shape.stages) for name in _TIMES}
    per_rank: dict[str, Any] = {name: [sum(of[s] for s in stages) for stages in hosted] for name, of in times.items()}
    message = max(profile.per_stage("message", shape.stages))
    usual = Profile(**per_rank, latency=profile.latency, bandwidth=profile.bandwidth, message=message)
    return time_graph(_usual(shape.ranks, shape.micro_batches), usual).period


@lru_cache(8)
def _usual(ranks: int, micro_batches: int) -> EventGraph:
    return event_graph(lower(one_f_one_b(Shape(1, ranks, micro_batches))))


def _stages_per_rank(schedule: Schedule) -> list[tuple[int, ...]] | None:
    """The stages that each rank hosts in a pipeline which has all of them; None where no pipeline does."""
    shape = schedule.shape
    for pipeline in range(shape.pipelines):
        hosted = [schedule.stages_of(Worker(pipeline, rank)) for rank in range(shape.ranks)]
        if sorted(stage for stages in hosted for stage in stages) == list(range(shape.stages)):
            return hosted
    return None


_TIMES = "forward", "backward_input", "backward_weight", "reduce", "step"
