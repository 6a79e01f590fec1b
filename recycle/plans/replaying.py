"""The replays of a plan: `[integrity] every` in the gaps of its schedule, the same for everybody who works them out."""

from __future__ import annotations

from collections.abc import Collection

from recycle.ir.lower import lower
from recycle.ir.replay import Replay
from recycle.ir.replays import Checked, Rotation, with_replays
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.pricing import profile_of_layout


def rotation_of(schedule: Schedule, job: Job, disputed: Collection[Checked] = ()) -> Rotation | None:
    """The schedule with the job's replays; None where nothing is ever replayed.

    A schedule of the user's own may hold replays itself, which run in every iteration.

    Args:
        disputed: what all other hosts replay besides, in every iteration.
    """
    every = job.integrity.every
    if every or disputed:
        return with_replays(schedule, every, profile_of_layout(job, price(job).prices, schedule.shape), disputed)
    if (schedule.columns.kind == Replay.kind).any():
        return Rotation(lower(schedule), 0, ())
    return None
