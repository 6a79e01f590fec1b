"""A worker process, forked by the fork server: one per live worker and tensor rank.

After the first SIGTERM it leaves at the next boundary; a second ends the process. The signal is blocked in all threads
except one that waits for it, so it interrupts no transfer. The process ends with its agent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from recycle.errors import RecycleError, RunError, first_line
from recycle.exec.checkpoint.checkpoint import folder_of, load
from recycle.exec.device import DeviceState, copy_stream_of
from recycle.exec.faults.injector import EXCHANGE_SECONDS, FaultInjector, start_injector
from recycle.exec.gpus import own_index, stay_near
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


class Participant:
    """A process of a run, before it has stages. Heartbeats start with it, because building stages may take long.

    Args:
        device_state: state for heartbeats; None for the transport's.

    Attributes:
        job: without weights if the state comes from a peer, or from a checkpoint of the run.
        transport: before its first generation.
    """

    def __init__(self, text: str, device_state: Callable[[], DeviceState] | None = None) -> None:
        self.specification = specification = msgspec.json.decode(text, type=WorkerSpecification)
        run = specification.run
        os.environ.update(run.environment)  # before the first call of CUDA, which reads it
        _block_termination()
        # A collection in a child, such as a data loader, would destroy groups whose threads only this process has.
        os.register_at_fork(after_in_child=gc.freeze)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        job, self.worker = Job.from_toml(run.job), Worker.parse(specification.worker)
        self.tensor_rank, self.tensor_parallel = specification.tensor_rank, job.grid.tensor_parallel
        self.name = member_name(self.worker, self.tensor_rank)
        self.is_first = not specification.generation or specification.restored is not None
        if specification.generation or specification.restored is not None:
            job = job.without_weights()
        self.job = job
        plugin = transport_named(run.transport) if run.transport else transport_of(job)
        self._links, self._keys = PacedLinks.for_job(job, self.worker), FormingKeys(run.agent)
        tensor = self.tensor_rank, self.tensor_parallel
        device = plugin.device(own_index(run.gpus, plugin.gpus(), specification.local_index))
        stay_near(run.gpus, specification.local_index)
        self.transport = plugin(TransportSettings(self._keys, device, run.address, tensor, job.membership, self._links))
        self.member = Member(
            run.agent,
            self.name,
            specification.incarnation,
            job.membership.heartbeat,
            self.transport.wake,
            self.end,
            specification.generation,
            device_state or self.transport.device_state,
        )
        leave = partial(self.member.send, Leaving(specification.incarnation))
        threading.Thread(target=_await_termination, args=(leave, self.end), daemon=True).start()

    def end(self, reason: str, code: int = 3) -> NoReturn:
        print(f"worker {self.name} ends: {reason}", file=sys.stderr, flush=True)
        os._exit(code)

    def step_state(self, hosted: LocalStages, at: int | None = None) -> StepState:
        """`at` is the iteration of the state that the user's script has loaded, -1 for none; None without a script."""
        restored = self.specification.restored
        at = (-1 if restored is None else restored) if at is None else at
        stream = copy_stream_of(self.transport.settings.device)
        return StepState(hosted.stages, at, self.member.known_commit, self.job.train.undo == "host", hosted, stream)

    def injector(self, hosted: LocalStages) -> FaultInjector:
        return start_injector(
            self.specification.run.faults,
            self.tensor_parallel,
            self.member,
            lambda: FormingStore(self._keys, self.member.over, EXCHANGE_SECONDS),
            lambda: _spoil(hosted.stages),
            hosted.flip,
            self._links,
        )

    def trace(self) -> list[IterationHook]:
        run, every = self.specification.run, trace_every(self.job.train.trace)
        if self.tensor_rank or every is None:
            return []
        path, set_waiting = log_path(run.directory, self.worker), self.member.progress.set_waiting
        return [TraceLog(path, run.started, self.member.warn, every, set_waiting=set_waiting)]

    def main_loop(
        self,
        hosted: LocalStages,
        updates: StepState,
        hooks: Sequence[IterationHook],
        tensor_group: TensorGroup | None = None,
        at: int = -1,
        schedule: str = "",
    ) -> MainLoop:
        """Return the loop over generations, and tell the leader that this process is ready (`Ready`)."""
        self.member.send(Ready(self.specification.incarnation, at, schedule))
        return MainLoop(
            job=self.job,
            member=self.member,
            hosted=hosted,
            updates=updates,
            hooks=hooks,
            transport=self.transport,
            plans=Path(self.specification.run.directory) / "plans",
            tensor_group=tensor_group,
        )

    def final_state(self, hosted: LocalStages) -> FinalState:
        """The last message of a process: the digests of its states."""
        self.member.progress.begin_operation("digest")
        digests = {number: text for stage in hosted.stages.values() for number, text in stage.digests().items()}
        return FinalState(digests)


def run_worker(text: str) -> None:
    """Run one worker, from its JSON specification, to the end of its run; its process should end at once."""
    process = Participant(text)
    specification, job, worker, member = process.specification, process.job, process.worker, process.member
    torch.set_num_threads(job.train.threads)
    run, checkpoints = specification.run, Path(specification.run.directory) / "checkpoints"
    tensor_rank, tensor_parallel = process.tensor_rank, process.tensor_parallel
    tensor_group = TensorGroup(tensor_rank, tensor_parallel) if tensor_parallel > 1 else None
    transport = process.transport
    try:
        build = partial(build_stages, job, device=transport.settings.device, tensor_group=tensor_group)
        default_stages = list(job.shape.stages_of_rank(worker.rank))
        indices = run.stages.get(specification.worker, [] if run.stages else default_stages)
        hosted: LocalStages
        if job.train.sharded_optimizer:
            hosted = LocalShards(job, worker, build, run.cut, indices, process.is_first)
        else:
            hosted = LocalStages(worker, build, run.cut, indices, process.is_first)
    except (RuntimeError, MemoryError, OverflowError) as error:  # torch raises these if memory runs out
        process.end(f"its stages cannot be built: {first_line(error)}")
    except RecycleError as error:
        process.end(str(error), REFUSED)
    stages = hosted.stages
    if specification.restored is not None:
        folder = folder_of(checkpoints, specification.restored)
        hosted.read(partial(load, folder, tensor_rank=tensor_rank, tensor_parallel=tensor_parallel))
    updates = process.step_state(hosted)
    faults = process.injector(hosted)
    hooks: list[IterationHook] = [faults] if run.faults else []
    if isinstance(hosted, LocalShards):
        hooks.append(BackgroundCopies(member.worker, hosted, member.send, faults.reach, job.train.copy_bytes))
    if job.integrity.compares_states:
        hooks.append(StateComparison(job, stages, updates, member.send, tensor_rank))
    deadline, set_waiting = job.train.checkpoint_deadline, member.progress.set_waiting
    saver = Saver(
        checkpoints,
        process.name,
        stages,
        updates.all_at,
        member.send,
        tensor_parallel,
        deadline,
        set_waiting,
        reserves=job.train.checkpoint_every > 0,
    )
    hooks += [saver, *process.trace()]
    if job.evaluation.every:
        evaluation = Evaluation(
            job=job,
            stages=stages,
            hooks=list(hooks),
            progress=member.progress,
            device=transport.progress,
        )
        hooks.append(evaluation)
    try:
        if process.main_loop(hosted, updates, hooks, tensor_group).run():
            member.send(process.final_state(hosted))
    except RunError as error:
        process.end(str(error))


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
