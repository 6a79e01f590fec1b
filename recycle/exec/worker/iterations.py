"""A worker's iterations in one generation: instructions, report, commit, optimizer step.

With the barrier all steps wait for the iteration's commit. After a staggered step the worker starts the next iteration
at once, and waits for the commit before the next step. So a worker is at most one iteration ahead of the last commit. A
generation begins with the evaluation that the previous one did not finish.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from recycle.exec.device import DeviceProgress, HostClock, Progress, Streams
from recycle.exec.hooks.hook import Generation, IterationHook, overridden
from recycle.exec.hooks.phases import Phase
from recycle.exec.leader.commit import MOST_LINKS, exact_parts
from recycle.exec.leader.disagreement import replayed_as
from recycle.exec.model.integrity import ChecksumBuilder
from recycle.exec.model.stage import Stage
from recycle.exec.protocol import Commit, Computed, LinkTime, Report, StepMode
from recycle.exec.worker.interpreter import Interpreter
from recycle.exec.worker.step_state import StepState
from recycle.ir.instruction import (
    Compute,
    GatherParameters,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    ReduceGradients,
    StageWide,
    Transfer,
)
from recycle.ir.replays import Checked

_Result = TypeVar("_Result")


class Pause(NamedTuple):
    """A point between two actions of a worker, at which code of the user may run (`recycle.megatron.session`).

    Attributes:
        phase: "next": the iteration has not begun; "reduced": its gradients are reduced and not reported; "stepped":
            its steps are done.
    """

    step: int
    phase: Literal["next", "reduced", "stepped"]


Pauses = Generator[Pause, None, _Result]
"""Runs up to the next pause, and returns its result after the last."""


def without_pauses(pauses: Pauses[_Result]) -> _Result:
    """Run to the end. Returns the result."""
    while True:
        try:
            next(pauses)
        except StopIteration as end:
            result: _Result = end.value
            return result


@dataclass(kw_only=True)
class Iterations:
    """The iterations of one generation; `program` is this worker's in the current iteration."""

    generation: Generation
    stages: Mapping[int, Stage]
    updates: StepState
    hooks: Sequence[IterationHook] = ()
    progress: Progress = field(default_factory=Progress)
    streams: Streams | None = None
    device: DeviceProgress = field(default_factory=lambda: DeviceProgress(HostClock()))
    program: Sequence[Instruction] = field(init=False, default=())

    def __post_init__(self) -> None:
        plan = self.generation.rotation.whole
        self._interpreter = Interpreter(
            self.stages,
            plan.shape.stages,
            self.generation.transport,
            self._step,
            overridden(self.hooks, IterationHook.computed),
            plan.ties,
            self.streams,
            self.device,
            plan.buckets,
        )
        self._before = overridden(self.hooks, IterationHook.before_instruction)
        self._first = self.generation.record.committed + 1
        self._iteration = self._first - 1
        self.updates.reserve(self.progress.set_waiting)
        for hook in self.hooks:
            hook.begin_generation(self.generation)

    def run(self) -> Commit:
        return without_pauses(self.pauses())

    def pauses(self) -> Pauses[Commit]:
        """Iterate to the generation's last commit and return it. Raises GenerationOver or TransportError before it."""
        record = self.generation.record
        if record.commit is not None and record.is_evaluation_due:
            yield Pause(self._first, "next")
            self._end(is_last=True)
            if record.commit.finished:
                return record.commit
        is_last = False
        while not is_last:
            yield Pause(self._iteration + 1, "next")
            whole = False
            try:
                self.begin()
                for position in range(len(self.program)):
                    if self.execute(position):
                        yield Pause(self._iteration, "reduced")
                        self.report()
                self.end()
                whole = True
            finally:
                for hook in self.hooks:
                    hook.end_iteration(self._iteration, self._interpreter.executed, whole)
            self._reach("stepped")
            commit = self.generation.commit
            is_last = commit is not None and commit.last == self._iteration
            yield Pause(self._iteration, "stepped")
            self._end(is_last)
        return self.generation.committed(self._iteration)

    def begin(self) -> None:
        self._iteration += 1
        self.progress.begin_operation("begin")
        rotation = self.generation.rotation
        program = rotation.program(self.generation.role, self._iteration)
        if program is not self.program:
            self.program, self._last_reduce = program, _last_reduce(program)
        self._interpreter.begin(program, self._iteration, checked=rotation.checked(self._iteration))
        if self._iteration != self._first:  # the first iteration waits for its own commit
            self.updates.begin_iteration(self._iteration)
        self._deferred: list[StageWide] = []
        self._is_reported = False
        for hook in self.hooks:
            hook.begin_iteration(self._iteration, program)
        self.progress.end_operation()

    def execute(self, position: int) -> bool:
        """Execute the instruction at a position of the program, or defer it to the iteration's end.

        Returns whether all gradients of the worker are reduced now, and `report` follows.
        """
        instruction = self.program[position]
        self.progress.begin_operation(_operation(instruction))
        for before in self._before:
            before(position, instruction)
        if isinstance(instruction, OptimizerStep):
            mode = self._mode()
            self._save()
            if mode == "barrier":
                self._deferred.append(instruction)
                return False
        if isinstance(instruction, GatherParameters) and self._deferred:
            self._deferred.append(instruction)
            return False
        self._run(instruction)
        self.progress.end_operation()
        return position == self._last_reduce

    def step(self) -> None:
        """Run the steps that wait for the iteration's commit. A worker without stages reports and waits here."""
        if self._last_reduce < 0 and not self._is_reported:
            self.report()
        if self._deferred or self._last_reduce < 0:
            self.generation.committed(self._iteration)
        self._run_deferred(OptimizerStep)

    def end(self) -> None:
        """Run everything that waits for the iteration's commit: the remaining steps, then gathers."""
        self.step()
        self._run_deferred(GatherParameters)
        self._save()

    def _run_deferred(self, cls: type[StageWide]) -> None:
        deferred, self._deferred = (
            self._deferred,
            [instruction for instruction in self._deferred if not isinstance(instruction, cls)],
        )
        for instruction in (instruction for instruction in deferred if isinstance(instruction, cls)):
            self.progress.begin_operation(_operation(instruction))
            self._run(instruction)
            self.progress.end_operation()

    def _run(self, instruction: Instruction) -> None:
        if not isinstance(instruction, GatherParameters):
            self._interpreter.execute(instruction)
            return
        self._reach("gather")
        self._interpreter.execute(instruction)
        self.updates.mark_gathered(instruction.stage, self._iteration)

    def report(self) -> None:
        """Send this worker's part of the iteration's commit."""
        self._is_reported = True
        self.updates.mark_reduced(self._iteration)
        self.device.clock.set()
        self._reach("reduced")
        interpreter = self._interpreter
        link_stats = self.generation.transport.link_stats()
        links = [LinkTime(stats.process.pipeline, stats.process.rank, *stats[1:]) for stats in link_stats]
        report = report_of(self.stages, interpreter.compute, interpreter.replayed, links)
        for hook in self.hooks:
            report = hook.report(report)
        self.generation.commits.report(self._iteration, report)
        self._reach("commit")

    def _mode(self) -> StepMode:
        if self._iteration == self._first:
            return self.generation.record.mode
        return self.generation.committed(self._iteration - 1).next_mode

    def _step(self, stage: int) -> None:
        self._reach("step")
        for hook in self.hooks:
            hook.before_step()
        commit = self.generation.commit
        if commit is not None and commit.step == self._iteration:
            self.updates.step(stage, commit)
        else:
            self.updates.step_ahead(stage, self._iteration)

    def _reach(self, phase: Phase) -> None:
        for hook in self.hooks:
            hook.reach(phase, self._iteration)

    def _save(self) -> None:
        for hook in self.hooks:
            hook.save(self.generation.record, self.generation.commit)

    def _end(self, is_last: bool) -> None:
        for hook in self.hooks:
            hook.after_iteration(self._iteration, is_last)


