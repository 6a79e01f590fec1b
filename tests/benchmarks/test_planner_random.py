"""Random jobs of the planner's benchmark: of their family, the same every time, and such that they can be planned."""

import pytest

from benchmarks.planner_random import FAMILIES, Row, drawn, measured, summary
from recycle.solve.problem import Problem


@pytest.mark.parametrize("family", FAMILIES)
def test_every_job_of_a_family_can_be_planned_and_is_drawn_from_its_number_alone(family):
    texts = set()
    for number in range(40):
        job, dead, text = drawn(family, number, seed=3)
        assert drawn(family, number, seed=3) == (job, dead, text)
        texts.add(text)
        problem = Problem.from_job(job, dead)
        assert problem.shape.chunks in FAMILIES[family].chunks
        assert bool(job.prices.speed) == bool(FAMILIES[family].slow)
        assert (problem.link >= 1.0) == (family == "link")
        assert min(problem.cap) >= problem.shape.chunks
    assert len(texts) == 40


def test_a_row_is_a_plans_own_figures():
    row = measured("v1-loose", 0, seed=3, seconds=0.2)
    assert row.gap == pytest.approx(row.period / row.bound - 1)
    assert row.took > 0


def test_the_table_has_the_median_the_ninetieth_percentile_and_the_worst():
    found = [Row("slow", n, f"job {n}", 100.0 + n, 100.0, n / 100, 1.0 + n) for n in range(11)]
    line, worst = summary("slow", found, seconds=8.0).split("\n")
    assert " ".join(line.split()) == "slow 11 1 5.0 / 9.0 / 10.0 1 / 6 / 12 1 11.0"
    assert worst.strip() == "10: job 10: 110, bound 100"
