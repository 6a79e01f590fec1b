"""Every second of a run is put to one part: runs that are written down here."""

import pytest

from recycle.runs.report import Activity, RunReport, TimePart, report_of

PERIOD = 1.5
UNIT = 0.5


def line(step: int, time: float, generation: int, live=4, **fields):
    return {"step": step, "time": time, "generation": generation, "live_workers": live, "period": PERIOD, **fields}


def event(time: float, kind: str, **fields):
    return {"time": time, "kind": kind, **fields}


def generation(time: float, number=2, step=2):
    return event(time, "generation", generation=number, step=step)


def death(time: float, step=2, worker="1.1", cause="killed by SIGKILL"):
    return event(time, "detected", worker=worker, step=step, cause=cause)


METRICS = [
    line(0, 12.0, 1, began=11.0),
    line(1, 13.0, 1),
    line(2, 18.0, 2, 3, began=17.0, period=2.0),
    line(3, 19.0, 2, 3, period=2.0, eval_seconds=0.5),
    line(4, 22.0, 3, began=21.0),
]
EVENTS = [
    generation(10.0, 1, 0),
    death(15.0),
    generation(16.0),
    event(17.2, "recovered", step=2, generation=2),
    event(19.1, "checkpoint", step=2, stalled=0.1),
    generation(20.0, 3, 4),
    event(21.0, "rejoined", worker="1.1", step=4),
]
ATTEMPTS = {
    (1, 0): Activity(4, 2.0, 0.0, 11.0, 11.9),
    (1, 1): Activity(4, 3.0, 0.4, 12.0, 12.9),
    (1, 2): Activity(4, 0.5, 0.0, 13.0, 13.5),
    (2, 2): Activity(3, 2.4, 0.0, 17.0, 17.9),
    (2, 3): Activity(3, 2.4, 0.0, 18.0, 18.9),
    (3, 4): Activity(4, 3.2, 0.0, 21.0, 21.9),
}
BEFORE = {key: ATTEMPTS[key] for key in ((1, 0), (1, 1))}


def rounded(parts: dict[TimePart, float]) -> dict[str, float]:
    return {part.value: round(seconds, 9) for part, seconds in parts.items() if round(seconds, 9)}


def assert_whole(report: RunReport):
    """The parts fill the wall clock without a gap or an overlap."""
    assert report.spans[0].start == 0.0
    assert all(before.end == after.start for before, after in zip(report.spans, report.spans[1:], strict=False))
    assert sum(report.parts.values()) == pytest.approx(report.wall, rel=1e-9)
    assert all(span.seconds > 0 for span in report.spans)


def test_parts_of_a_run():
    report = report_of(METRICS, EVENTS, ATTEMPTS, UNIT)
    assert_whole(report)
    assert report.wall == 22.0
    expected = {
        "useful": 0.5 + 0.75 + 0.8 + 0.8 + 0.8,
        "replaying": 0.1,
        "waiting": 0.5 + 0.15 + 1.5 + 0.2 + 0.1 + 0.5 + 0.2,  # with the silence and the wait for the re-join
        "redone": 0.5,
        "planning": 1.0,
        "forming": 1.0 + 1.0,
        "moving": 1.0,
        "checkpointing": 0.1,
        "evaluating": 0.5,
        "starting": 10.0,
    }
    assert rounded(report.parts) == pytest.approx(expected)
    assert report.measured == pytest.approx(5.0)
    assert report.expected == pytest.approx((3 * PERIOD + 2 * 2.0) * UNIT)
    assert report.fault_free == pytest.approx(5 * PERIOD * UNIT)
    assert [change.slower for change in report.changes] == pytest.approx([2 * (2.0 - PERIOD) * UNIT, 0.0])
    assert (report.changes[0].time, report.changes[0].seconds) == (13.0, pytest.approx(4.0))