def _last_reduce(program: Sequence[Instruction]) -> int:
    return max((p for p, instruction in enumerate(program) if isinstance(instruction, ReduceGradients)), default=-1)


def _operation(instruction: Instruction) -> str:
    if isinstance(instruction, OverlappedPair):
        return f"{_operation(instruction.forward)};{_operation(instruction.backward)}"
    stage = instruction.stage if isinstance(instruction, Compute | Transfer | StageWide) else ""
    return f"{stage}{instruction.token}"


def report_of(
    stages: Mapping[int, Stage],
    compute: Sequence[Computed] = (),
    replayed: Mapping[Checked, ChecksumBuilder] = MappingProxyType({}),
    links: Sequence[LinkTime] = (),
) -> Report:
    """A worker's report of an iteration, after the gradients of all its stages are reduced."""
    losses = [loss for stage in stages.values() if (loss := stage.loss_sum()) is not None]
    norms: dict[int, list[float]] = {}
    replicated: dict[int, list[float]] = {}
    checksums: dict[int, int] = {}
    for number, squares, all_have, checksum in (
        part for stage in stages.values() for part in stage.layout.reduced(stage)
    ):
        common = set(all_have)
        norms[number] = exact_parts([norm for place, norm in enumerate(squares) if place not in common])
        if common:
            replicated[number] = exact_parts([squares[place] for place in sorted(common)])
        checksums[number] = checksum
    batches = [
        replayed_as(Checked(i, b), sums, True)
        for i, stage in stages.items()
        for b, sums in stage.watched_checksums().items()
    ]
    batches += [replayed_as(checked, builder.finish(), False) for checked, builder in replayed.items()]
    longest = sorted(links, key=lambda link: max(link.seconds, link.waited), reverse=True)[:MOST_LINKS]
    return Report(
        norms,
        sum(losses) if losses else None,
        list(compute),
        replicated,
        checksums,
        replayed=batches,
        links=longest,
    )
