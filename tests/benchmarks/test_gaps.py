"""The ratchet of the planner's mean gaps: on a few small jobs no family's mean is worse than what is kept."""

import json

import pytest

from benchmarks.gaps import ALLOWED, FILE, SECTIONS, means, steps_of, tasks


@pytest.mark.search
def test_no_mean_gap_of_small_jobs_is_worse_than_the_one_that_is_kept():
    kept = json.loads(FILE.read_text())["small"]
    found = means(SECTIONS["small"])
    assert {family: row["jobs"] for family, row in found.items()} == {name: row["jobs"] for name, row in kept.items()}
    worse = {family: row for family, row in found.items() if row["mean"] > kept[family]["mean"] + ALLOWED}
    assert not worse


def test_steps_stand_for_seconds_and_fall_with_the_size():
    planned = sorted(tasks(SECTIONS["1 s"]), key=lambda task: task.job.shape.worker_count)
    assert len(planned) > 100
    small, large = planned[0], planned[-1]
    assert steps_of(small, 1.0) > steps_of(large, 1.0) > 0
    assert steps_of(small, 20.0) == 20 * steps_of(small, 1.0)