@pytest.mark.parametrize(
    ("evaluated", "metrics", "events", "attempts", "expected"),
    [
        pytest.param(
            {},
            METRICS[2:],
            EVENTS[1:],
            ATTEMPTS,
            [
                ("failure", 2, "1.1 killed by SIGKILL", {"redone": 0.5, "waiting": 1.5, "planning": 1, "forming": 1}),
                ("re-join", 4, "1.1 re-joined", {"waiting": 0.5, "moving": 1.0}),
            ],
            id="failure",
        ),
        pytest.param(
            {},
            [line(2, 14.2, 2, 3, began=13.2), line(3, 15.2, 2, 3)],
            [generation(13.1), event(13.4, "drained", worker="1.1", step=2, seconds=1.0)],
            BEFORE,
            [("drain", 2, "1.1 left", {"planning": 0.1, "forming": 0.1})],
            id="a drain repeats no work",
        ),
        pytest.param(
            {},
            [line(2, 15.0, 2, began=14.0), line(3, 16.0, 2)],
            [
                event(13.0, "layout", step=2, moves=True),
                generation(13.4),
                event(14.0, "moved", worker="1.0", step=2, units=[4, 6]),
                event(14.0, "moved", worker="1.0", step=2, units=[1, 2]),
                event(14.0, "moved", worker="0.1", step=2, units=[3, 4]),
            ],
            BEFORE,
            [("layout", 2, "layers moved to 1.0; layers moved to 0.1", {"planning": 0.4, "moving": 0.6})],
            id="layers move and nothing waits for a re-join",
        ),
        # Steps 2 and 3 were after the restored checkpoint and have no lines; the restart took three seconds.
        pytest.param(
            {},
            [line(2, 20.0, 2, began=19.0)],
            [death(15.0, step=4), event(15.5, "restored", step=2, checkpoint="step-00000001"), generation(18.0)],
            {(1, 4): Activity(4, 1.0, 0.0, 14.0, 15.0)},
            [("failure", 2, "1.1 killed by SIGKILL", {"redone": 2.0, "starting": 3.0, "forming": 1.0})],
            id="restore",
        ),
        # The next generation only evaluates.
        pytest.param(
            {"eval_seconds": 4.0},
            [],
            [death(14.0), generation(14.5), event(15.5, "recovered", generation=2, step=2)],
            BEFORE,
            [("failure", 2, "1.1 killed by SIGKILL", {"planning": 0.5, "forming": 1.0})],
            id="a death in the evaluation after the last iteration",
        ),
        # Hosts of one stage share it in another way.
        pytest.param(
            {},
            [line(2, 15.0, 2, began=14.0)],
            [event(13.0, "layout", step=2, moves=True), generation(13.4)],
            BEFORE,
            [("layout", 2, "another layout, without copies", {"planning": 0.4, "forming": 0.6})],
            id="layout without copies",
        ),
        pytest.param(
            {"eval_loss": 1.0, "eval_seconds": 0.3},
            [line(2, 15.0, 2, began=14.0)],
            [event(13.1, "layout", step=2, moves=True), generation(13.4)],
            BEFORE,
            [("layout", 2, "another layout, without copies", {"planning": 0.1, "forming": 0.6})],
            id="layout decided in an evaluation that lasts until 13.3",
        ),
        pytest.param(
            {},
            [line(2, 18.0, 2, began=17.0)],
            [event(16.0, "coordinator", node=1, generation=1, step=2), generation(16.5)],
            {**BEFORE, (1, 2): Activity(4, 2.0, 0.0, 13.0, 13.5)},
            [("formation", 2, "formed again", {"redone": 0.5, "waiting": 2.5, "planning": 0.5, "forming": 0.5})],
            id="the leader dies and another node leads",
        ),
        # The optimizer step of step 1 ended after its commit.
        pytest.param(
            {},
            [line(2, 20.0, 2, began=19.0)],
            [event(15.0, "restored", step=2, checkpoint="step-00000001"), generation(18.0)],
            {**BEFORE, (1, 1): Activity(4, 3.0, 0.4, 12.0, 13.4)},
            [("restart", 2, "back to step-00000001", {"starting": 5.0, "forming": 1.0})],
            id="a resume repeats nothing",
        ),
        pytest.param(
            {"eval_loss": 1.0, "eval_seconds": 4.4},
            [line(2, 18.0, 2, 3, began=17.0)],
            [death(15.0, cause="no heartbeat for 2 s"), generation(15.5)],
            BEFORE,
            [("failure", 2, "1.1 no heartbeat for 2 s", {"planning": 0.5, "forming": 1.5})],
            id="an evaluation that is interrupted and repeated until 17.4",
        ),
    ],
)
def test_costs_of_changes(evaluated, metrics, events, attempts, expected):
    """After two steps, the second with these figures of its evaluation."""
    report = report_of([METRICS[0], METRICS[1] | evaluated, *metrics], [EVENTS[0], *events], attempts)
    assert_whole(report)
    changes = [(change.kind, change.step, change.what, rounded(change.costs)) for change in report.changes]
    assert changes == expected
    assert report.expected is None


def test_generation_that_never_ran_and_run_without_logs():
    events = [
        *EVENTS[:3],
        death(16.5, worker="0.0"),
        generation(16.6, 3),
    ]
    report = report_of([*METRICS[:2], line(2, 18.0, 3, 2, began=17.0)], events, {})
    assert_whole(report)
    expected = {"starting": 10.0, "forming": 1.0 + 0.5 + 0.4, "useful": 3.0, "redone": 2.0, "planning": 1.1}
    assert rounded(report.parts) == pytest.approx(expected)


def test_report_before_the_first_commit():
    assert report_of([], [], {}).wall == 0.0
    assert rounded(report_of([], EVENTS[:1], {}).parts) == {"starting": 10.0}
