"""Runs whose gradients are reduced in buckets: the bits of one bucket, through faults too."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from recycle import Schedule
from recycle.exec import run
from recycle.ir.families import one_f_one_b, zb_h1, zb_v
from recycle.job import PricedJob, price
from recycle.runs.logs import load_trace
from tests.exec.accelerator.transport import SIMULATED
from tests.exec.runs import Run, calm_run, figures, job, kinds

pytestmark = pytest.mark.slow

STEPS = 3


def in_buckets(of: PricedJob, buckets: int) -> PricedJob:
    return of.with_sections(train=msgspec.structs.replace(of.train, reduce_buckets=buckets))


@pytest.mark.parametrize(
    ("accumulation", "tied"),
    [
        ("exact", True),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("exact", False), ("fast", False), ("fast", True))),
    ],
)
def test_any_number_of_buckets_trains_to_the_same_bits_in_one_process(accumulation: str, tied: bool) -> None:
    gpt = job(3, 2, 2, kind="gpt", model={"tied": tied}, train={"accumulation": accumulation})
    for family in (one_f_one_b, zb_h1):
        whole = run(family(gpt.shape), gpt, steps=STEPS)
        cut = run(family(gpt.shape), in_buckets(gpt, 3), steps=STEPS)
        assert figures(cut) == figures(whole)
        assert cut.digests == whole.digests


def test_chunks_of_one_worker_share_a_weight_and_reduce_in_buckets() -> None:
    gpt = job(
        2, 2, 4, kind="gpt", shape={"chunks": 2}, memory={"limit": 8}, model={"layers": 4, "tied": True, "sequence": 8}
    )
    schedule = zb_v(gpt.shape)
    whole, cut = (run(replace(schedule, buckets=buckets), gpt, steps=2) for buckets in (1, 4))
    assert figures(cut) == figures(whole)
    assert cut.digests == whole.digests


# Between processes

FAULTY = 7


@pytest.fixture(scope="module")
def gpt() -> PricedJob:
    """3 x 2 workers, whose steps are staggered from the second iteration on."""
    membership = {"heartbeat": 0.1, "dead_after": 3.0}
    return job(3, 2, 2, kind="gpt", model={"tied": True}, train={"clip": 1e9}, membership=membership)


@pytest.mark.process
@pytest.mark.parametrize("transport", ["gloo", pytest.param(SIMULATED, marks=pytest.mark.soak)])
def test_a_kill_between_the_sums_of_two_buckets_and_a_rejoin_change_no_bit(
    transport: str, gpt: PricedJob, launch: Run
) -> None:
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
    assert struck.directory is not None
    texts = load_trace(struck.directory, gpt.shape)._executed.words()
    whole = FAULTY - 1  # of the iteration that was struck any number
    assert sum(text.startswith("1REDUCE_BUCKET/") for text in texts) >= 3 * 3 * whole


@pytest.mark.process
def test_fast_sums_of_two_hosts_are_those_of_one_bucket_and_of_three_hosts_the_same_each_time(launch: Run) -> None:
    """Two addends have one order. With three it is gloo's, which follows from the place in the bucket."""
    two, three = (job(hosts, 1, 2, kind="gpt", train={"accumulation": "fast"}) for hosts in (2, 3))
    assert figures(launch(in_buckets(two, 3), STEPS)) == figures(launch(two, STEPS))
    assert figures(launch(in_buckets(three, 3), STEPS)) == figures(launch(in_buckets(three, 3), STEPS))


def test_a_schedule_that_says_how_it_reduces_is_not_cut_as_the_job_says() -> None:
    emulated = price(job(2, 1, 2))
    written = Schedule.from_text(
        emulated.shape,
        {f"{k}.0": f"0F{k}.0 0B{k}.0 0F{k}.1 0B{k}.1 0REDUCE_GRAD 0STEP" for k in range(2)},
    )
    assert figures(run(written, in_buckets(emulated, 4), steps=2)) == figures(run(written, emulated, steps=2))
