"""The cluster simulation: every second is booked once, only committed samples count."""

from dataclasses import dataclass, replace

import pytest

from recycle.job import Job
from recycle.job.sections import PausesSection
from recycle.systems.cluster import Outcome, run
from recycle.systems.failures import CORRUPTION, FailureTrace, NodeChange, SlowPeriod
from recycle.systems.scenario import Scenario
from recycle.systems.system import (
    ActiveConfiguration,
    Change,
    Checkpoints,
    DoesNotFit,
    Loss,
    Nodes,
    Pause,
    State,
    Stopped,
)
from tests.systems.scenarios import trace as failures


@dataclass
class Scripted:
    """Ten seconds per iteration with both nodes, twenty with one; the pause and the loss are as given."""

    pause: Pause = Pause(detect=3.0)  # noqa: RUF009
    loss: Loss = Loss.ITERATION
    checkpoints: Checkpoints | None = None
    need: int = 1
    dropped: float = 0.0
    name: str = "scripted"

    def begin(self, live: Nodes) -> State | DoesNotFit:
        if len(live) < self.need:
            return Stopped(live=live, reason="too few")
        return ActiveConfiguration(
            live=live,
            period=20.0 / len(live),
            samples=100.0 - self.dropped,
            dropped=self.dropped,
            checkpoints=self.checkpoints,
        )

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        after = self.begin(state.live - failed | joined)
        assert not isinstance(after, DoesNotFit)
        return Change(state=after, pause=self.pause, loss=self.loss if failed else Loss.NOTHING, event="change")


def scenario(**pauses: float) -> Scenario:
    job = Job.from_toml("[shape]\npipelines = 2\nranks = 1\nmicro_batches = 4\n")
    return replace(Scenario.of(job), pauses=PausesSection(**{"start": 0.0, **pauses}))


def trace(text: str, end: float) -> FailureTrace:
    """Two nodes, and events as "104 -1; 110 +1": node 1 dies after 104 seconds and comes after 110."""
    changes = []
    for event in filter(None, text.split("; ")):
        time, *words = event.split()
        gone, come = (frozenset(int(word[1:]) for word in words if word[0] == sign) for sign in "-+")
        changes.append(NodeChange(float(time), gone, come))
    return FailureTrace("test", 2, frozenset({0, 1}), tuple(changes), end)


def booked(outcome: Outcome) -> dict[str, float]:
    """Return the lost seconds that are not zero; assert that the books close."""
    assert outcome.samples / outcome.fault_free + sum(outcome.lost.values()) == pytest.approx(outcome.seconds)
    return {cause: pytest.approx(seconds) for cause, seconds in outcome.lost.items() if abs(seconds) > 1e-9}


@pytest.mark.parametrize(
    ("system", "events", "end", "samples", "lost"),
    [
        # Only whole iterations count.
        (Scripted(), "", 1005.0, 10_000, {"degraded": 5.0}),
        # A failure takes the iteration in progress: 10 iterations, then 5 of 20 s from 107 on.
        (Scripted(), "104 -1", 207.0, 1000 + 500, {"detect": 3.0, "redone": 4.0, "degraded": 50.0}),
        # An iteration that continues keeps its share: half an iteration is left, 108 to 118; then 4 more to 198.
        (Scripted(loss=Loss.NOTHING), "105 -1", 208.0, 1000 + 500, {"detect": 3.0, "degraded": 55.0}),
        # Time without enough nodes is stopped.
        (Scripted(need=2), "100 -1; 160 +1", 203.0, 1000 + 400, {"detect": 3.0, "stopped": 60.0}),
        (Scripted(), "50 -0 -1", 1000.0, 500, {"stopped": 950.0}),
        # Dropped samples do not count as progress, nor in the fault-free rate here.
        (Scripted(dropped=20.0), "", 1000.0, 8000, {"dropped": 250.0, "degraded": -250.0}),
    ],
)
def test_every_second_is_booked(system, events, end, samples, lost):
    outcome = run(system, scenario(), trace(events, end))
    assert outcome.samples == samples
    assert outcome.dropped == samples / (100.0 - system.dropped) * system.dropped
    assert outcome.fault_free == 10.0 - system.dropped / 10
    assert booked(outcome) == lost
    assert outcome.gpu_seconds_per_sample == pytest.approx(2 * end / samples)


def test_failure_in_a_pause_restarts_it():
    job = Job.from_toml("[shape]\npipelines = 3\nranks = 1\nmicro_batches = 4\n")
    three = failures(Scenario.of(job), 200.0, (100.0, "1"), (105.0, "2"))
    outcome = run(Scripted(pause=Pause(detect=3.0, copy=4.0)), Scenario.of(job), three)
    assert booked(outcome) == {"detect": 3.0 + 3.0, "copy": 2.0 + 4.0, "degraded": pytest.approx(88.0 - 4 * 20 / 3)}
    assert outcome.samples == 100 * (15 + 4)


