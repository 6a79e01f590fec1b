"""The generator gives what its defaults are taken from, and the same for the same seed."""

from __future__ import annotations

import pytest

from recycle.systems.failure_generator import CAUSES, Generator


def test_the_same_seed_gives_the_same_trace() -> None:
    assert Generator(days=60, seed=4).trace(100) == Generator(days=60, seed=4).trace(100)
    assert Generator(days=60, seed=4).trace(100) != Generator(days=60, seed=5).trace(100)


def test_rate_repair_and_bad_nodes_are_those_of_the_hardware_trace() -> None:
    traces = [Generator(days=349, seed=seed).trace(400) for seed in range(6)]
    per_day = [trace.rate * 86400 * 1000 for trace in traces]
    assert sum(per_day) / 6 == pytest.approx(4.2, rel=0.08)
    repairs: list[float] = []
    for trace in traces:
        assert trace.up == frozenset(range(400))
        begun: dict[int, float] = {}
        for change in trace.changes:
            repairs += [change.time - begun.pop(node) for node in change.joined]
            begun |= dict.fromkeys(change.failed, change.time)
    repairs.sort()
    assert repairs[len(repairs) // 2] / 3600 == pytest.approx(20, rel=0.1)
    hit = [len({node for change in trace.changes for node in change.failed}) for trace in traces]
    assert sum(hit) / 6 == pytest.approx(231, rel=0.08)


def test_some_failures_take_several_nodes() -> None:
    trace = Generator(days=349, burst=0.05).trace(400)
    sizes = [len(change.failed) for change in trace.changes if change.failed]
    assert 0.03 < sum(size > 1 for size in sizes) / len(sizes) < 0.08
    assert max(sizes) <= 8
    assert {cause for change in trace.changes for cause in change.causes.values()} <= CAUSES.keys()


@pytest.mark.parametrize("generator", [Generator(rate=0), Generator(days=0.001)])
def test_nothing_may_happen(generator: Generator) -> None:
    trace = generator.trace(3)
    assert trace.changes == ()
    assert trace.end == generator.days * 86400
