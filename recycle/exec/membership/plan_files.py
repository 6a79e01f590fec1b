"""How a generation's plan reaches its workers: as a file of the run directory, named by the hash in the record.

Plans of large jobs have megabytes, more than an etcd takes in one key, and all processes need the same one; a file
system serves that better than a store. Only where the disk takes no file, because it is full, does the plan go through
the store, packed.
"""

from __future__ import annotations

import base64
import threading
import time
import zlib
from pathlib import Path

from recycle.errors import RecycleError, RunError
from recycle.exec.membership.member import GenerationOver
from recycle.exec.membership.schema import PlanKey
from recycle.exec.membership.store import Store
from recycle.ir.schedule import Schedule
from recycle.plans import schedule_hash
from recycle.runs import plan_file

PATIENCE_SECONDS = 60.0
"""How long a worker looks for a plan; a shared file system may show a new file late."""
PAUSE_SECONDS = 0.1
MOST_BYTES = 2**28
"""Of a plan's text that is unpacked."""


def pack_plan(text: str) -> str:
    """A plan file's text for the store: a few times shorter."""
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack_plan(packed: str) -> str:
    """What `pack_plan` was given. Raises RunError when it is not that."""
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.b64decode(packed, validate=True), MOST_BYTES).decode()
    except (ValueError, zlib.error) as error:
        raise RunError(f"the plan in the store is damaged: {error}") from None
    if not unpacking.eof:
        raise RunError("the plan in the store is damaged: it has no end")
    return text


def read_plan(
    folder: Path,
    store: Store,
    generation: int,
    digest: str,
    over: threading.Event,
    patience: float = PATIENCE_SECONDS,
) -> Schedule:
    """The plan of a generation, from the run directory or else from the store.

    Args:
        folder: of the plans.
        digest: hash of the schedule, as the generation's record states it.
        over: set when the generation is over.
        patience: seconds.

    Raises:
        GenerationOver: there is no need for it any more.
        RunError: it is in neither, or what is there is not that schedule.
    """
    path, deadline = plan_file(folder, digest), time.monotonic() + patience
    while True:
        why = f"{path}: is not there"
        try:
            packed = store.read(PlanKey(generation))
            schedule = Schedule.load(path) if packed is None else Schedule.loads(unpack_plan(packed), f"plan {digest}")
            if schedule_hash(schedule) == digest:
                return schedule
            why = f"{path}: holds another schedule"
        except RunError:
            raise
        except RecycleError as error:
            why = str(error)
        if over.wait(PAUSE_SECONDS):
            raise GenerationOver
        if time.monotonic() > deadline:
            raise RunError(f"the plan of generation {generation} could not be read within {patience:g} s: {why}")
