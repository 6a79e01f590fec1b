"""Which problems the planner refuses: too many operations, no durations, or times out of all proportion."""

from __future__ import annotations

from recycle.errors import PlanError
from recycle.ir.columns import MOST_INSTRUCTIONS
from recycle.job.profile import Profile
from recycle.job.shape import Shape

MOST_OPERATIONS = MOST_INSTRUCTIONS
"""Operations of the largest problem, so that its plan can be read again: about a kilobyte and 10 microseconds each,
without any search."""
SHORTEST, LONGEST = 1e-6, 1e12
"""Times beyond these drown in the tolerances of comparisons, or have sums that are not exact any more."""


def require_size(shape: Shape, split: bool) -> None:
    """Raises PlanError for more operations than the planner takes, with what they would need."""
    operations = (3 if split else 2) * shape.stages * shape.global_micro_batches
    if operations > MOST_OPERATIONS:
        raise PlanError(
            f"[shape]: {shape} has {operations:,} operations, more than the {MOST_OPERATIONS:,} that can be planned;"
            f" a first plan would need about {operations / 1e6:,.0f} GB of memory and {operations / 6e6:,.0f} minutes"
        )


def require_times(
    profile: Profile, stages: int, speed: tuple[float, ...], links: tuple[float, ...], where: str
) -> None:
    """Raises PlanError for an F or I without a duration, and for times so small or large that figures go wrong."""
    for key in ("forward", "backward_input", "backward_weight", "reduce", "step"):
        must_last = key in ("forward", "backward_input")
        for stage, seconds in enumerate(profile.per_stage(key, stages)):
            if must_last and seconds <= 0:
                raise PlanError(f"{where} {key}: stage {stage} takes {seconds:g}; a plan needs a time above 0")
            if seconds * max(speed) > LONGEST or (must_last and seconds * min(speed) < SHORTEST):
                raise PlanError(
                    f"{where} {key}: stage {stage} takes {seconds:g}, on one of its workers less than {SHORTEST:g} or"
                    f" more than {LONGEST:g}; state all times in another unit"
                )
    if links[-1] > LONGEST:
        raise PlanError(f"{where} link: a transfer takes {links[-1]:g}, more than {LONGEST:g}; check the bandwidths")
