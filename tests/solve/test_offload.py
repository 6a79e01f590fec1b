"""Plans whose activations leave for the host: the limit holds on the device, and the period falls."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recycle import PlanError, check
from recycle.ir.instruction import Offload
from recycle.ir.kinds import HostCopy, is_kind
from recycle.job.sections import MemorySection
from recycle.plans import Plan
from recycle.plans.library import job_key
from recycle.plans.verify import verify
from recycle.solve.offload import with_offloads
from recycle.solve.planner import plan
from tests.jobs import varied
from tests.solve.jobs import job, small_jobs


def offloading(priced, bandwidth):
    return varied(priced, memory={"offload": "auto", "host_bandwidth": bandwidth})


def offloads(schedule):
    return int((schedule.columns.kind == Offload.kind).sum())


def test_an_offload_reaches_the_unlimited_bound_where_no_plan_without_does():
    limited = job(1, 4, 8, 4, weight_stash=0.25, steps=3000)
    bare = plan(limited)
    assert (bare.period, bare.lower_bound) == (27, 27)
    planned = plan(offloading(limited, 2.0))
    assert (planned.period, planned.lower_bound) == (24, 24)
    assert offloads(planned.schedule) == planned.summary()["offloads"] > 0
    assert check(planned.schedule, profile=offloading(limited, 2.0).prices, limits=limited.limits) == []
    assert verify(planned.as_schedule())[0] <= planned.lower_bound
    assert Plan.from_text(planned.text()).limits == (4,) * 4


def test_slow_copies_make_no_plan_slower():
    limited = job(1, 4, 8, 4, steps=2000)
    assert plan(offloading(limited, 0.001)).period <= plan(limited).period


@settings(max_examples=20)
@given(small_jobs(), st.sampled_from([0.2, 1.0, 5.0]))
def test_copies_keep_any_limit_that_they_claim_to_keep(small, bandwidth):
    priced, dead = small
    loose = priced.with_sections(memory=MemorySection(weight_stash=priced.memory.weight_stash))
    planned, limits = plan(loose, dead, quick=True), priced.limits or [2.0 * priced.shape.chunks] * priced.shape.ranks
    prices = replace(priced.prices, host_bandwidth=bandwidth)
    schedule = with_offloads(planned.schedule, prices, limits, room=2.0)
    if schedule is None:
        return
    assert check(schedule, profile=prices, limits=limits) == []
    kept = schedule.columns.take(np.flatnonzero(~is_kind(schedule.columns.kind, HostCopy)))
    if check(planned.schedule, profile=prices, limits=limits) == []:
        assert (kept, offloads(schedule)) == (planned.schedule.columns, 0)


def test_a_profile_without_the_bandwidth_is_refused(tmp_path):
    limited = job(1, 2, 2, 2)
    limited.prices.save(tmp_path / "profile.json")
    times = {"profile": str(tmp_path / "profile.json")}
    with pytest.raises(PlanError, match=r"\[memory\] offload: the profile has no host_bandwidth"):
        plan(varied(limited, times=times, memory={"offload": "auto"}))


def test_a_library_keeps_plans_with_and_without_offloads_apart():
    limited = job(1, 2, 2, 2)
    stated = varied(limited, memory={"host_bandwidth": 1.0})
    assert len({job_key(stated), job_key(offloading(limited, 1.0)), job_key(limited)}) == 3
    assert offloading(limited, 1.0).prices.digest() == stated.prices.digest() != limited.prices.digest()
