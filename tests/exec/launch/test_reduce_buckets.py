"""Runs whose gradients are reduced in buckets: the bits of one bucket, through faults too."""

import pytest

from recycle import Schedule
from recycle.exec import run
from recycle.job import price
from recycle.runs.logs import load_trace
from tests.exec.runs import assert_same_training, calm_run, figures, job, kinds, varied

pytestmark = pytest.mark.slow


STEPS = 5


def test_a_kill_between_the_sums_of_two_buckets_and_a_rejoin_change_no_bit(launch):
    """The reduce phase strikes before the middle one of a stage's four sums, when peers have begun two."""
    membership = {"heartbeat": 0.1, "dead_after": 3.0}
    gpt = job(3, 2, 2, kind="gpt", model={"tied": True, "layers": 2}, train={"clip": 1e9}, membership=membership)
    cut = varied(gpt, train={"reduce_buckets": 4})
    struck = launch(cut, STEPS, "kill:1.1@2.reduce", "rejoin:1.1@3")
    assert_same_training(struck, calm_run(gpt, launch, STEPS))
    assert {line["mode"] for line in struck.metrics} == {"barrier", "staggered"}
    assert kinds(struck).count("detected") == 1
    assert struck.metrics[-1]["live_workers"] == 6
    texts = load_trace(struck.directory, gpt.shape)._executed.words()
    whole = STEPS - 1  # of the iteration that was struck any number
    assert sum(text.startswith("1REDUCE_BUCKET/") for text in texts) >= 3 * 3 * whole


def test_explicit_reduces_of_a_schedule_override_the_jobs_buckets():
    emulated = price(job(2, 1, 2))
    written = Schedule.from_text(
        emulated.shape,
        {f"{k}.0": f"0F{k}.0 0B{k}.0 0F{k}.1 0B{k}.1 0REDUCE_GRAD 0STEP" for k in range(2)},
    )
    cut = varied(emulated, train={"reduce_buckets": 4})
    assert figures(run(written, cut, steps=2)) == figures(run(written, emulated, steps=2))
