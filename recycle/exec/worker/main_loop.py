"""A worker's loop over generations; every change of membership or plan goes through it.

When a generation ends, a worker drops its groups and brings its stages to the committed iteration. It rolls forward
with the reduced gradient, or undoes a step taken ahead. The next generation starts from there.

Workers read the plan of a generation from a file of the run directory, named by the hash in the record. Plans of large
jobs have megabytes, so a file system serves them better than messages. If the disk is full, the proposal carries the
plan's text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recycle.errors import RecycleError, RunError
from recycle.exec.device import streams_of
from recycle.exec.hooks.evaluation import evaluation_schedule
from recycle.exec.hooks.hook import Generation, IterationHook
from recycle.exec.hooks.phases import Phase
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.protocol import Acknowledged, Commit, Copied, CutOff, Formed, GenerationRecord, Trouble
from recycle.exec.transport.base import TransportError, Unreachable, sum_groups
from recycle.exec.transport.formation import lanes_of
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportPlugin
from recycle.exec.worker.hosted import Hosted
from recycle.exec.worker.iterations import Iterations
from recycle.exec.worker.member import GenerationOver, Member
from recycle.exec.worker.updates import REHOST, Updates
from recycle.ir.check import check, require_no_errors
from recycle.ir.replays import Checked
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.job.shape import MicroBatch, Worker
from recycle.plans import schedule_hash
from recycle.plans.plan import programs_of
from recycle.runs.logs import plan_file

PATIENCE_SECONDS = 60.0
"""Time limit for reading a plan; a shared file system may show a new file late."""
PAUSE_SECONDS = 0.1


def read_plan(
    folder: Path,
    text: str,
    generation: int,
    digest: str,
    over: threading.Event,
    patience: float = PATIENCE_SECONDS,
) -> Schedule:
    """Read the plan of a generation, from `text` if the proposal carries it.

    Raises GenerationOver if the generation ended meanwhile, and RunError if the plan is missing, or its hash differs.
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


