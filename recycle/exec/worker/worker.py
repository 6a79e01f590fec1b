"""A worker process: forked by the fork server, one per live worker and tensor rank.

It connects to the agent of its node, builds its stages, reports that it is ready and takes part in generations
(recovery.py). SIGTERM has it leave at the next boundary (termination.py).
It ends with the launcher or agent that started it, never the other way round.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from recycle.errors import RecycleError, RunError, first_line
from recycle.exec.checkpoint.checkpoint import folder_of, load
from recycle.exec.faults.injector import EXCHANGE_SECONDS, start_injector
from recycle.exec.members import member_name
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.transport.forming_store import FormingStore
from recycle.exec.transport.paced_links import PacedLinks
from recycle.exec.transport.plugin import TransportSettings
from recycle.exec.transport.transports import transport_of
from recycle.exec.worker.held_shards import HeldShards
from recycle.exec.worker.hosted import Hosted
from recycle.exec.worker.member import FormingKeys, Member
from recycle.exec.worker.recovery import WorkerLoop
from recycle.exec.worker.saver import Saver
from recycle.exec.worker.specification import REFUSED, WorkerSpecification
from recycle.exec.worker.termination import Termination
from recycle.exec.worker.trace_log import TraceLog, trace_every
from recycle.job import Job
from recycle.runs import log_path
from recycle.shape import Worker


def run_worker(text: str) -> None:
    """Run one worker to the end of its run. Its process should end at once: threads of its transport may still run.

    Args:
        text: its specification.
    """
    specification = msgspec.json.decode(text, type=WorkerSpecification)
    termination = Termination()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    run, worker, tensor_rank = specification.run, Worker.parse(specification.worker), specification.tensor_rank
    job, checkpoints = Job.from_toml(run.job), Path(run.directory) / "checkpoints"
    if specification.generation or specification.restored is not None:
        job = job.without_weights()  # its state comes from a peer, or from a checkpoint of the run
    torch.set_num_threads(job.train.threads)
    tensor_parallel = job.grid.tensor_parallel
    name = member_name(worker, tensor_rank)
    tensor_group = TensorGroup(tensor_rank, tensor_parallel) if tensor_parallel > 1 else None
    plugin = transport_of(job)
    device = plugin.device(specification.local_index)
    links = PacedLinks.of(job, worker)
    keys = FormingKeys(run.agent)
    transport = plugin(
        TransportSettings(
            keys,
            device,
            run.address,
            (tensor_rank, tensor_parallel),
            (),
            job.membership,
            links,
        )
    )

    def end(reason: str, code: int = 3) -> NoReturn:
        print(f"worker {name} ends: {reason}", file=sys.stderr, flush=True)
        os._exit(code)

    # It beats from here on: to make stages and to read a checkpoint may take long.
    member = Member(
        run.agent,
        name,
        specification.incarnation,
        job.membership.heartbeat,
        transport.wake,
        end,
        specification.generation,
        transport.device_state,
    )
    termination.listen(member.leaves, end)
    try:
        build = partial(build_stages, job, device=device, tensor_group=tensor_group)
        usual = list(range(worker.rank, job.shape.stages, job.shape.ranks))
        indices = run.stages.get(specification.worker, [] if run.stages else usual)
        is_first = not specification.generation or specification.restored is not None
        hosted = Hosted(build, run.cut, indices, holds=is_first)
    except (RuntimeError, MemoryError, OverflowError) as error:  # torch's way to say that there is no memory
        end(f"its stages cannot be made: {first_line(error)}")
    except RecycleError as error:
        end(str(error), REFUSED)
    stages, shards = hosted.stages, None
    read = None
    if specification.restored is not None:
        folder = folder_of(checkpoints, specification.restored)
        read = partial(load, folder, tensor_rank=tensor_rank, tensor_parallel=tensor_parallel)
    if job.train.sharded_optimizer:
        shards = HeldShards(stages, is_first, read)
    elif read is not None:
        read(stages.values())
    deadline = job.train.checkpoint_deadline
    saver = Saver(checkpoints, name, stages, member.saved, tensor_parallel, deadline, member.progress.set_waiting)
    injector = start_injector(
        run.faults,
        tensor_parallel,
        member,
        FormingStore(keys, member.over, EXCHANGE_SECONDS),
        lambda: _spoil(stages),
        hosted.flip,
        links,
    )
    member.ready()
    every, trace = trace_every(job.train.trace), None
    if tensor_rank == 0 and every is not None:
        trace = TraceLog(log_path(run.directory, worker), run.started, member.warn, every)
    at = -1 if specification.restored is None else specification.restored
    try:
        is_finished = WorkerLoop(
            job=job,
            member=member,
            hosted=hosted,
            shards=shards,
            injector=injector,
            trace=trace,
            saver=saver,
            transport=transport,
            plans=Path(run.directory) / "plans",
            at=at,
            tensor_group=tensor_group,
        ).run()
        saver.close()
        if trace is not None:
            trace.close()
        if not is_finished:
            return
        member.progress.begins("digest")
        member.leave_digests({number: text for stage in stages.values() for number, text in stage.digests().items()})
    except RunError as error:
        end(str(error))


def _spoil(stages: Mapping[int, Stage]) -> None:
    """What a `nan` fault does."""
    for stage in stages.values():
        stage.spoil_gradients()
