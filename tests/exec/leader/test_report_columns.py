"""One loop over the reports finds what they say one by one: to the last bit, and about who disagrees."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from recycle.exec.leader.commit import MOST_LINKS, ReportColumns, decide
from recycle.exec.leader.disagreement import Disagreement, compare
from recycle.exec.members import members_of, split_member
from recycle.exec.protocol import Computed, LinkTime, Report
from recycle.exec.worker.iterations import report_of
from recycle.job.shape import Shape, Worker
from tests.exec.runs import job

NUMBERS = st.sampled_from([1.0, 2.0, 0.1 + 0.2, 1e-300, math.nan, math.inf])
SHAPE = Shape(3, 2, 2)


def one_by_one(reports: Mapping[str, Report]) -> tuple[float, float]:
    """Loss sum and squared norm, as `decide` had them before there were columns."""
    norms: dict[tuple[int, int | None], list[float]] = {}
    for member, report in reports.items():
        for held_by, of_stages in ((split_member(member)[1], report.norms), (None, report.replicated)):
            for stage, parts in of_stages.items():
                norms.setdefault((stage, held_by), parts)
                if not all(map(math.isfinite, parts)):
                    norms[stage, held_by] = [math.nan]
    losses = [r.loss for member, r in sorted(reports.items()) if r.loss is not None and split_member(member)[1] == 0]
    return sum(losses), math.fsum(part for parts in norms.values() for part in parts)


def disagreement(action: Callable[[], object]) -> tuple[object, ...] | None:
    """What the Disagreement says that it raises, if it does."""
    try:
        action()
    except Disagreement as found:
        return found.step, found.odd, found.held, found.what
    return None


@st.composite
def reported(draw: st.DrawFn) -> dict[str, Report]:
    """Of 3 x 2 workers of one or two processes: mostly alike, some with other numbers."""
    tensor_parallel, both = draw(st.sampled_from([1, 2])), draw(st.booleans())
    usual = {
        (stage, rank): (draw(st.lists(NUMBERS, max_size=3)), draw(st.integers(0, 2**64 - 1)))
        for stage in range(2)
        for rank in range(2)
    }
    common = {stage: draw(st.lists(NUMBERS, max_size=2)) for stage in range(2)}
    odd = draw(st.sampled_from(["nobody", "0.0", "1.1", "2.0t1"]))
    what = draw(st.sampled_from(["norm", "replicated", "checksum", "loss", "state", "no state", "no checksum"]))
    compares = draw(st.booleans())
    found: dict[str, Report] = {}
    for name in members_of(SHAPE.workers(), tensor_parallel):
        worker, rank = split_member(name)
        stages = [0, 1] if both else [Worker.parse(worker).rank]
        norms = {stage: list(usual[stage, rank][0]) for stage in stages}
        replicated = {stage: list(common[stage]) for stage in stages} if tensor_parallel > 1 else {}
        checksums = {stage: usual[stage, rank][1] for stage in stages}
        states = {stage: (usual[stage, rank][1], 2**64 - 1 - stage) for stage in stages} if compares else {}
        loss = draw(st.sampled_from([0.1, 0.7, 1e16])) if worker.endswith("1") and rank == 0 else None
        if name == odd:
            last = stages[-1]
            if what == "norm":
                norms[last] = [3.0]
            elif what == "replicated" and replicated:
                replicated[last] = [3.0]
            elif what == "checksum":
                checksums[last] ^= 1 << 63
            elif what == "loss":
                loss = 5.0
            elif what == "state" and compares:
                states[last] = states[last][0], 5
            elif what == "no state":
                states.pop(last, None)
            else:
                checksums.pop(last)
        compute = [Computed(stage, token, 3, 0.1 * stage) for stage in stages for token in ("F", "B")]
        found[name] = Report(norms, loss, compute if worker != "2.1" else [], replicated, checksums, states)
    return found


@pytest.mark.slow
@given(reported())
@settings(max_examples=300, deadline=None)
def test_columns_agree_only_where_no_report_disagrees_and_amount_to_the_same_bits(reports: dict[str, Report]) -> None:
    columns = ReportColumns.of(reports)
    found = disagreement(lambda: compare(4, reports))
    assert disagreement(lambda: decide(job(3, 2, 2), 4, columns)) == found
    if found is not None:
        assert not columns.agree
        return
    loss, squared = one_by_one(reports)
    assert columns.loss_sum == loss
    found_squared = math.fsum(columns.squared_norms)
    assert found_squared == squared or not (math.isfinite(found_squared) or math.isfinite(squared))


def test_reports_that_agree_are_found_to_without_a_look_at_each() -> None:
    """A comparison one by one of 16,384 takes a quarter of a second."""
    usual = {
        f"{k}.{r}": Report({r: [0.5 + r]}, 1.0 if r else None, checksums={r: 7}) for k in range(3) for r in range(2)
    }
    assert ReportColumns.of(usual).agree
    assert not ReportColumns.of(usual | {"1.1": Report({1: [1.5]}, 1.0, checksums={1: 8})}).agree
    spoilt = {name: Report({0: [math.nan]}, None, checksums={0: place}) for place, name in enumerate(("0.0", "1.0"))}
    assert ReportColumns.of(usual | spoilt | {"2.0": spoilt["0.0"]}).agree


def test_states_are_compared_where_all_say_theirs_also_of_gradients_that_are_not_finite() -> None:
    usual = {f"{k}.0": Report({0: [math.nan]}, None, checksums={0: k}, states={0: (5, 6)}) for k in range(3)}
    columns = ReportColumns.of(usual)
    assert (columns.agree, columns.has_states) == (True, True)
    odd = ReportColumns.of(usual | {"1.0": replace(usual["1.0"], states={0: (5, 7)})})
    assert (odd.agree, odd.has_states) == (False, True)
    silent = ReportColumns.of(usual | {"1.0": replace(usual["1.0"], states={})})
    assert (silent.agree, silent.has_states) == (False, False)
    assert not ReportColumns.of({name: replace(one, states={}) for name, one in usual.items()}).has_states


@pytest.mark.parametrize(
    "report",
    [
        Report({}, None),
        Report({0: []}, math.nan),
        Report({3: [1.0, 2.0**-60]}, 0.0, [Computed(3, "GATHER_PARAMS", 2, 1e-9)], {3: [4.0]}, {3: 2**64 - 1}),
        Report({2: [1.0], 5: [3.0]}, None, [], {}, {2: 1, 5: 0}, {2: (2**64 - 1, 0), 5: (0, 7)}),
        Report({1: [1.0]}, None, links=[LinkTime(2, 70_000, 4, 0.5, 0.25), LinkTime(0, 1, 0, 0.0, 1.5)]),
        Report({70_000: [math.inf], 1: [1.0, 2.0, 3.0, 4.0]}, None, [], {1: []}, {}),
    ],
)
def test_a_report_comes_back_from_its_bytes(report: Report) -> None:
    assert repr(msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=Report)) == repr(report)


def test_the_times_are_those_of_each_workers_first_process() -> None:
    compute = {name: [Computed(1, token, 4, seconds) for token, seconds in (("F", 1.0), ("I", 2.0))] for name in "ab"}
    reports = {
        "0.1": Report(
            {1: [1.0]}, None, compute["a"], links=[LinkTime(0, 0, 3, 0.25, 0.5), LinkTime(2, 0, 0, 0.0, 2.0)]
        ),
        "0.1t1": Report({1: [1.0]}, None, [Computed(1, "F", 4, 9.0)]),
        "2.1": Report({1: [1.0]}, None),
        "2.1t1": Report({1: [1.0]}, None, links=[LinkTime(2, 0, 4, 1.0, 0.0)]),
        "3.1": Report({1: [1.0]}, 2.0, [Computed(1, "W", 1, 5.0)]),
    }
    times = ReportColumns.of(reports).times()
    assert times.workers == [Worker(0, 1), Worker(2, 1), Worker(3, 1)]
    rows = zip(times.owner, times.stage, times.kind, times.count, times.seconds, strict=True)
    assert [(int(o), int(s), times.tokens[k], float(c), float(sec)) for o, s, k, c, sec in rows] == [
        (0, 1, "F", 4.0, 1.0),
        (0, 1, "I", 4.0, 2.0),
        (2, 1, "W", 1.0, 5.0),
    ]
    assert np.asarray(times.owner).dtype == np.int64
    assert list(times.reports.values()) == [reports[name] for name in ("0.1", "2.1", "3.1")]


def test_a_report_of_many_links_has_the_longest_and_stays_below_two_kilobytes() -> None:
    links = [LinkTime(k, 1, 2, k / 7, k / 700) for k in range(100)]
    compute = [Computed(stage, token, 8, 1 / 7) for stage in (0, 1) for token in "FIWB"]
    report = report_of({}, compute, links=links)
    assert [link.pipeline for link in report.links] == list(range(99, 99 - MOST_LINKS, -1))
    whole = replace(report, norms={0: [1 / 7] * 3, 1: [1 / 7] * 3}, checksums={0: 2**63, 1: 2**63 + 1})
    assert len(msgspec.msgpack.encode(whole)) <= 2048
