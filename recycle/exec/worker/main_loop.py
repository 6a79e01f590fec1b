"""A worker's loop over generations; every change of membership or plan goes through it.

When a generation ends, a worker drops its groups and brings its stages to the committed iteration: it rolls forward
with the reduced gradient, or undoes a step taken ahead. The plan of a generation is a file of the run directory, named
by the hash in the record. If the disk is full, the proposal carries the plan's text.
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
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportPlugin
from recycle.exec.worker.iterations import Iterations, Pause, Pauses, without_pauses
from recycle.exec.worker.local_stages import LocalStages
from recycle.exec.worker.member import GenerationOver, Member
from recycle.exec.worker.step_state import REHOST, StepState
from recycle.ir.check import check, require_no_errors
from recycle.ir.communicators import lanes_of
from recycle.ir.replays import Checked
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.job.shape import MicroBatch, Worker
from recycle.plans import schedule_hash
from recycle.plans.plan import programs_of
from recycle.runs.logs import plan_file

PLAN_SECONDS = 60.0
"""Time limit for reading a plan; a shared file system may show a new file late."""
PLAN_POLL_SECONDS = 0.1


def read_plan(
    folder: Path,
    text: str,
    generation: int,
    digest: str,
    over: threading.Event,
    seconds: float = PLAN_SECONDS,
) -> Schedule:
    """Read the plan of a generation, from `text` if the proposal carries it.

    Raises GenerationOver if the generation ended meanwhile, and RunError if the plan is missing, or its hash differs.
    """
    path, deadline = plan_file(folder, digest), time.monotonic() + seconds
    while True:
        try:
            schedule = Schedule.loads(text, f"plan {digest}") if text else Schedule.load(path)
            if schedule_hash(schedule) == digest:
                return schedule
            why = f"{path}: its schedule has another hash"
        except RecycleError as error:
            why = str(error)
        if over.wait(PLAN_POLL_SECONDS):
            raise GenerationOver
        if time.monotonic() > deadline:
            raise RunError(f"the plan of generation {generation} could not be read within {seconds:g} s: {why}")


@dataclass(kw_only=True)
class MainLoop:
    job: Job
    member: Member
    hosted: LocalStages
    updates: StepState
    hooks: Sequence[IterationHook]
    transport: TransportPlugin
    plans: Path
    tensor_group: TensorGroup | None = None

    def __post_init__(self) -> None:
        self._streams = streams_of(self.transport.settings.device)
        self._undone: int | None = None  # the step undone last, until a generation forms
        self._ran = 0  # the last generation that ran here

    def run(self) -> bool:
        return without_pauses(self.pauses())

    def pauses(self) -> Pauses[bool]:
        """Take part in generations until the last commit. Returns False if the worker leaves before, on request."""
        is_finished = yield from self._take_part()
        for hook in self.hooks:
            hook.close()
        return is_finished

    def _take_part(self) -> Pauses[bool]:
        before: GenerationRecord | None = None
        while (record := self.member.next_record()) is not None:
            if before is not None and self._ran < before.generation == record.ran:
                self._confirm(before)  # this process has missed the permission to run
            earlier = record.earlier  # if this process has missed it, the stages are still in its state
            if before is not None and earlier is not None and self.updates.all_at(earlier.step):
                self._save(before, earlier)
            has_stepped = self._roll_to_committed(record)
            is_over = record.commit is not None and record.commit.finished and not record.is_evaluation_due
            # A generation that formed since may have placed other stages.
            if is_over and self.hosted.restore_confirmed():
                self.updates.mark_rehosted(record.committed)
            if self.hosted.is_confirmed:
                self._save(record, record.commit)
            if has_stepped:
                yield Pause(record.committed, "stepped")
            if is_over:
                return True
            commit, before = (yield from self._run_generation(record)), record
            self._save(record, commit)
            if commit is not None and commit.finished:
                return True
        return False

    def _confirm(self, record: GenerationRecord) -> None:
        self.hosted.confirm()
        self._ran = record.generation

    def _save(self, record: GenerationRecord, commit: Commit | None) -> None:
        for hook in self.hooks:
            hook.save(record, commit)

    def _reach(self, phase: Phase, record: GenerationRecord) -> None:
        for hook in self.hooks:
            hook.reach(phase, record.committed + 1)

    def _roll_to_committed(self, record: GenerationRecord) -> bool:
        """Return whether the worker made the committed step here."""
        if self.member.worker in record.joins:
            return False
        ahead = self.updates.stages_ahead(record.committed)
        transition = self.updates.planned_transition(record.committed, record.has_gone_back)
        self.member.progress.begin_operation(transition, warms_up=transition == REHOST)  # rehosting builds stages
        if ahead:
            self._reach("undo", record)
        self.updates.roll_to(record.committed, record.commit, record.has_gone_back)
        for hook in self.hooks:
            hook.rolled_back(record.committed)
        if ahead:
            self._undone = record.committed + 1
        return transition == "roll-forward"

    def _run_generation(self, record: GenerationRecord) -> Pauses[Commit | None]:
        self._reach("acknowledge", record)
        self.member.progress.end_operation()
        self.transport.offer(generation_name(record.generation), Worker.parse(self.member.worker))
        undone = self._undone == record.committed + 1
        self.member.send(Acknowledged(undone, self.updates.is_stale(record.committed)))
        if not self.member.permitted("form"):
            return None
        self._undone = None
        self.member.progress.begin_operation("form")
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
            self.member.progress.end_operation()
            self.member.send(Formed(copied=copied))
            if not self.member.permitted("run"):
                return None
            self._confirm(record)
            iterations = Iterations(
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
            )
            return (yield from iterations.pauses())
        except TransportError as error:
            if isinstance(error, Unreachable):
                (peer,) = (process for process, place in record.roles.items() if place == str(error.peer))
                self.member.send(CutOff(peer))
            elif transport is None:
                expired = time.monotonic() - began >= self.job.membership.form_timeout
                self.member.send(Formed(str(error), expired))
            else:
                self.member.send(Trouble(f"worker {self.member.name}: {error}"))
            return None
        except GenerationOver:
            return None
        finally:
            self.member.progress.begin_operation("leave")  # until the device is idle
            self.transport.end()
            for hook in self.hooks:
                hook.end_generation()
            self.member.progress.end_operation()
            if self.tensor_group is not None:
                self.tensor_group.exchange = None

    def _place(self, record: GenerationRecord, schedule: Schedule, role: Worker) -> None:
        self.member.progress.begin_operation("place")
        if self.hosted.place(schedule.shape.cut, schedule.stages_of(role)):
            self.updates.mark_rehosted(record.committed)
        if self.hosted.assign(record, schedule):
            self.updates.mark_resharded()
        self.member.progress.begin_operation("form")

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
            lanes_of(schedule),
            processes,
            self.member.over,
            self._set_waiting,
            owners,
            self.member.warn,
            givers,
            [(roles[copy.source], roles[copy.worker]) for copy in (*record.copies, *record.behind)],
        )
        transport = self.transport.open(groups)
        copied: list[Copied] = []
        for copy in record.copies:
            if self.member.worker not in (copy.source, copy.worker):
                continue
            self._reach("copy", record)
            if self.member.worker == copy.source:
                self.hosted.send(transport, roles[copy.worker], copy)
                continue
            began = time.monotonic()
            size = self.hosted.receive(transport, roles[copy.source], copy)
            transport.settle()  # other workers rely on the copy once it is reported
            seconds = time.monotonic() - began
            copied.append(Copied(copy.source, copy.first, copy.last, size, round(seconds, 6)))
        if self.member.worker in record.joins:
            self.updates.mark_copied(record.committed)
        if self.hosted.gather(transport, record, self.member.is_stale_anywhere()):
            self.updates.mark_all_gathered(record.committed)
        return transport, copied

    def _set_waiting(self, waiting: bool) -> None:
        self.member.progress.set_waiting(waiting)
        self.updates.set_waiting(waiting)


def generation_name(generation: int) -> str:
    """Prefix of the names of a generation's groups; sorts in the order of generations."""
    return f"generation{generation:08d}"
