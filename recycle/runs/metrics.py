"""The metrics of a run for monitoring systems: one row per metric, computed from what `recycle report` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from statistics import median_low
from typing import Any

from recycle.errors import RecycleError
from recycle.job.profile import Profile
from recycle.job.shape import Worker
from recycle.runs.logs import plan_file
from recycle.runs.read_report import RunRecord
from recycle.runs.report import CHANGES

EVENT_KINDS = (
    *("generation", "fault", "detected", "recovered", "undone", "rejoined", "drained", "replanned", "slow-link"),
    *("layout", "moved", "shards", "corrupt", "checkpoint", "restored", "stopped", "coordinator", "finished"),
    *("warning", "imported"),
)
"""Kinds of events that are counted from 0 on; others are counted from their first event on."""

Value = tuple[tuple[str, ...], float]
"""Values of the labels, and the value."""


@dataclass(frozen=True)
class Metric:
    """A metric of a run, as Prometheus names it: base units, `_total` for counters.

    Attributes:
        values: computes the metric from what is known of the run; nothing while it is unknown.
        labels: names of its labels; the label `run`, the name of the run directory, is added to every metric.
    """

    name: str
    help: str
    values: Callable[[RunRecord], Iterable[Value]]
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


def _single(read: Callable[[RunRecord], object]) -> Callable[[RunRecord], Iterable[Value]]:
    def values(run: RunRecord) -> Iterator[Value]:
        value = read(run)
        if isinstance(value, int | float):
            yield (), float(value)

    return values


def _last(key: str) -> Callable[[RunRecord], Iterable[Value]]:
    return _single(lambda run: run.last.get(key))


def _newest(key: str) -> Callable[[RunRecord], Iterable[Value]]:
    return _single(lambda run: next((line[key] for line in reversed(run.metrics) if key in line), None))


def _of_kind(run: RunRecord, *kinds: str) -> list[Mapping[str, Any]]:
    return [event for event in run.events if event["kind"] in kinds]


def _number(event: Mapping[str, Any], key: str) -> float:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _sums(addends: Iterable[Value], first: Iterable[str] = ()) -> Iterable[Value]:
    """Add up the values of the same labels; `first` are values of a single label that count from 0 on."""
    sums: dict[tuple[str, ...], float] = {(name,): 0.0 for name in first}
    for labels, value in addends:
        sums[labels] = sums.get(labels, 0.0) + value
    return sums.items()


def _changes(run: RunRecord) -> Iterable[Value]:
    return _sums((((change.kind,), 1.0) for change in run.report.changes), CHANGES)


def _change_seconds(run: RunRecord) -> Iterable[Value]:
    changes = run.report.changes
    return _sums(((change.kind, part.value), cost) for change in changes for part, cost in change.costs.items())


def _slower_seconds(run: RunRecord) -> Iterable[Value]:
    changes = run.report.changes
    return _sums(((change.kind,), change.slower) for change in changes if change.slower is not None)


def _event_counts(run: RunRecord) -> Iterable[Value]:
    return _sums((((str(event["kind"]),), 1.0) for event in run.events), EVENT_KINDS)


def _live(run: RunRecord) -> set[Worker] | None:
    generations = _of_kind(run, "generation")
    if not generations or not isinstance(generations[-1].get("live"), list):
        return None
    return {Worker.parse(str(name)) for name in generations[-1]["live"]}


def _live_per_rank(run: RunRecord) -> Iterable[Value]:
    live = _live(run)
    ranks = map(str, range(run.job.shape.ranks if live is not None else 0))
    return _sums((((str(worker.rank),), 1.0) for worker in live or ()), ranks)


def _dead(run: RunRecord) -> Iterable[Value]:
    live = _live(run)
    causes = {event.get("worker"): str(event.get("cause", "left")) for event in _of_kind(run, "detected", "drained")}
    dead = [str(worker) for worker in run.job.shape.workers() if live is not None and worker not in live]
    return [((worker, causes.get(worker, "absent")), 1.0) for worker in dead]


def _time_ratios(run: RunRecord) -> Iterator[Value]:
    compute, spread = run.last.get("compute") or {}, run.last.get("compute_spread") or {}
    measured: dict[str, list[float]] = {}
    for name, seconds in chain.from_iterable(times.items() for times in compute.values()):
        measured.setdefault(name, []).append(seconds)
    usual = {name: median_low(times) for name, times in measured.items() if len(times) > 1}
    usual |= {name: figures[1] for name, figures in spread.items()}
    for worker, times in compute.items():
        expected = sum(usual[name] for name in times if name in usual)
        if expected > 0:
            yield (worker,), sum(seconds for name, seconds in times.items() if name in usual) / expected


def _slow_links(run: RunRecord) -> Iterator[Value]:
    """A link is slow until a later plan no longer counts on it being slow, or one of its ends dies or leaves."""
    slow: dict[tuple[str, str], float] = {}
    for event in _of_kind(run, "slow-link", "replanned", "detected", "drained"):
        worker = str(event.get("worker"))
        if event["kind"] == "slow-link":
            slow[worker, str(event.get("peer"))] = _number(event, "seconds")
        elif event["kind"] == "replanned":
            counted_on = _links_counted_on(run, event.get("profile")) if slow else {}
            slow = {ends: seconds for ends, seconds in slow.items() if ">".join(ends) in counted_on}
        else:
            slow = {ends: seconds for ends, seconds in slow.items() if worker not in ends}
    yield from slow.items()


def _links_counted_on(run: RunRecord, digest: object) -> Mapping[str, object]:
    try:
        links, usual = _links_of(str(plan_file(run.path / "profiles", digest))), run.job.profile().links
    except RecycleError:
        return {}
    return {ends: link for ends, link in links.items() if link != usual.get(ends)}


@lru_cache(maxsize=64)
def _links_of(file: str) -> Mapping[str, object]:
    return Profile.load(file).links


def _plan(run: RunRecord) -> Iterable[Value]:
    causes = {event.get("plan"): str(event.get("cause", "")) for event in _of_kind(run, "replanned")}
    return [((str(plan), causes.get(plan, "")), 1.0) for plan in [run.last.get("plan")] if plan]


def _further_deaths(run: RunRecord) -> Iterable[Value]:
    counts = next((event.get("further_deaths") for event in reversed(_of_kind(run, "shards"))), None)
    return [((str(stage),), float(count)) for stage, count in enumerate(counts if isinstance(counts, list) else ())]


def _checkpoints(run: RunRecord, *, failed: bool) -> list[float]:
    """The steps of the checkpoints that are complete, or were given up."""
    return [_number(event, "step") for event in _of_kind(run, "checkpoint") if ("error" in event) is failed]


RUN_METRICS = (
    Metric("recycle_step", "Last committed step.", _last("step")),
    Metric("recycle_loss", "Mean loss of the last step; absent if it is not finite.", _last("loss")),
    Metric("recycle_evaluation_loss", "Loss of the last evaluation.", _newest("eval_loss")),
    Metric("recycle_gradient_norm", "Norm of the gradient before clipping, in the last step.", _last("grad_norm")),
    Metric("recycle_tokens_per_second", "Tokens per second, mean over recent steps.", _last("tokens_per_second")),
    Metric(
        "recycle_period_error_ratio", "Executed over planned time of the last step, minus 1.", _last("period_error")
    ),
    Metric("recycle_generation", "Number of the generation of the last step.", _last("generation")),
    Metric("recycle_plan_info", "1; the plan of the last step, and why it replaced another.", _plan, ("plan", "cause")),
    Metric("recycle_workers", "Workers of the job.", _single(lambda run: run.job.shape.worker_count)),
    Metric("recycle_live_workers", "Live workers of the last step.", _last("live_workers")),
    Metric("recycle_rank_live_workers", "Live workers by the rank that they started with.", _live_per_rank, ("rank",)),
    Metric("recycle_worker_dead", "1 for each worker that is not live.", _dead, ("worker", "cause")),
    Metric(
        "recycle_worker_time_ratio",
        "Compute time of a worker in the last step, over the median of the workers with the same stage.",
        _time_ratios,
        ("worker",),
    ),
    Metric("recycle_slow_link_seconds", "Seconds per message of a slow link.", _slow_links, ("worker", "peer")),
    Metric(
        "recycle_further_deaths",
        "Deaths that a stage tolerates without loss of sharded optimizer state.",
        _further_deaths,
        ("stage",),
    ),
    Metric("recycle_wall_seconds", "Time since the start of the run.", _single(lambda run: run.report.wall)),
    Metric(
        "recycle_part_seconds",
        "Time by the parts of the report, which add up to the wall time.",
        lambda run: _sums(((part.value,), seconds) for part, seconds in run.report.parts.items()),
        ("part",),
    ),
    Metric(
        "recycle_committed_seconds",
        "Time in iterations that count, without evaluations.",
        _single(lambda run: run.report.measured),
    ),
    Metric(
        "recycle_effective_time_ratio",
        "Share of the wall time in iterations that count.",
        _single(lambda run: run.report.effective_ratio),
    ),
    Metric(
        "recycle_expected_seconds",
        "Time of the same iterations by their plans.",
        _single(lambda run: run.report.expected),
    ),
    Metric(
        "recycle_fault_free_seconds",
        "Time of as many iterations by the plan for all workers.",
        _single(lambda run: run.report.fault_free),
    ),
    Metric("recycle_changes", "Changes of the workers or the plan.", _changes, ("kind",)),
    Metric("recycle_change_seconds", "Time that changes took, by parts.", _change_seconds, ("kind", "part")),
    Metric(
        "recycle_slower_seconds",
        "Time that iterations after changes take longer, by their plans, than with all workers.",
        _slower_seconds,
        ("kind",),
    ),
    Metric("recycle_events_total", "Events by kind.", _event_counts, ("kind",)),
    Metric(
        "recycle_copied_bytes_total",
        "Bytes of state that workers copied.",
        _single(lambda run: sum(_number(event, "bytes") for event in _of_kind(run, "rejoined", "moved"))),
    ),
    Metric(
        "recycle_checkpoint_step",
        "Step of the last complete checkpoint.",
        _single(lambda run: next(reversed(_checkpoints(run, failed=False)), None)),
    ),
    Metric(
        "recycle_failed_checkpoints_total",
        "Checkpoints that were given up.",
        _single(lambda run: len(_checkpoints(run, failed=True))),
    ),
)
"""All metrics, in the order of docs/reference/metrics.md."""
