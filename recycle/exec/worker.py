"""The worker process: `python -m recycle.exec.worker`, started by the launcher, one per live worker.

It reads its orders from one JSON argument, connects to the launcher's store, builds its stages, says that it is
ready and lives through generations (recovery.py). It dies with the launcher, never the other way round.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import msgspec

from recycle.exec.processes import Orders, die_with_parent


def main() -> None:
    """Run one worker from the orders in the first argument."""
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    die_with_parent(orders.launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    _run(orders)


def _run(orders: Orders) -> None:
    import torch

    from recycle.exec.faults import Striker, parse_fault
    from recycle.exec.gloo import open_sockets, shut_sockets
    from recycle.exec.membership import LauncherStore, Member
    from recycle.exec.recovery import TraceLog, WorkerLoop
    from recycle.exec.stages import build_stages
    from recycle.job import Job
    from recycle.shape import Worker

    job = Job.from_toml(orders.job)
    torch.set_num_threads(job.train.threads)
    worker = Worker.parse(orders.worker)
    stages = build_stages(job, range(worker.rank, job.shape.stages, job.shape.ranks))
    store = LauncherStore.connect(orders.address, orders.port)
    keep: set[str] = set()

    def shut() -> int:
        return shut_sockets(keep)

    member = Member(store, orders.worker, job.membership.heartbeat, shut)
    striker = Striker(
        [(number, parse_fault(text)) for number, text in orders.faults],
        lambda number: store.first(f"fault/{number}"),
    )
    keep |= set(open_sockets())
    member.ready(orders.incarnation)
    WorkerLoop(job, member, stages, striker, TraceLog(Path(orders.trace), orders.started), shut).run()
    member.leave_digests({stage.index: stage.state_digest() for stage in stages.values()})
    # Threads of gloo and of the store may be in the middle of anything; there is nothing left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
