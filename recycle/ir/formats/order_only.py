"""What formats that hold the order of one pipeline alone refuse, and what they leave out."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from recycle.errors import ScheduleError
from recycle.ir.schedule import Schedule

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OrderOnly:
    """A format of this kind.

    Attributes:
        name: such as "a torch CSV".
        ranks: what of it stands for ranks.
        alive: why no rank can have failed.
    """

    name: str
    ranks: str
    alive: str

    def refusal(self, what: str, why: str) -> ScheduleError:
        """The error that the format cannot hold `what`."""
        return ScheduleError(f"{self.name} cannot hold {what}: {why}")

    def require_one_pipeline(self, schedule: Schedule) -> None:
        """Raise ScheduleError at failed workers, several pipelines, and ties."""
        pipelines = schedule.shape.pipelines
        if schedule.failed:
            raise self.refusal(f"failed workers ({', '.join(map(str, sorted(schedule.failed)))})", self.alive)
        if pipelines > 1:
            raise self.refusal(f"{pipelines} pipelines", f"its {self.ranks}, so build it with D = 1")
        if schedule.ties:
            raise self.refusal(f"ties (stages {schedule.ties[0]} reduce together)", "untie them")

    def warn(self, schedule: Schedule, *more: str) -> None:
        """Log what is left out: what is not in the order, the shape or the placement, and `more`."""
        named = [f"metadata ({', '.join(schedule.metadata)})"] if schedule.metadata else []
        if schedule.optimizer != "staggered":
            named.append(f'optimizer = "{schedule.optimizer}"')
        if schedule.buckets > 1:
            named.append(f"buckets = {schedule.buckets}")
        if schedule.gathers:
            named.append("gathers")
        if schedule.forward_only:
            named.append("forward_only, without which its backwards are missing")
        if named := [*named, *more]:
            _log.warning("%s cannot hold, and leaves out: %s", self.name, ", ".join(named))
