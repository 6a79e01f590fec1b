"""Schedules with replays run: the same losses and bits as without, and what differs is told with who holds what."""

from __future__ import annotations

import pytest

from recycle.exec import run
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.replays import with_replays
from tests.exec.runs import job


@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_losses_and_states_are_those_of_the_schedule_without_replays(kind: str) -> None:
    of = job(3, 2, 2, kind=kind)
    for family in (one_f_one_b, zb_h1):
        schedule = family(of.shape)
        with_them, without = (run(one, of, steps=2) for one in (with_replays(schedule).whole, schedule))
        assert with_them.losses == without.losses
        assert with_them.digests == without.digests
