"""What the metrics say about runs that are written down here; every metric and kind of event is on its page."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle import Job, Link, Profile
from recycle.runs.metrics import EVENT_KINDS, RUN_METRICS
from recycle.runs.read_report import RunRecord
from recycle.runs.report import report_of
from tests import DOCS
from tests.runs.test_report import ATTEMPTS, EVENTS, METRICS, UNIT, event, line

REFERENCE = DOCS / "reference"
JOB = Job.from_toml("[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n")


def values(
    name: str,
    path: Path = Path("run"),
    metrics: Sequence[Mapping[str, Any]] = METRICS,
    events: Sequence[Mapping[str, Any]] = EVENTS,
) -> dict[tuple[str, ...], float]:
    (metric,) = (metric for metric in RUN_METRICS if metric.name == name)
    record = RunRecord(path, JOB, metrics, events, report_of(metrics, events, ATTEMPTS, UNIT))
    found = dict(metric.values(record))
    assert all(len(labels) == len(metric.labels) for labels in found)
    return found


def test_seconds_are_those_of_the_report():
    report = report_of(METRICS, EVENTS, ATTEMPTS, UNIT)
    assert values("recycle_wall_seconds") == {(): report.wall}
    assert values("recycle_part_seconds") == {(part.value,): seconds for part, seconds in report.parts.items()}
    assert values("recycle_effective_time_ratio") == {(): pytest.approx(5.0 / 22.0)}
    assert values("recycle_fault_free_seconds") == {(): report.fault_free}
    changes = values("recycle_changes")
    assert {kind for (kind,), count in changes.items() if count == 1} == {"failure", "re-join"}
    assert sum(changes.values()) == 2
    seconds = values("recycle_change_seconds")
    assert sum(seconds.values()) == pytest.approx(sum(change.seconds for change in report.changes))
    assert seconds["failure", "waiting"] == pytest.approx(1.5)  # the silence before the detection
    assert values("recycle_slower_seconds") == pytest.approx({("failure",): 0.5, ("re-join",): 0.0})


def test_counts_start_at_zero_and_include_unknown_kinds():
    counts = values("recycle_events_total", events=[*EVENTS, event(23.0, "new-kind")])
    assert {kind for (kind,) in counts} == {*EVENT_KINDS, "new-kind"}
    assert (counts["generation",], counts["detected",], counts["corrupt",], counts["new-kind",]) == (3, 1, 0, 1)


def test_dead_workers_have_a_cause():
    def generation(time, *live):
        return event(time, "generation", generation=2, step=2, live=list(live))

    events = [EVENTS[1], event(16.0, "drained", worker="0.1", step=2), generation(16.0, "0.0")]
    assert values("recycle_worker_dead", events=events) == {
        ("0.1", "left"): 1.0,
        ("1.0", "absent"): 1.0,
        ("1.1", "killed by SIGKILL"): 1.0,
    }
    assert values("recycle_rank_live_workers", events=events) == {("0",): 1.0, ("1",): 0.0}
    events += [generation(20.0, "0.0", "1.0", "0.1", "1.1")]
    assert values("recycle_worker_dead", events=events) == {}


def test_worker_is_compared_with_the_hosts_of_its_stage():
    compute = {"0.0": {"0F": 1.0, "0B": 2.0}, "1.0": {"0F": 3.0, "0B": 6.0}, "2.0": {"0F": 1.0, "0B": 2.0, "1F": 9.0}}
    assert values("recycle_worker_time_ratio", metrics=[line(0, 12.0, 1, compute=compute)]) == {
        ("0.0",): 1.0,
        ("1.0",): 3.0,
        ("2.0",): 1.0,  # nobody else ran 1F
    }
    few = line(0, 12.0, 1, compute={"1.0": {"0F": 3.0}}, compute_spread={"0F": [1.0, 2.0, 3.0]})
    assert values("recycle_worker_time_ratio", metrics=[few]) == {("1.0",): 1.5}


def test_link_is_slow_until_a_plan_or_a_death_says_otherwise(tmp_path):
    (tmp_path / "profiles").mkdir()
    digests = "0" * 16, "1" * 16
    for digest, links in zip(digests, ({"0.0>0.1": Link(0.5)}, {}), strict=True):
        replace(Profile.uniform(), links=links).save(tmp_path / "profiles" / f"{digest}.json")
    events = [
        event(1.0, "slow-link", worker="0.0", peer="0.1", seconds=0.5, factor=None),
        event(1.0, "slow-link", worker="1.0", peer="1.1", seconds=0.25, factor=4.0),
        event(2.0, "detected", worker="1.1", step=2, cause="killed by SIGKILL"),
        event(3.0, "replanned", profile=digests[0], plan="2" * 16, cause="messages take longer"),
        event(4.0, "replanned", profile=digests[1], plan="3" * 16, cause="messages take as long as before"),
    ]
    expected = {("0.0", "0.1"): 0.5, ("1.0", "1.1"): 0.25}, {("0.0", "0.1"): 0.5}, {("0.0", "0.1"): 0.5}, {}
    for count, links in enumerate(expected, start=2):
        assert values("recycle_slow_link_seconds", tmp_path, events=events[:count]) == links
    planned = [line(0, 12.0, 1, plan="2" * 16)]
    assert values("recycle_plan_info", metrics=planned, events=events) == {("2" * 16, "messages take longer"): 1.0}


def test_run_without_a_step_has_what_its_job_says():
    found = {metric.name: values(metric.name, metrics=[], events=[]) for metric in RUN_METRICS}
    assert found["recycle_workers"] == {(): 4.0}
    assert found["recycle_step"] == found["recycle_loss"] == found["recycle_worker_dead"] == {}
    assert found["recycle_wall_seconds"] == {(): 0.0}


def test_checkpoints_that_were_given_up_are_counted_apart():
    events = [event(1.0, "checkpoint", step=3, stalled=0.1), event(2.0, "checkpoint", step=6, error="No space left")]
    assert values("recycle_checkpoint_step", events=events) == {(): 3.0}
    assert values("recycle_failed_checkpoints_total", events=events) == {(): 1.0}


def test_every_metric_and_every_kind_of_event_is_on_its_page():
    rows = re.findall(r"^\| `(recycle_\w+)` \|(.*?)\|", (REFERENCE / "metrics.md").read_text(), flags=re.MULTILINE)
    assert [(name, re.findall(r"`(\w+)`", labels)) for name, labels in rows] == [
        (metric.name, list(metric.labels)) for metric in RUN_METRICS
    ]
    kinds = re.findall(r"^\| `([a-z-]+)` \|", (REFERENCE / "events.md").read_text().split("## ")[1], flags=re.MULTILINE)
    assert set(kinds) | {"imported"} == set(EVENT_KINDS)
