"""Runs whose gradients are reduced in buckets: the bits of one bucket, through faults too."""

import msgspec
import pytest

from recycle import Schedule
from recycle.exec import run
from recycle.job import PricedJob, price
from recycle.runs.logs import load_trace
from tests.exec.accelerator.transport import SIMULATED
from tests.exec.runs import calm_run, figures, job, kinds

pytestmark = pytest.mark.slow


def in_buckets(config: PricedJob, buckets: int) -> PricedJob:
    return config.with_sections(train=msgspec.structs.replace(config.train, reduce_buckets=buckets))


# Between processes

FAULTY = 7


@pytest.fixture(scope="module")
def gpt():
    """3 x 2 workers, whose steps are staggered from the second iteration on."""
    membership = {"heartbeat": 0.1, "dead_after": 3.0}
    return job(3, 2, 2, kind="gpt", model={"tied": True}, train={"clip": 1e9}, membership=membership)


@pytest.mark.parametrize("transport", ["gloo", pytest.param(SIMULATED, marks=pytest.mark.soak)])
def test_a_kill_between_the_sums_of_two_buckets_and_a_rejoin_change_no_bit(transport, gpt, launch):
    """The reduce phase strikes before the middle one of a stage's four sums, when peers have begun two."""
    section = msgspec.structs.replace(gpt.membership, transport=transport)
    cut = in_buckets(gpt.with_sections(membership=section), 4)
    struck = launch(cut, FAULTY, "kill:1.1@3.reduce", "rejoin:1.1@5")
    calm = calm_run(gpt, launch, FAULTY)
    assert figures(struck) == figures(calm)
    assert {line["mode"] for line in struck.metrics} == {"barrier", "staggered"}
    assert kinds(struck).count("detected") == 1
    assert struck.metrics[-1]["live_workers"] == 6
    for worker, stages in struck.digests.items():
        assert stages == calm.digests[worker]
    texts = load_trace(struck.directory, gpt.shape)._executed.words()
    whole = FAULTY - 1  # of the iteration that was struck any number
    assert sum(text.startswith("1REDUCE_BUCKET/") for text in texts) >= 3 * 3 * whole


def test_explicit_reduces_of_a_schedule_override_the_jobs_buckets():
    emulated = price(job(2, 1, 2))
    written = Schedule.from_text(
        emulated.shape,
        {f"{k}.0": f"0F{k}.0 0B{k}.0 0F{k}.1 0B{k}.1 0REDUCE_GRAD 0STEP" for k in range(2)},
    )
    assert figures(run(written, in_buckets(emulated, 4), steps=2)) == figures(run(written, emulated, steps=2))
