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
from recycle.exec.faults.injector import FaultInjector
from recycle.exec.membership.member import Member
from recycle.exec.membership.members import member_name
from recycle.exec.membership.schema import ReachedKey, StruckKey
from recycle.exec.membership.stores import open_store
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.transport.plugin import TransportSettings
from recycle.exec.transport.transports import transport_of
from recycle.exec.worker.iterations import TraceLog
from recycle.exec.worker.recovery import WorkerLoop
from recycle.exec.worker.saver import Saver
from recycle.exec.worker.specification import WorkerSpecification
from recycle.job import Job
from recycle.shape import Worker


def run_worker(text: str) -> None:
    """Run one worker to the end of its run. Its process should end at once: threads of its transport may still run."""
    specification = msgspec.json.decode(text, type=WorkerSpecification)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    job = Job.from_toml(specification.job)
    torch.set_num_threads(job.train.threads)
    worker = Worker.parse(specification.worker)
    tensor_rank, tensor_parallel = specification.tensor_rank, job.grid.tensor_parallel
    name = member_name(worker, tensor_rank)
    tensor_group = TensorGroup(tensor_rank, tensor_parallel) if tensor_parallel > 1 else None
    plugin = transport_of(job)
    device = plugin.device(specification.local_index)
    stages = build_stages(job, specification.stages, device, tensor_group)
    if specification.restored is not None:
        load(
            folder_of(Path(specification.checkpoints), specification.restored),
            stages.values(),
            tensor_rank,
            tensor_parallel,
        )
    store = open_store(specification.store, specification.run, job.membership)
    transport = plugin(
        TransportSettings(
            store.torch_store,
            device,
            specification.address,
            (tensor_rank, tensor_parallel),
            store.addresses,
            job.membership,
        )
    )

    def end(reason: str) -> None:
        print(f"worker {name} ends: {reason}", file=sys.stderr, flush=True)
        os._exit(3)

    member = Member(store, name, job.membership.heartbeat, transport.wake, end, specification.generation)
    saver = Saver(Path(specification.checkpoints), name, worker.rank, stages, store, tensor_parallel)
    injector = FaultInjector(
        [(number, parse_fault(text)) for number, text in specification.faults],
        lambda number: store.claim(ReachedKey(number)),
        lambda: _poison(stages),
        lambda number: store.wait(StruckKey(number), 60.0),
    )
    member.ready(specification.incarnation)
    trace = TraceLog(
        None if specification.trace is None else Path(specification.trace), specification.started, member.warn
    )
    at = -1 if specification.restored is None else specification.restored
    try:
        WorkerLoop(job, member, stages, injector, trace, saver, transport, at, tensor_group).run()
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
