"""A worker's iterations in one generation: when it reports, steps, waits for a commit, and goes on.

With the barrier all its steps wait for the iteration's commit. A staggered step does not: the worker goes straight on
with the next iteration, while its neighbours may still be in this one, and waits there before it steps again. So
nobody is more than one iteration ahead of the last commit. What a worker holds is that of one iteration: it begins the
next one when its own program is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from recycle.errors import RecycleError
from recycle.exec.faults.injector import FaultInjector
from recycle.exec.membership.commit import report_of
from recycle.exec.membership.member import Member
from recycle.exec.membership.messages import Commit, GenerationRecord, Mode
from recycle.exec.model.stage import Stage
from recycle.exec.transport.base import Transport
from recycle.exec.worker.interpreter import Interpreter, Timed
from recycle.exec.worker.saver import Saver
from recycle.exec.worker.updates import Updates
from recycle.ir.instruction import (
    Compute,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    ReduceGradients,
    StageWide,
    Transfer,
)
from recycle.runs import append_iteration


class TraceLog:
    """This process's log of executed instructions; times count from the start of the run.

    An iteration that cannot be written is left out: `warn` is told the first time why, and training goes on. Without a
    path nothing is written: of a worker's processes that of tensor rank 0 does.
    """

    def __init__(self, path: Path | None, started: float, warn: Callable[[str], None]) -> None:
        self._path, self._started, self._warn = path, started, warn
        self._warned = False

    def append(self, iteration: int, generation: int, role: str, timed: list[Timed]) -> None:
        """Add what was executed of one iteration."""
        if self._path is None:
            return
        rows = [(text, start - self._started, end - self._started) for text, start, end in timed]
        try:
            append_iteration(self._path, iteration, generation, role, rows)
        except RecycleError as error:
            if not self._warned:
                self._warned = True
                self._warn(f"the trace has gaps: {error}")


class Iterations:
    """The iterations of one generation.

    Args:
        record: that the generation began with.
        program: of this worker's role; the same in every iteration, however it steps.
        model_stages: S, the stages of the whole model.
        saver: is told of each commit while the stages stand there.
        ties: groups of stages that share a weight.
    """

    def __init__(
        self,
        record: GenerationRecord,
        program: Sequence[Instruction],
        model_stages: int,
        member: Member,
        stages: Mapping[int, Stage],
        updates: Updates,
        transport: Transport,
        injector: FaultInjector,
        trace: TraceLog,
        saver: Saver,
        ties: Sequence[Sequence[int]] = (),
    ) -> None:
        self._saver = saver
        self._record, self._program, self._member, self._stages = record, program, member, stages
        self._updates, self._injector, self._trace = updates, injector, trace
        self._interpreter = Interpreter(stages, model_stages, transport, self._step, injector.computed, ties)
        self._last_reduce = max(p for p, i in enumerate(program) if isinstance(i, ReduceGradients))
        self._iteration = record.committed
        self._commit = record.commit

    def run(self) -> Commit:
        """Iterate until a commit says to leave; returns that commit.

        Raises:
            GenerationOver, TransportError: the generation ended before that.
        """
        while True:
            self._iteration += 1
            try:
                self._iterate()
            finally:
                role = self._record.roles[self._member.worker]
                self._trace.append(self._iteration, self._record.generation, role, self._interpreter.timed)
            self._injector.at_phase("stepped", self._iteration)
            if self._commit is not None and self._commit.last == self._iteration:
                return self._committed(self._iteration)

    def _iterate(self) -> None:
        progress = self._member.progress
        progress.begins("begin")
        self._injector.begin(self._program, self._iteration)
        self._interpreter.begin(self._program, self._iteration)
        if self._iteration > self._record.committed + 1:  # the first of a generation waits for its own commit
            self._updates.begin(self._iteration)
        progress.ended()
        late: list[OptimizerStep] = []
        for position, instruction in enumerate(self._program):
            progress.begins(_doing(instruction))
            self._injector.at(position)
            if isinstance(instruction, OptimizerStep):
                mode = self._mode()
                self._saver.keep(self._record, self._commit, self._updates)
                if mode == "barrier":
                    late.append(instruction)
                    continue
            self._interpreter.execute(instruction)
            if position == self._last_reduce:
                self._report()
            progress.ended()
        if late:
            self._committed(self._iteration)
        for instruction in late:
            progress.begins(_doing(instruction))
            self._interpreter.execute(instruction)
            progress.ended()
        self._saver.keep(self._record, self._commit, self._updates)

    def _report(self) -> None:
        """All gradient sums of this worker's stages are complete."""
        self._updates.reduced(self._iteration)
        self._member.report(self._iteration, report_of(self._stages, self._interpreter.compute))
        self._injector.at_phase("commit", self._iteration)

    def _mode(self) -> Mode:
        """How this iteration steps; waits for the commit of the one before, without which nobody may step."""
        if self._iteration == self._record.committed + 1:
            return self._record.mode
        return self._committed(self._iteration - 1).next_mode

    def _committed(self, iteration: int) -> Commit:
        if self._commit is None or self._commit.step != iteration:
            self._commit = self._member.decision(iteration)
        return self._commit

    def _step(self, stage: int) -> None:
        self._injector.at_phase("step", self._iteration)
        if self._commit is not None and self._commit.step == self._iteration:
            self._updates.step(stage, self._commit)
        else:
            self._updates.step_ahead(stage, self._iteration)


def _doing(instruction: Instruction) -> str:
    """What kind of operation it is for the heartbeat: those of a stage take about as long as each other."""
    if isinstance(instruction, OverlappedPair):
        return f"{_doing(instruction.forward)};{_doing(instruction.backward)}"
    stage = instruction.stage if isinstance(instruction, Compute | Transfer | StageWide) else ""
    return f"{stage}{instruction.token}"
