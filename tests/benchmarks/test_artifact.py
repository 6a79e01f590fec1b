"""The published cells come out of the published tables: the bookkeeping is understood, flaws and all."""

import pytest

from benchmarks.paper.artifact import CASES, TRACES, replay
from tests.systems.test_failures import public

CELLS = [(system, model, index) for system, model in CASES for index in range(len(TRACES))]


@pytest.mark.parametrize(("system", "model", "index"), CELLS)
def test_the_artifacts_cells(system, model, index):
    case = CASES[system, model]
    found = replay(system, model, public(f"oobleck/{TRACES[index]}.csv"))
    if system == "oobleck":
        assert found.steps == case.steps[index]
        assert round(found.throughput, 2) == case.published[index]
    else:
        assert found.throughput == pytest.approx(case.published[index], rel=0.02)


@pytest.mark.parametrize(
    ("model", "trace", "without", "halted"),
    [
        ("BERT-large", "scale_gcp-trace", 255.69, 1845),
        ("BERT-large", "scale_p3-trace", 270.99, 7950),
        ("GPT-2", "scale_gcp-trace", 76.70, 1845),
        ("GPT-2", "scale_p3-trace", 81.92, 7950),
    ],
)
def test_without_the_halting_flaw(model, trace, without, halted):
    path = public(f"oobleck/{trace}.csv")
    assert round(replay("oobleck", model, path, flaws=False).throughput, 2) == without
    assert replay("oobleck", model, path).halted == halted
    assert replay("oobleck", model, path, flaws=False).halted == 0
