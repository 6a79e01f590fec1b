"""The replays of a plan: `[integrity] every` in the gaps of its schedule, the same for everybody who works them out.

Which stages have room in which iterations is found by timing the schedule once per round. Who makes a plan does that
and notes it in the plan (`with_room`), so that nobody has to when a worker has died. It holds for the plan with its
peers renamed: where peers are not alike, plans are made for the workers themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import msgspec

from recycle.ir.instruction import Replay
from recycle.ir.lower import lower
from recycle.ir.replays import Checked, Rotation, with_replays
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.job.pricing import profile_of_layout
from recycle.plans.plan import with_updates_of

_ROOM = "room_for_replays"


def rotation_of(schedule: Schedule, job: Job, disputed: Collection[Checked] = ()) -> Rotation | None:
    """The schedule with the job's replays; None where nothing is ever replayed.

    A schedule of the user's own may hold replays itself, which run in every iteration.

    Args:
        disputed: what all other hosts replay besides, in every iteration.
    """
    every = job.integrity.every
    if every or disputed:
        profile = profile_of_layout(job, price(job).prices, schedule.shape)
        return with_replays(schedule, every, profile, disputed, _room_of(schedule) if every == "gaps" else None)
    if (schedule.columns.kind == Replay.kind).any():
        return Rotation(lower(schedule), 0)
    return None


def programs_of(schedule: Schedule, job: Job, disputed: Collection[Checked] = ()) -> Rotation:
    """What runs by a schedule: `rotation_of`, or the schedule itself in every iteration where nothing is replayed."""
    return rotation_of(schedule, job, disputed) or Rotation(lower(schedule), 0)


def with_room(schedule: Schedule, job: Job) -> Schedule:
    """The schedule with a note of which stages have room for replays, where the job asks for replays in gaps."""
    if job.integrity.every != "gaps" or _room_of(schedule) is not None:
        return schedule
    rotation = rotation_of(with_updates_of(schedule, job), job)
    assert rotation is not None, "there is a rate"
    return replace(schedule, metadata={**schedule.metadata, _ROOM: rotation.room()})


def _room_of(schedule: Schedule) -> list[list[int]] | None:
    """What the schedule says of it; None where it says nothing that it could."""
    try:
        return msgspec.convert(schedule.metadata.get(_ROOM), list[list[int]])
    except msgspec.ValidationError:
        return None
