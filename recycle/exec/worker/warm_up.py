"""What every worker does first, done once by the fork server, so that no worker that it forks does it again.

Some modules are imported at their first use (a part of numpy by `np.unique`, transports by name), and msgspec looks at
the annotations of a type when it first decodes one. That took a third of a second per worker on a machine that starts
many at once: at the start of a run, and whenever a worker comes back.
"""

from __future__ import annotations

import msgspec

from recycle.exec.protocol import Commit, GenerationRecord, Report
from recycle.exec.transport.transports import TRANSPORTS, transport_named
from recycle.exec.worker.specification import WorkerSpecification
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import lower, with_barrier
from recycle.ir.schedule import Schedule
from recycle.job import Job

_SMALLEST = "[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n"


def warm_up() -> None:
    """Read a job and a plan, lower it, and make the decoders of messages; starts no thread."""
    for transport in TRANSPORTS:
        transport_named(transport)
    for message in (WorkerSpecification, GenerationRecord, Commit, Report):
        msgspec.json.Decoder(message)
    schedule = one_f_one_b(Job.from_toml(_SMALLEST).shape)
    lower(Schedule.loads(with_barrier(schedule).dumps()))
    lower(schedule)
