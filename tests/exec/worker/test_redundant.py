"""Redundant forwards between processes: they take their time, and change no bit."""

from __future__ import annotations

import pytest

from recycle import Job, Schedule
from recycle.exec import run
from recycle.ir.families import one_f_one_b
from tests.exec.runs import Run, job

COPIES = {"0.0": [0, 1], "1.0": [0, 1]}


@pytest.fixture(scope="module")
def of() -> Job:
    return job(2, 2, 3, memory={"limit": 6})


@pytest.fixture(scope="module")
def doubled(of: Job) -> Schedule:
    """1F1B with the last stage's forward again on the first stage's worker, before each backward."""
    plain = one_f_one_b(of.shape).text()
    programs = {
        worker: " ".join(
            f"1R{word[2:]} {word}" if word.startswith("0B") else word for word in text.split()
        )
        for worker, text in plain.items()
    }  # fmt: skip
    return Schedule.from_text(of.shape, programs, placement=COPIES, optimizer="barrier")


def test_processes_run_them_to_the_same_bits(of: Job, doubled: Schedule, launch: Run) -> None:
    plain = run(one_f_one_b(of.shape), of, steps=3)
    there = launch(of, 3, schedule=doubled, planner=None)
    assert there.losses == plain.losses
    assert [line["grad_norm"] for line in there.metrics] == [line["grad_norm"] for line in plain.metrics]
    assert there.digests["0.0"][1] == there.digests["0.1"][1] == plain.digests["0.1"][1]