@dataclass(kw_only=True)
class MainLoop:
    """The main loop of one worker process."""

    job: Job
    member: Member
    hosted: Hosted
    updates: Updates
    hooks: Sequence[IterationHook]
    transport: TransportPlugin
    plans: Path
    tensor_group: TensorGroup | None = None

    def __post_init__(self) -> None:
        self._streams = streams_of(self.transport.settings.device)
        self._undone: int | None = None  # the step undone last, until a generation forms

    def run(self) -> bool:
        """Take part in generations until the last commit. Returns False if the worker leaves before, on request."""
        while (record := self.member.next_record()) is not None:
            self._settle(record)
            is_over = record.commit is not None and record.commit.finished and not record.is_evaluation_due
            if is_over and self.hosted.place_held():  # a generation that formed since may have placed other stages
                self.updates.rehost(record.committed)
            if self.hosted.is_confirmed:
                self._keep(record, record.commit)
            if is_over:
                return True
            commit = self._live_through(record)
            self._keep(record, commit)
            if commit is not None and commit.finished:
                return True
        return False

    def _keep(self, record: GenerationRecord, commit: Commit | None) -> None:
        for hook in self.hooks:
            hook.keep(record, commit)

    def _reach(self, phase: Phase, record: GenerationRecord) -> None:
        for hook in self.hooks:
            hook.reach(phase, record.committed + 1)

    def _settle(self, record: GenerationRecord) -> None:
        if self.member.worker in record.joins:
            return
        ahead = self.updates.ahead(record.committed)
        way = self.updates.way_to(record.committed, record.has_gone_back)
        self.member.progress.begins(way, warms_up=way == REHOST)  # rehosting builds stages
        if ahead:
            self._reach("undo", record)
        self.updates.settle(record.committed, record.commit, record.has_gone_back)
        for hook in self.hooks:
            hook.go_back(record.committed)
        if ahead:
            self._undone = record.committed + 1

    def _live_through(self, record: GenerationRecord) -> Commit | None:
        self._reach("acknowledge", record)
        self.member.progress.ended()
        self.transport.offer(generation_name(record.generation), Worker.parse(self.member.worker))
        took_back = self._undone == record.committed + 1
        self.member.say(Acknowledged(took_back, self.updates.is_stale(record.committed)))
        if not self.member.permitted("form"):
            return None
        self._undone = None
        self.member.progress.begins("form")
        self._reach("form", record)
        role = Worker.parse(record.roles[self.member.worker])
        transport: GroupTransport | None = None
        began = time.monotonic()
        try:
            schedule = read_plan(self.plans, self.member.plan, record.generation, record.plan, self.member.over)
            disputed = [Checked(stage, MicroBatch(k, j)) for stage, k, j in record.disputed]
            rotation = programs_of(schedule, self.job, disputed)
            if disputed:
                require_no_errors(check(rotation.whole, about_to_run=True))
            self._place(record, schedule, role)
            transport, copied = self._form(record, rotation.whole, role)
            if self.tensor_group is not None:
                self.tensor_group.exchange = transport.exchange
            self.member.progress.ended()
            self.member.say(Formed(copied=copied))
            if not self.member.permitted("run"):
                return None
            self.hosted.confirm()
            return Iterations(
                generation=Generation(
                    record=record,
                    role=role,
                    schedule=schedule,
                    rotation=rotation,
                    transport=transport,
                    commits=self.member,
                    evaluated_by=evaluation_schedule(schedule, self.job),
                    hosts=self.hosted.hosts(record, schedule),
                ),
                stages=self.hosted.stages,
                updates=self.updates,
                hooks=self.hooks,
                progress=self.member.progress,
                streams=self._streams,
                device=self.transport.progress,
            ).run()
        except TransportError as error:
            if isinstance(error, Unreachable):
                (peer,) = (process for process, place in record.roles.items() if place == str(error.peer))
                self.member.say(CutOff(peer))
            elif transport is None:
                expired = time.monotonic() - began >= self.job.membership.form_timeout
                self.member.say(Formed(str(error), expired))
            else:
                self.member.say(Trouble(f"worker {self.member.name}: {error}"))
            return None
        except GenerationOver:
            return None
        finally:
            self.member.progress.begins("leave")  # until the device is idle
            self.transport.end()
            for hook in self.hooks:
                hook.end_generation()
            self.member.progress.ended()
            if self.tensor_group is not None:
                self.tensor_group.exchange = None

    def _place(self, record: GenerationRecord, schedule: Schedule, role: Worker) -> None:
        self.member.progress.begins("place")
        if self.hosted.place(schedule.shape.cut, schedule.stages_of(role)):
            self.updates.rehost(record.committed)
        if self.hosted.take(record, schedule):
            self.updates.reshard()
        self.member.progress.begins("form")

    def _form(self, record: GenerationRecord, schedule: Schedule, role: Worker) -> tuple[GroupTransport, list[Copied]]:
        processes = {Worker.parse(place): Worker.parse(process) for process, place in record.roles.items()}
        roles = {process: Worker.parse(place) for process, place in record.roles.items()}
        stage = next(iter(self.hosted.stages.values()), None)
        owners, givers = self.hosted.owners(record)
        groups = GroupsOfGeneration(
            generation_name(record.generation),
            role,
            sorted(processes),
            sum_groups(schedule),
            ((0,), torch.float32) if stage is None else stage.message_spec(),
            {
                *lanes_of(schedule),
                *((roles[copy.source], roles[copy.worker]) for copy in (*record.copies, *record.behind)),
            },
            processes,
            self.member.over,
            self._waits,
            owners,
            self.member.warn,
            givers,
        )
        transport = self.transport.open(groups)
        copied: list[Copied] = []
        for copy in record.copies:
            if self.member.worker not in (copy.source, copy.worker):
                continue
            self._reach("copy", record)
            if self.member.worker == copy.source:
                transport.send_state(roles[copy.worker], self.hosted.held(copy.first, copy.last))
                continue
            tensors, began = self.hosted.placed(copy.first, copy.last), time.monotonic()
            transport.receive_state(roles[copy.source], tensors)
            transport.settle()  # other workers rely on the copy once it is reported
            seconds, size = time.monotonic() - began, sum(tensor.nbytes for tensor in tensors)
            copied.append(Copied(copy.source, copy.first, copy.last, size, round(seconds, 6)))
        if self.member.worker in record.joins:
            self.updates.joined(record.committed)
        if self.hosted.gather(transport, record, self.member.is_stale_anywhere()):
            self.updates.all_gathered(record.committed)
        return transport, copied

    def _waits(self, whether: bool) -> None:
        self.member.progress.set_waiting(whether)
        self.updates.waits(whether)


def generation_name(generation: int) -> str:
    """Prefix of the names of a generation's groups; sorts in the order of generations."""
    return f"generation{generation:08d}"
