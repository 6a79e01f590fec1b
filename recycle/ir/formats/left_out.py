"""What formats that hold an order alone leave out of a schedule, in words."""

from __future__ import annotations

from recycle.ir.schedule import Schedule


def left_out(schedule: Schedule) -> list[str]:
    """What of a schedule is not in the order of its computes and transfers, nor in its shape and placement."""
    named = [f"metadata ({', '.join(schedule.metadata)})"] if schedule.metadata else []
    if schedule.optimizer != "staggered":
        named.append(f'optimizer = "{schedule.optimizer}"')
    if schedule.buckets > 1:
        named.append(f"buckets = {schedule.buckets}")
    if schedule.gathers:
        named.append("gathers")
    if schedule.forward_only:
        named.append("forward_only, without which its backwards are missing")
    return named
