"""A worker's life: a loop over generations. Every change, whatever its cause, goes through here.

A worker is always at a committed iteration or inside the next one. Whenever a generation ends it drops its groups,
rolls forward if the register says that the iteration it was in is committed (its reduced gradient is still there),
and otherwise starts that iteration again from the committed state, in the next generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from recycle.errors import RunError
from recycle.exec.faults import Striker
from recycle.exec.gloo import GlooTransport
from recycle.exec.interpreter import Interpreter, Timed
from recycle.exec.membership import Facts, GenerationOver, Member, Progress, Record, Report
from recycle.exec.stage import Stage
from recycle.exec.transport import TransportError
from recycle.ir.formats import native
from recycle.ir.instruction import Instruction
from recycle.ir.lower import with_barrier
from recycle.ir.schedule import Schedule
from recycle.ir.trace import append_iteration
from recycle.job import Job
from recycle.shape import Worker


class Follower:
    """Tells the heartbeat and the faults where the worker is in its program."""

    def __init__(self, progress: Progress, striker: Striker) -> None:
        self._progress, self._striker = progress, striker

    def at(self, position: int, instruction: Instruction) -> None:
        self._progress.set_waiting(False)
        self._striker.at(position)


class TraceLog:
    """This process's log of executed instructions; times count from the start of the run."""

    def __init__(self, path: Path, started: float) -> None:
        self._path, self._started = path, started

    def append(self, iteration: int, generation: int, role: str, timed: list[Timed]) -> None:
        rows = [(text, start - self._started, end - self._started) for text, start, end in timed]
        append_iteration(self._path, iteration, generation, role, rows)


class WorkerLoop:
    """One worker process.

    Args:
        job: the job.
        member: its side of membership.
        stages: the stages it hosts.
        striker: faults that strike here.
        trace: log that its executed instructions go to.
        shut: shuts the sockets of whatever transport stands.
    """

    def __init__(
        self,
        job: Job,
        member: Member,
        stages: Mapping[int, Stage],
        striker: Striker,
        trace: TraceLog,
        shut: Callable[[], object],
    ) -> None:
        self.job, self.member, self.stages = job, member, stages
        self.striker, self.trace, self.shut = striker, trace, shut
        self._stepped = dict.fromkeys(stages, -1)
        self._reduced = -1

    def run(self) -> None:
        """Take part in generations until the last iteration is committed."""
        while True:
            record = self.member.next_record()
            self._catch_up(record)
            if record.facts is not None and record.facts.finished:
                return
            facts = self._live_through(record)
            if facts is not None and facts.finished:
                return

    def _catch_up(self, record: Record) -> None:
        """Step locally if the iteration that was interrupted here is committed after all."""
        if self.member.name in record.joins:
            return
        facts = record.facts
        for stage, at in self._stepped.items():
            if at == record.committed:
                continue
            if facts is None or at != record.committed - 1 or self._reduced != record.committed:
                raise RunError(
                    f"worker {self.member.name}: stage {stage} is at iteration {at}, the register at {record.committed}"
                )
            self._step(stage, facts)

    def _live_through(self, record: Record) -> Facts | None:
        """One generation: acknowledge, form, run. Returns the facts of the commit after which it was left in peace."""
        self.member.acknowledge()
        if not self.member.permitted("form"):
            return None
        schedule = native.loads(self.member.plan(record.plan), f"plan {record.plan}")
        role = Worker.parse(record.roles[self.member.name])
        transport: GlooTransport | None = None
        try:
            transport = self._form(record, schedule, role)
            self.member.formed()
            if not self.member.permitted("run"):
                return None
            return self._train(record, with_barrier(schedule).program(role), transport)
        except TransportError as error:
            if transport is None:
                self.member.formed(str(error))
            else:
                self.member.trouble(str(error))
            return None
        except GenerationOver:
            return None
        finally:
            self.shut()  # wakes every peer that still waits for this worker
            if transport is not None:
                transport.close()

    def _form(self, record: Record, schedule: Schedule, role: Worker) -> GlooTransport:
        by_role = {Worker.parse(r): process for process, r in record.roles.items()}
        members = sorted(by_role)
        membership = self.job.membership
        transport = GlooTransport(
            self.member.store.torch_store,
            f"generation{record.generation}",
            role,
            members,
            {stage: schedule.hosts(stage) for stage in self.stages},
            next(iter(self.stages.values())).message_spec(),
            timeout=membership.transport_timeout,
            form_timeout=membership.form_timeout,
            over=self.member.over,
            waiting=self.member.progress.set_waiting,
        )
        try:
            for joiner, source in sorted(record.joins.items()):
                if self.member.name == source:
                    self._each_state(partial(transport.send_state, Worker.parse(record.roles[joiner])))
                elif self.member.name == joiner:
                    self._each_state(partial(transport.receive_state, Worker.parse(record.roles[source])))
                    self._stepped = dict.fromkeys(self.stages, record.committed)
        except TransportError:
            transport.close()
            raise
        return transport

    def _each_state(self, move: Callable[[Sequence[torch.Tensor]], None]) -> None:
        for _, stage in sorted(self.stages.items()):
            move(stage.state_tensors())

    def _train(self, record: Record, program: Sequence[Instruction], transport: GlooTransport) -> Facts:
        """Run iterations until a commit says to leave the generation."""
        iteration = record.committed + 1
        facts: Facts | None = None

        def commit() -> None:
            nonlocal facts
            if facts is None or facts.step != iteration:
                facts = self._commit(iteration)

        def step(stage: int) -> None:
            assert facts is not None, "the commit comes before every step"
            self._step(stage, facts)

        follower = Follower(self.member.progress, self.striker)
        interpreter = Interpreter(self.stages, self.job.shape.stages, transport, commit, step, follower)
        while True:
            self.striker.begin(program, iteration)
            try:
                interpreter.run(program, iteration)
            finally:
                self._write_trace(record, iteration, interpreter.timed)
            assert facts is not None, "a checked schedule steps in every iteration"
            if facts.drain or facts.finished:
                return facts
            iteration += 1

    def _commit(self, iteration: int) -> Facts:
        """Report that this worker's reduces are complete, and wait for the decision."""
        self._reduced = iteration
        losses = [loss for stage in self.stages.values() if (loss := stage.loss_sum()) is not None]
        norms = {index: stage.gradient_norm_squared() for index, stage in self.stages.items()}
        self.member.report(iteration, Report(norms, sum(losses) if losses else None))
        self.striker.at_phase("commit")
        facts = self.member.decision(iteration)
        self.striker.at_phase("step")
        return facts

    def _step(self, index: int, facts: Facts) -> None:
        if facts.clip_factor is not None:
            self.stages[index].step(facts.step, facts.clip_factor)
        self._stepped[index] = facts.step

    def _write_trace(self, record: Record, iteration: int, timed: list[Timed]) -> None:
        self.trace.append(iteration, record.generation, record.roles[self.member.name], timed)
