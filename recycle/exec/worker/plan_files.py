"""How a generation's plan reaches its workers: as a file of the run directory, named by the hash in the record.

Plans of large jobs have megabytes, and all processes need the same one; a file system serves that better than messages.
Only where the disk takes no file, because it is full, does the proposal carry the plan's text.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from recycle.errors import RecycleError, RunError
from recycle.exec.worker.member import GenerationOver
from recycle.ir.schedule import Schedule
from recycle.plans import schedule_hash
from recycle.runs.logs import plan_file

PATIENCE_SECONDS = 60.0
"""How long a worker looks for a plan; a shared file system may show a new file late."""
PAUSE_SECONDS = 0.1


def read_plan(
    folder: Path,
    text: str,
    generation: int,
    digest: str,
    over: threading.Event,
    patience: float = PATIENCE_SECONDS,
) -> Schedule:
    """The plan of a generation.

    Args:
        folder: of the plans.
        text: of the plan file, where the proposal carries it; else empty.
        digest: hash of the schedule, as the generation's record states it.
        over: set when the generation is over.
        patience: seconds.

    Raises:
        GenerationOver: it is not needed any more.
        RunError: it is missing, or what is there is not that schedule.
    """
    path, deadline = plan_file(folder, digest), time.monotonic() + patience
    while True:
        try:
            schedule = Schedule.loads(text, f"plan {digest}") if text else Schedule.load(path)
            if schedule_hash(schedule) == digest:
                return schedule
            why = f"{path}: holds another schedule"
        except RecycleError as error:
            why = str(error)
        if over.wait(PAUSE_SECONDS):
            raise GenerationOver
        if time.monotonic() > deadline:
            raise RunError(f"the plan of generation {generation} could not be read within {patience:g} s: {why}")