@pytest.mark.parametrize(
    ("start", "events", "times"),
    [
        (0.0, "100 -1; 110 +1", [0, 100, 123]),  # at a boundary
        (30.0, "100 -1; 110 +1", [0, 100, 143]),
        # A node that dies before it is usable changes nothing.
        (15.0, "100 -1; 110 +1; 120 -1; 125 +1", [0, 100, 143]),
    ],
)
def test_usable_nodes_join_at_a_boundary(start, events, times):
    outcome = run(Scripted(), scenario(start=start), trace(events, 300.0))
    assert [round(transition.time) for transition in outcome.transitions] == times


def test_rollback_returns_to_the_last_complete_checkpoint():
    system = Scripted(loss=Loss.CHECKPOINT, checkpoints=Checkpoints(every=50.0, stall=2.0, lag=5.0))
    # checkpoints end at 52, 104, 156 and count from 57, 109, 161 on
    for strike, kept in ((56.0, 0), (58.0, 5), (108.0, 5), (110.0, 10), (160.0, 10), (153.0, 10)):
        outcome = run(system, scenario(), trace(f"{strike} -1", strike + 3.0))
        assert outcome.samples == 100 * kept, strike
        booked(outcome)


def test_corruption_returns_to_a_checkpoint_from_before_it_or_undoes_what_was_unnoticed():
    system = Scripted(checkpoints=Checkpoints(every=50.0, stall=2.0, lag=5.0))
    spoiled = FailureTrace("test", 2, frozenset({0, 1}), (_corruption(160.0),), 162.0)
    for notice, kept in ((0.0, 10), (40.0, 10), (60.0, 5), (110.0, 0)):
        outcome = run(system, scenario(notice=notice), spoiled)
        assert outcome.samples == 100 * kept, notice
        booked(outcome)
    system.unnoticed = lambda state: 40.0
    outcome = run(system, scenario(), spoiled)
    assert (outcome.samples, outcome.lost["redone"]) == (1100, pytest.approx(44.0))


def _corruption(time: float) -> NodeChange:
    return NodeChange(time, frozenset({1}), frozenset(), {1: CORRUPTION})


def test_a_slow_node_stretches_the_period_until_it_is_well_or_fails():
    slow = (SlowPeriod(100.0, 300.0, 1, 2.0),)
    outcome = run(Scripted(), scenario(), replace(trace("", 400.0), slow=slow))
    assert outcome.samples == 100 * (10 + 10 + 10)
    outcome = run(Scripted(), scenario(), replace(trace("200 -1; 203 +1", 423.0), slow=slow))
    assert outcome.samples == 100 * (10 + 5 + 1 + 20)


def test_checkpoint_cycles_equal_single_checkpoints():
    system = Scripted(loss=Loss.CHECKPOINT, checkpoints=Checkpoints(every=50.0, stall=2.0, lag=5.0))
    at_once = run(system, scenario(), trace("", 100_031.0))
    ticks = "; ".join(map(str, range(7, 100_031, 7)))
    assert at_once.samples == run(system, scenario(), trace(ticks, 100_031.0)).samples
    assert at_once.samples == 100 * (5 * (100_031 // 52) + 3)
    assert at_once.lost["checkpoint"] == pytest.approx(2.0 * (100_031 // 52))


def test_a_system_that_does_not_fit_is_a_result():
    class Large(Scripted):
        def begin(self, live: Nodes) -> State | DoesNotFit:
            return DoesNotFit(needed=2.0, cap=1.0, reason="rank 0 needs 2 bytes")

    outcome = run(Large(), scenario(), trace("", 10.0))
    assert outcome.misfit is not None
    assert (outcome.goodput, outcome.ettr) == (0.0, 0.0)


def test_long_traces_need_no_loop_over_iterations():
    system = Scripted(checkpoints=Checkpoints(every=10.0, stall=0.0))
    assert run(system, scenario(), trace("", 1e10)).samples == pytest.approx(1e11, rel=1e-6)


def test_rates_are_zero_in_pauses():
    outcome = run(Scripted(pause=Pause(detect=5.0)), scenario(), trace("20 -0; 60 +0", 80.0))
    # 20 s at 10 samples per second; 5 s of pause and 35 s at 5; the join waits for a boundary 65 s in, pauses for 5 s
    assert outcome.rates(4) == pytest.approx([10.0, 3.75, 5.0, (5 * 5 + 10 * 10) / 20])
