"""A worker process, forked by the fork server: one per live worker and tensor rank.

After the first SIGTERM it leaves at the next boundary; a second ends the process. The signal is blocked in all threads
except one that waits for it, so it interrupts no transfer. The process ends with its agent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from recycle.errors import RecycleError, RunError, first_line
from recycle.exec.checkpoint.checkpoint import folder_of, load
from recycle.exec.faults.injector import EXCHANGE_SECONDS, start_injector
from recycle.exec.hooks.background_copies import BackgroundCopies
from recycle.exec.hooks.evaluation import Evaluation
from recycle.exec.hooks.hook import IterationHook
from recycle.exec.hooks.integrity import StateComparison
from recycle.exec.hooks.saver import Saver
from recycle.exec.hooks.trace import TraceLog, trace_every
from recycle.exec.members import member_name
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.protocol import Commit, FinalState, GenerationRecord, Leaving, Ready, Report
from recycle.exec.transport.formation import FormingStore
from recycle.exec.transport.outgoing import PacedLinks
from recycle.exec.transport.plugin import TRANSPORTS, TransportSettings, transport_named, transport_of
from recycle.exec.worker.local_stages import LocalShards, LocalStages
from recycle.exec.worker.main_loop import MainLoop
from recycle.exec.worker.member import FormingKeys, Member
from recycle.exec.worker.specification import REFUSED, WorkerSpecification
from recycle.exec.worker.step_state import StepState
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import lower, with_barrier
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.job.shape import Worker
from recycle.runs.logs import log_path

_LEAVE_SIGNALS = {signal.SIGTERM}
ENDED = 128 + signal.SIGTERM
"""Exit code of a process after a second SIGTERM."""


def run_worker(text: str) -> None:
    """Run one worker, from its JSON specification, to the end of its run; its process should end at once."""
    specification = msgspec.json.decode(text, type=WorkerSpecification)
    os.environ.update(specification.run.environment)  # before the first call of CUDA, which reads it
    _block_termination()
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
    links = PacedLinks.for_job(job, worker)
    keys = FormingKeys(run.agent)
    tensor = tensor_rank, tensor_parallel
    transport = plugin(TransportSettings(keys, device, run.address, tensor, job.membership, links))

    def end(reason: str, code: int = 3) -> NoReturn:
        print(f"worker {name} ends: {reason}", file=sys.stderr, flush=True)
        os._exit(code)

    # Heartbeats start here, because building stages and reading a checkpoint may take long.
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
    leave = partial(member.send, Leaving(specification.incarnation))
    threading.Thread(target=_await_termination, args=(leave, end), daemon=True).start()
    try:
        build = partial(build_stages, job, device=device, tensor_group=tensor_group)
        default_stages = list(range(worker.rank, job.shape.stages, job.shape.ranks))
        indices = run.stages.get(specification.worker, [] if run.stages else default_stages)
        is_first = not specification.generation or specification.restored is not None
        hosted: LocalStages
        if job.train.sharded_optimizer:
            hosted = LocalShards(job, worker, build, run.cut, indices, is_first)
        else:
            hosted = LocalStages(worker, build, run.cut, indices, is_first)
    except (RuntimeError, MemoryError, OverflowError) as error:  # torch raises these if memory runs out
        end(f"its stages cannot be built: {first_line(error)}")
    except RecycleError as error:
        end(str(error), REFUSED)
    stages = hosted.stages
    if specification.restored is not None:
        folder = folder_of(checkpoints, specification.restored)
        hosted.read(partial(load, folder, tensor_rank=tensor_rank, tensor_parallel=tensor_parallel))
    at = -1 if specification.restored is None else specification.restored
    updates = StepState(stages, at, member.known_commit, job.train.undo == "host", hosted)
    faults = start_injector(
        run.faults,
        tensor_parallel,
        member,
        FormingStore(keys, member.over, EXCHANGE_SECONDS),
        lambda: _spoil(stages),
        hosted.flip,
        links,
    )
    hooks: list[IterationHook] = [faults] if run.faults else []
    if isinstance(hosted, LocalShards):
        hooks.append(BackgroundCopies(member.worker, hosted, member.send, faults.reach, job.train.copy_bytes))
    if job.integrity.compares_states:
        hooks.append(StateComparison(job, stages, updates, member.send, tensor_rank))
    deadline, set_waiting = job.train.checkpoint_deadline, member.progress.set_waiting
    hooks.append(Saver(checkpoints, name, stages, updates.all_at, member.send, tensor_parallel, deadline, set_waiting))
    every = trace_every(job.train.trace)
    if tensor_rank == 0 and every is not None:
        hooks.append(TraceLog(log_path(run.directory, worker), run.started, member.warn, every))
    if job.evaluation.every:
        evaluation = Evaluation(
            job=job,
            stages=stages,
            hooks=list(hooks),
            progress=member.progress,
            device=transport.progress,
        )
        hooks.append(evaluation)
    member.send(Ready(specification.incarnation))
    try:
        is_finished = MainLoop(
            job=job,
            member=member,
            hosted=hosted,
            updates=updates,
            hooks=hooks,
            transport=transport,
            plans=Path(run.directory) / "plans",
            tensor_group=tensor_group,
        ).run()
        for hook in hooks:
            hook.close()
        if not is_finished:
            return
        member.progress.begin_operation("digest")
        digests = {number: text for stage in stages.values() for number, text in stage.digests().items()}
        member.send(FinalState(digests))
    except RunError as error:
        end(str(error))


def _block_termination() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEAVE_SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEAVE_SIGNALS))


def _await_termination(notify: Callable[[], None], end: Callable[[str, int], object]) -> None:
    signal.sigwait(_LEAVE_SIGNALS)
    with contextlib.suppress(RunError):  # the agent is gone, and the process ends by itself
        notify()
    signal.sigwait(_LEAVE_SIGNALS)
    end("it received a second SIGTERM", ENDED)


def _spoil(stages: Mapping[int, Stage]) -> None:
    for stage in stages.values():
        stage.spoil_gradients()


_SMALLEST = "[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n"


def warm_up() -> None:
    """Import transports, and create the decoders of messages, jobs and plans; starts no thread."""
    for transport in TRANSPORTS:
        transport_named(transport)
    for message in (WorkerSpecification, GenerationRecord, Commit, Report):
        msgspec.json.Decoder(message)
    schedule = one_f_one_b(Job.from_toml(_SMALLEST).shape)
    lower(Schedule.loads(with_barrier(schedule).dumps()))
    lower(schedule)
