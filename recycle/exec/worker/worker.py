"""A worker process: forked by the fork server, one per live worker and tensor rank.

It connects to the launcher's store, builds its stages, says that it is ready and lives through generations
(recovery.py). It dies with the launcher, never the other way round.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from recycle.errors import RunError
from recycle.exec.checkpoint.checkpoint import folder_of, load
from recycle.exec.faults.faults import parse_fault
from recycle.exec.faults.striker import Striker
from recycle.exec.membership.member import Member
from recycle.exec.membership.members import member_name
from recycle.exec.membership.stores import open_store
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage, default_device
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.transport.gloo import open_sockets, shut_sockets
from recycle.exec.transport.nccl import abort_all
from recycle.exec.transport.transports import Transports, transport_of
from recycle.exec.worker.iterations import TraceLog
from recycle.exec.worker.orders import Orders
from recycle.exec.worker.recovery import WorkerLoop
from recycle.exec.worker.saver import Saver
from recycle.job import Job
from recycle.shape import Worker


def run_worker(orders_text: str) -> None:
    """Run one worker to the end of its run. Its process should end at once afterwards: gloo's threads still run."""
    orders = msgspec.json.decode(orders_text, type=Orders)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    job = Job.from_toml(orders.job)
    torch.set_num_threads(job.train.threads)
    worker = Worker.parse(orders.worker)
    tensor_rank, tensor_parallel = orders.tensor_rank, job.grid.tensor_parallel
    name = member_name(worker, tensor_rank)
    tensor_group = TensorGroup(tensor_rank, tensor_parallel) if tensor_parallel > 1 else None
    stages = build_stages(job, orders.stages, orders.local_index, tensor_group)
    if orders.restored is not None:
        load(folder_of(Path(orders.checkpoints), orders.restored), stages.values(), tensor_rank, tensor_parallel)
    store = open_store(orders.store, orders.run, job.membership)
    keep: set[str] = set()
    peers = store.addresses

    def shut() -> None:
        if transport_of(job) == "nccl":
            abort_all()
        else:
            shut_sockets(keep, peers)

    def end(reason: str) -> None:
        print(f"worker {name} ends: {reason}", file=sys.stderr, flush=True)
        os._exit(3)

    member = Member(store, name, job.membership.heartbeat, shut, end, orders.generation)
    saver = Saver(Path(orders.checkpoints), name, worker.rank, stages, store, tensor_parallel)
    striker = Striker(
        [(number, parse_fault(text)) for number, text in orders.faults],
        lambda number: store.first(f"fault/{number}"),
        lambda: _poison(stages),
        lambda number: store.wait(f"struck/{number}", 60.0),
    )
    keep |= set(open_sockets())
    member.ready(orders.incarnation)
    trace = TraceLog(None if orders.trace is None else Path(orders.trace), orders.started, member.warn)
    at = -1 if orders.restored is None else orders.restored
    try:
        transports = Transports(
            job, store.torch_store, default_device(orders.local_index), orders.address, (tensor_rank, tensor_parallel)
        )
        WorkerLoop(job, member, stages, striker, trace, shut, saver, transports, at, tensor_group).run()
        member.progress.set_waiting(True)  # for a disk, which has its own deadline
        saver.close()
        member.progress.begins("digest")
        member.leave_digests({stage.index: stage.state_digest() for stage in stages.values()})
    except RunError as error:
        end(str(error))


def _poison(stages: Mapping[int, Stage]) -> None:
    """What a `nan` fault does: the sums of this worker's gradients are not numbers any more."""
    for stage in stages.values():
        for buffer in stage.gradient_buffers():
            buffer.fill_(math.nan)
