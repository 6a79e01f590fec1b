"""A worker's loop over generations; every change of membership or plan goes through it.

Whenever a generation ends a worker drops its groups and brings its stages to the iteration that the register says is
committed: it rolls forward (the reduced gradient is still there) or takes a step back that it took too early. The next
generation starts from there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recycle.errors import RunError
from recycle.exec.faults.injector import FaultInjector
from recycle.exec.members import split_member
from recycle.exec.model.checksum import layout_of
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.protocol import Commit, Copied, Copy, GenerationRecord
from recycle.exec.transport.base import TransportError, Unreachable, sum_groups
from recycle.exec.transport.formation import lanes_of
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportPlugin
from recycle.exec.worker.background_copies import BackgroundCopies, BackgroundCopy
from recycle.exec.worker.evaluation import Evaluation, evaluation_schedule
from recycle.exec.worker.held_shards import HeldShards
from recycle.exec.worker.hosted import Hosted
from recycle.exec.worker.iterations import Iterations
from recycle.exec.worker.member import GenerationOver, Member
from recycle.exec.worker.plan_files import read_plan
from recycle.exec.worker.saver import Saver
from recycle.exec.worker.streams import streams_of
from recycle.exec.worker.trace_log import TraceLog
from recycle.exec.worker.updates import REHOST, Updates
from recycle.ir.check import check, require_no_errors
from recycle.ir.lower import lower
from recycle.ir.replays import Checked
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.plans.replaying import rotation_of
from recycle.plans.shard_holders import held_by, plan_of
from recycle.plans.shards import Owners, ShardHosts
from recycle.plans.unit_shards import shards_of_schedule
from recycle.shape import MicroBatch, Worker


@dataclass(kw_only=True)
class WorkerLoop:
    """One worker process.

    Args:
        job: the job.
        member: its side of membership.
        hosted: its stages.
        shards: the shards that it holds of their optimizer's state; None where that is not sharded.
        injector, trace, saver: as for its `Iterations`.
        transport: opens the groups of each generation.
        plans: folder of the run directory that plan files lie in.
        at: the iteration that the stages' states are from.
        tensor_group: that this worker's stages compute in; None without tensor parallelism.
    """

    job: Job
    member: Member
    hosted: Hosted
    shards: HeldShards | None
    injector: FaultInjector
    trace: TraceLog | None
    saver: Saver
    transport: TransportPlugin
    plans: Path
    at: int = -1
    tensor_group: TensorGroup | None = None

    def __post_init__(self) -> None:
        on_host = self.job.train.undo == "host"
        decided, hosted = self.member.decided, self.hosted
        self._updates = Updates(hosted.stages, self.at, decided, on_host, hosted, self.shards)
        self._streams = streams_of(self.transport.settings.device)
        self._undone: int | None = None  # the step that was taken back last, until a generation forms
        self._described: set[tuple[int, str]] = set()

    def run(self) -> bool:
        """Take part in generations until the last iteration is committed; False when this worker leaves before, as it
        was told to."""
        while True:
            record = self.member.next_record()
            if record is None:
                return False
            self._settle(record)
            is_over = record.commit is not None and record.commit.finished and not record.is_evaluation_due
            if is_over:
                self._place_held(record)
            if self.hosted.is_confirmed:
                self.saver.keep(record, record.commit, self._updates)
            if is_over:
                return True
            commit = self._live_through(record)
            self.saver.keep(record, commit, self._updates)
            if commit is not None and commit.finished:
                return True

    def _settle(self, record: GenerationRecord) -> None:
        """Roll forward or undo, so that every stage is at the committed iteration."""
        if self.member.worker in record.joins:
            return
        ahead = self._updates.ahead(record.committed)
        way = self._updates.way_to(record.committed, record.has_gone_back)
        self.member.progress.begins(way, warms_up=way == REHOST)  # which makes stages
        if ahead:
            self.injector.at_phase("undo", record.committed + 1)
        self._updates.settle(record.committed, record.commit, record.has_gone_back)
        self.saver.went_back(record.committed)
        if ahead:
            self._undone = record.committed + 1

    def _place_held(self, record: GenerationRecord) -> None:
        """Host what the last generation that ran has given: one that formed since may have placed other stages."""
        if self.hosted.place_held():
            self._updates.rehost(record.committed)
        if self.shards is not None:
            self.shards.place_held()

    def _live_through(self, record: GenerationRecord) -> Commit | None:
        """One generation: acknowledge, form, run. Returns the commit after which all left; None if it ended before."""
        self.injector.at_phase("acknowledge", record.committed + 1)
        self.member.progress.ended()
        self.transport.offer(generation_name(record.generation), Worker.parse(self.member.worker))
        is_stale = self.shards is not None and not self._updates.is_gathered(record.committed)
        self.member.acknowledge(self._undone == record.committed + 1, is_stale)
        if not self.member.permitted("form"):
            return None
        self._undone = None
        self.member.progress.begins("form")
        self.injector.at_phase("form", record.committed + 1)
        role = Worker.parse(record.roles[self.member.worker])
        transport: GroupTransport | None = None
        began = time.monotonic()
        try:
            schedule = read_plan(self.plans, self.member.plan, record.generation, record.plan, self.member.over)
            rotation = rotation_of(schedule, self.job, [Checked(s, MicroBatch(k, j)) for s, k, j in record.disputed])
            lowered = lower(schedule) if rotation is None else rotation.whole
            if record.disputed:
                require_no_errors(check(lowered, about_to_run=True))
            program = lowered.program(role)
            self._place(record, schedule, role)
            transport, copied = self._form(record, lowered, role)
            if self.tensor_group is not None:
                self.tensor_group.exchange = transport.exchange
            self.member.progress.ended()
            self.member.formed(copied=copied)
            if not self.member.permitted("run"):
                return None
            self.hosted.confirm()
            if self.job.integrity.compares_states:
                self._describe_states("" if self.shards is not None else record.holds)
            if self.shards is None:
                self.saver.use_hosts_of(schedule, record)
            else:
                self.shards.confirm()
                self.saver.use_hosts_of(schedule, record, self._holds)
            return Iterations(
                record=record,
                role=str(role),
                program=program,
                model_stages=schedule.shape.stages,
                stages=self.hosted.stages,
                transport=transport,
                commits=self.member,
                updates=self._updates,
                ties=schedule.ties,
                buckets=schedule.buckets,
                progress=self.member.progress,
                injector=self.injector,
                trace=self.trace,
                saver=self.saver,
                streams=self._streams,
                device=self.transport.progress,
                evaluation=self._evaluation(record, schedule, role, transport),
                compared_every=self.job.compared_every(record.rounds),
                rotation=rotation,
                messaged=transport.messaged,
                background=self._background(record, transport),
            ).run()
        except TransportError as error:
            if isinstance(error, Unreachable):
                (peer,) = (process for process, place in record.roles.items() if place == str(error.peer))
                self.member.cut_off(peer)
            elif transport is None:
                expired = time.monotonic() - began >= self.job.membership.form_timeout
                self.member.formed(str(error), expired)
            else:
                self.member.trouble(str(error))
            return None
        except GenerationOver:
            return None
        finally:
            self.member.progress.begins("leave")  # until a device is idle that is behind its host
            self.transport.end()
            if self.trace is not None:
                self.trace.end_generation()
            self.member.progress.ended()
            if self.tensor_group is not None:
                self.tensor_group.exchange = None

    def _evaluation(
        self, record: GenerationRecord, schedule: Schedule, role: Worker, transport: GroupTransport
    ) -> Evaluation | None:
        evaluated_by = evaluation_schedule(schedule, self.job)
        if evaluated_by is None:
            return None
        return Evaluation(
            job=self.job,
            program=evaluated_by.program(role),
            role=str(role),
            generation=record.generation,
            results=self.member,
            model_stages=schedule.shape.stages,
            stages=self.hosted.stages,
            transport=transport,
            progress=self.member.progress,
            injector=self.injector,
            trace=self.trace,
            device=self.transport.progress,
        )

    def _place(self, record: GenerationRecord, schedule: Schedule, role: Worker) -> None:
        """Host what the plan says. Raises RunError when a unit is neither there nor to be copied; a bug."""
        self.member.progress.begins("place")
        if self.hosted.place(schedule.shape.cut, schedule.stages_of(role)):
            self._updates.rehost(record.committed)
        copied = {
            unit for copy in record.copies if copy.worker == self.member.worker for unit in range(copy.first, copy.last)
        }
        if self.shards is not None:
            self._hold(record, schedule)
            mine = self._holds.stages[Worker.parse(self.member.worker)]
            behind = {
                n for copy in record.behind if copy.worker == self.member.worker for n in range(copy.first, copy.last)
            }
            if self.shards.place(self._holds.shards, mine, copied, behind):
                self._updates.reshard()
            self.member.progress.begins("form")
            return
        if lacking := self.hosted.missing() - copied:
            raise RunError(f"nobody gives worker {self.member.worker} unit {min(lacking)} of the model")
        self.member.progress.begins("form")

    def _form(self, record: GenerationRecord, schedule: Schedule, role: Worker) -> tuple[GroupTransport, list[Copied]]:
        """The generation's groups, and what was copied over them."""
        processes = {Worker.parse(place): Worker.parse(process) for process, place in record.roles.items()}
        roles = {process: Worker.parse(place) for process, place in record.roles.items()}
        stage = next(iter(self.hosted.stages.values()), None)
        owners, givers = self._owners(record, roles)
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
        held: Hosted | HeldShards = self.hosted if self.shards is None else self.shards
        transport = self.transport.open(groups)
        copied: list[Copied] = []
        for copy in record.copies:
            if self.member.worker not in (copy.source, copy.worker):
                continue
            self.injector.at_phase("copy", record.committed + 1)
            if self.member.worker == copy.source:
                transport.send_state(roles[copy.worker], held.held(copy.first, copy.last))
                continue
            tensors, began = held.placed(copy.first, copy.last), time.monotonic()
            transport.receive_state(roles[copy.source], tensors)
            transport.settle()  # else its state might still be under way when others count on it
            seconds, size = time.monotonic() - began, sum(tensor.nbytes for tensor in tensors)
            copied.append(Copied(copy.source, copy.first, copy.last, size, round(seconds, 6)))
        if self.member.worker in record.joins:
            self._updates.joined(record.committed)
        if self.shards is not None:
            self._gather(transport, record)
            for index in self.hosted.stages:
                self._updates.gathered(index, record.committed)
        return transport, copied

    def _gather(self, transport: GroupTransport, record: GenerationRecord) -> None:
        """Have everybody's live parameters be those of the committed iteration, unless they are with all. Where layers
        move, stages are built anew without them."""
        assert self.shards is not None
        if self.member.is_stale_anywhere() or plan_of(record.held) != plan_of(record.holds):
            self.shards.publish()
            for index, stage in sorted(self.hosted.stages.items()):
                assert stage.shards is not None
                transport.gather(index, stage.shards.weights())

    def _hold(self, record: GenerationRecord, schedule: Schedule) -> None:
        """Note the shards that workers hold when the generation begins to run."""
        roles = {Worker.parse(process): Worker.parse(role) for process, role in record.roles.items()}
        shards = shards_of_schedule(self.job, schedule, roles)
        self._holds: ShardHosts = held_by(shards, list(self.job.shape.workers()), record.holds)

    def _owners(
        self, record: GenerationRecord, roles: Mapping[str, Worker]
    ) -> tuple[dict[int, Owners], dict[int, Owners]]:
        """Stage -> of each of its shards, the roles of its owners; and of those that hold it from the beginning."""
        if self.shards is None:
            return {}, {}
        of, live = self._holds.shards, [Worker.parse(name) for name in record.live]
        holders = of.in_order(live, self._holds)
        comes_to: dict[int, list[Worker]] = {}
        for copy in record.behind:
            for number in range(copy.first, copy.last):
                comes_to.setdefault(number, []).append(Worker.parse(copy.worker))

        def as_roles(every: Mapping[int, Owners]) -> dict[int, Owners]:
            return {
                stage: tuple(tuple(roles[str(owner)] for owner in mine) for mine in of_stage)
                for stage, of_stage in every.items()
            }

        owners = {
            stage: tuple(
                (*mine, *comes_to.get(number, ())) for number, mine in zip(of.numbers(stage), of_stage, strict=True)
            )
            for stage, of_stage in holders.items()
        }
        return as_roles(owners), as_roles(holders)

    def _background(self, record: GenerationRecord, transport: GroupTransport) -> BackgroundCopies | None:
        """What this worker copies, or has copied from it, while the generation runs."""
        mine = [copy for copy in record.behind if self.member.worker in (copy.source, copy.worker)]
        if self.shards is None or not mine:
            return None
        shards, copies = self.shards, list[BackgroundCopy]()
        pairs: dict[tuple[str, str], list[Copy]] = {}
        for copy in mine:
            pairs.setdefault((copy.source, copy.worker), []).append(copy)
        for (source, worker), of_pair in pairs.items():
            sends = source == self.member.worker
            peer = Worker.parse(record.roles[worker if sends else source])
            parts = [
                (
                    (one.first, one.last),
                    [part for number in range(one.first, one.last) for part in shards.apart(number)],
                )
                for one in of_pair
            ]
            copies.append(BackgroundCopy(peer, sends, parts, source, self.job.train.copy_bytes))

        def come(complete: Sequence[Copied], copied: list[Copied]) -> None:
            for one in complete:
                shards.complete(range(one.first, one.last))
            self.member.has_copied(copied)

        return BackgroundCopies(copies, transport, come)

    def _describe_states(self, holds: str) -> None:
        """Say once where the tensors of what hosts compare lie, for events that name one.

        Args:
            holds: hash of the plan whose stages these are; empty for those that processes start with, and for shards,
                which are the same in all plans.
        """
        _, rank = split_member(self.member.name)
        for stage in self.hosted.stages.values():
            for number, part in stage.compared().items():
                if (number, holds) not in self._described:
                    self._described.add((number, holds))
                    layout = layout_of(part.tensors, part.named(part.tensors))
                    tensors = [(one.name, one.first, one.elements, one.size) for one in layout]
                    self.member.describe_state(number, rank, holds, tensors)

    def _waits(self, whether: bool) -> None:
        self.member.progress.set_waiting(whether)
        self._updates.waits(whether)


def generation_name(generation: int) -> str:
    """What the names of a generation's groups begin with; sorted as the generations are."""
    return f"generation{generation:08d}"
