"""A worker's iterations in one generation: when it reports, steps, waits for a commit, and goes on.

With the barrier all its steps wait for the iteration's commit. A staggered step does not: the worker goes straight on
with the next iteration, while its neighbours may still be in this one, and waits there before it steps again. So
nobody is more than one iteration ahead of the last commit. A worker holds the values of one iteration
only: it begins the next one when its own program is done.

Where an evaluation follows an iteration, all wait for the commit of that, and then for the evaluation's result. A
generation begins with an evaluation that the one before it did not come to an end with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from recycle.exec.checksums import Checksum
from recycle.exec.device.clock import HostClock
from recycle.exec.device.device_progress import DeviceProgress
from recycle.exec.faults.injector import FaultInjector
from recycle.exec.faults.kinds import GATHER, REDUCED
from recycle.exec.leader.commit import MOST_LINKS, exact_parts
from recycle.exec.leader.replay_votes import replayed_as
from recycle.exec.leader.verified_states import Comparison, comparison
from recycle.exec.model.microbatch_checksums import ChecksumBuilder
from recycle.exec.model.stage import Stage
from recycle.exec.protocol import Commit, Computed, GenerationRecord, LinkTime, Report, StepMode
from recycle.exec.transport.base import Messaged, Transport
from recycle.exec.worker.background_copies import BackgroundCopies
from recycle.exec.worker.evaluation import Evaluation
from recycle.exec.worker.interpreter import Interpreter
from recycle.exec.worker.progress import Progress
from recycle.exec.worker.saver import Saver
from recycle.exec.worker.streams import Streams
from recycle.exec.worker.trace_log import TraceLog
from recycle.exec.worker.updates import Updates
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
from recycle.ir.replays import Checked, Rotation
from recycle.shape import Worker


class Commits(Protocol):
    """What decides the commits of iterations, for one worker: the leader, or the workers' reports themselves
    where nothing fails (`commit_of`)."""

    def report(self, step: int, report: Report) -> None:
        """This worker's part of the commit of `step`."""

    def decision(self, step: int) -> Commit:
        """Wait for the commit of `step`. Raises GenerationOver when there will be none."""


@dataclass(kw_only=True)
class Iterations:
    """The iterations of one generation.

    Args:
        record: that the generation began with.
        role: position of the plan that this worker plays.
        program: of its role; the same in every iteration, however it steps, but for replays.
        model_stages: S, the stages of the whole model.
        stages: that this worker hosts.
        transport: to the other workers.
        commits: takes this worker's reports and decides the commits.
        updates: the optimizer steps of `stages`.
        ties: groups of stages that share a weight.
        progress: notes every operation, for the heartbeat.
        injector: faults that strike here.
        trace: log that executed instructions go to; None for none.
        saver: is offered the state after each commit; None where nothing is saved.
        streams: of the device, for overlapped pairs; None where the host computes.
        device: that the stages compute on.
        buckets: in how many the gradients of each stage are reduced.
        evaluation: between iterations; None for a job without.
        compared_every: iterations from one whose state hosts compare to the next (`Sections.compared_every`).
        rotation: the plan with its replays, which gives the program of each iteration; None without any.
        messaged: what messages took since it was asked last.
        background: copies that are made meanwhile; None for none.
    """

    record: GenerationRecord
    role: str
    program: Sequence[Instruction]
    model_stages: int
    stages: Mapping[int, Stage]
    transport: Transport
    commits: Commits
    updates: Updates
    ties: Sequence[Sequence[int]] = ()
    progress: Progress = field(default_factory=Progress)
    injector: FaultInjector = field(default_factory=FaultInjector)
    trace: TraceLog | None = None
    saver: Saver | None = None
    streams: Streams | None = None
    device: DeviceProgress = field(default_factory=lambda: DeviceProgress(HostClock()))
    buckets: int = 1
    evaluation: Evaluation | None = None
    compared_every: int = 0
    rotation: Rotation | None = None
    messaged: Callable[[], Sequence[Messaged]] = tuple
    background: BackgroundCopies | None = None

    def __post_init__(self) -> None:
        self._interpreter = Interpreter(
            self.stages,
            self.model_stages,
            self.transport,
            self._step,
            self.injector.computed,
            self.ties,
            self.streams,
            self.device,
            self.buckets,
        )
        self._last_reduce = _last_reduce(self.program)
        self._iteration = self.record.committed
        self._commit = self.record.commit

    def run(self) -> Commit:
        """Iterate until a commit says to leave; returns that commit.

        Raises:
            GenerationOver, TransportError: the generation ended before that.
        """
        if self.record.is_evaluation_due and (commit := self._evaluate()).finished:
            return commit
        while True:
            whole = False
            try:
                self.begin()
                for position in range(len(self.program)):
                    self.execute(position)
                self.end()
                whole = True
            finally:
                if self.trace is not None:
                    executed = self._interpreter.executed
                    self.trace.append(self._iteration, self.record.generation, self.role, executed, whole)
            self.injector.at_phase("stepped", self._iteration)
            is_last = self._commit is not None and self._commit.last == self._iteration
            if self.evaluation is not None and (is_last or self.evaluation.may_follow(self._iteration)):
                self._evaluate()
            if is_last:
                return self._committed(self._iteration)

    def _evaluate(self) -> Commit:
        """Run the evaluation of the last step, if its commit asks for one; returns the commit."""
        commit = self._committed(self._iteration)
        if commit.evaluate:
            assert self.evaluation is not None, "a commit asks for what the job has"
            self.evaluation.run(commit.step)
        return commit

    def begin(self) -> None:
        """Begin the next iteration."""
        self._iteration += 1
        self.progress.begins("begin")
        checked: Collection[Checked] = ()
        if self.rotation is not None:
            self.program = self.rotation.program(Worker.parse(self.role), self._iteration)
            self._last_reduce = _last_reduce(self.program)
            checked = self.rotation.checked(self._iteration)
        self.injector.begin(self.program, self._iteration)
        self._interpreter.begin(self.program, self._iteration, checked=checked)
        record, verified = self.record, self.record.verified
        self._comparison: Comparison | None = comparison(
            self._iteration,
            record.committed + 1,
            self.compared_every,
            record.rounds,
            None if verified is None else verified.step,
        )
        if self._iteration != record.committed + 1:  # the first of a generation waits for its own commit
            self.updates.begin(self._iteration, self._comparison)
        self._late: list[StageWide] = []
        self._is_reported = False
        if self.background is not None and self.background.begin():
            self.injector.at_phase("copy", self._iteration)
        self.progress.ended()

    def execute(self, position: int) -> None:
        """Execute the instruction at a position of the program, or put it off to the iteration's end."""
        instruction = self.program[position]
        self.progress.begins(_operation(instruction))
        self.injector.at(position)
        if isinstance(instruction, OptimizerStep):
            mode = self._mode()
            self._save()
            if mode == "barrier":
                self._late.append(instruction)
                return
        if isinstance(instruction, GatherParameters) and self._late:
            self._late.append(instruction)
            return
        self._run(instruction)
        if position == self._last_reduce:
            self._report()
        self.progress.ended()

    def step(self) -> None:
        """Take the steps that wait for the iteration's commit. A worker that hosts nothing reports and waits here."""
        if self._last_reduce < 0 and not self._is_reported:
            self._report()
        if self._late or self._last_reduce < 0:
            self._committed(self._iteration)
        self._catch_up(OptimizerStep)

    def end(self) -> None:
        """Do what waits for the iteration's commit: the steps unless `step` has taken them, and the gathers behind."""
        self.step()
        self._catch_up(GatherParameters)
        self._save()

    def _catch_up(self, cls: type[StageWide]) -> None:
        """Execute what was put off, of one kind."""
        late, self._late = self._late, [one for one in self._late if not isinstance(one, cls)]
        for instruction in (one for one in late if isinstance(one, cls)):
            self.progress.begins(_operation(instruction))
            self._run(instruction)
            self.progress.ended()

    def _run(self, instruction: Instruction) -> None:
        if isinstance(instruction, GatherParameters):
            self.injector.at_phase(GATHER, self._iteration)
        self._interpreter.execute(instruction)
        if isinstance(instruction, GatherParameters):
            self.updates.gathered(instruction.stage, self._iteration)

    def _save(self) -> None:
        if self.saver is not None:
            self.saver.keep(self.record, self._commit, self.updates)

    def _report(self) -> None:
        """All gradient sums of this worker's stages are complete."""
        self._is_reported = True
        self.updates.reduced(self._iteration)
        self.device.clock.set()
        self.injector.at_phase(REDUCED, self._iteration)
        states = self._compare_state() if self._comparison is not None else {}
        interpreter = self._interpreter
        links = [LinkTime(one.process.pipeline, one.process.rank, *one[1:]) for one in self.messaged()]
        report = report_of(self.stages, interpreter.compute, states, interpreter.replayed, links)
        self.commits.report(self._iteration, report)
        self.injector.at_phase("commit", self._iteration)

    def _compare_state(self) -> Mapping[int, Checksum]:
        """The checksums of the state that the iteration began with. The iteration before is committed by then, so that
        an older state is not needed any more."""
        assert self._comparison is not None
        if self._iteration > self.record.committed + 1:
            self._committed(self._iteration - 1)
        self.updates.compare_state(self._comparison)
        return self.updates.checksums()

    def _mode(self) -> StepMode:
        """How this iteration steps; waits for the commit of the one before, which every step needs."""
        if self._iteration == self.record.committed + 1:
            return self.record.mode
        return self._committed(self._iteration - 1).next_mode

    def _committed(self, iteration: int) -> Commit:
        if self._commit is None or self._commit.step != iteration:
            self._commit = self.commits.decision(iteration)
        return self._commit

    def _step(self, stage: int) -> None:
        self.injector.at_phase("step", self._iteration)
        if self.background is not None:
            self.background.settle()
        if self._comparison is not None:
            self.updates.compare_state(self._comparison)
        if self._commit is not None and self._commit.step == self._iteration:
            self.updates.step(stage, self._commit)
        else:
            self.updates.step_ahead(stage, self._iteration)


def _last_reduce(program: Sequence[Instruction]) -> int:
    """The position behind which a worker reports; -1 for none."""
    return max((p for p, one in enumerate(program) if isinstance(one, ReduceGradients)), default=-1)


def _operation(instruction: Instruction) -> str:
    """The kind of operation that the heartbeat names: those of one kind on one stage take about equally long."""
    if isinstance(instruction, OverlappedPair):
        return f"{_operation(instruction.forward)};{_operation(instruction.backward)}"
    stage = instruction.stage if isinstance(instruction, Compute | Transfer | StageWide) else ""
    return f"{stage}{instruction.token}"


def report_of(
    stages: Mapping[int, Stage],
    compute: Sequence[Computed] = (),
    states: Mapping[int, Checksum] = MappingProxyType({}),
    replayed: Mapping[Checked, ChecksumBuilder] = MappingProxyType({}),
    links: Sequence[LinkTime] = (),
) -> Report:
    """A worker's report of an iteration, once the gradients of all its stages are summed over their hosts.

    Args:
        compute: times of its instructions.
        states: checksums of the states that the iteration began with.
        replayed: checksums of micro-batches that it has replayed.
        links: times of its messages.
    """
    losses = [loss for stage in stages.values() if (loss := stage.loss_sum()) is not None]
    norms: dict[int, list[float]] = {}
    replicated: dict[int, list[float]] = {}
    checksums: dict[int, int] = {}
    for number, found, all_have, checksum in (part for stage in stages.values() for part in stage.reduced()):
        common = set(all_have)
        norms[number] = exact_parts([norm for place, norm in enumerate(found) if place not in common])
        if common:
            replicated[number] = exact_parts([found[place] for place in sorted(common)])
        checksums[number] = checksum
    state_sums = {number: (checksum.words, checksum.places) for number, checksum in states.items()}
    for number in states:
        norms.setdefault(number, [])  # live parameters have none
    made = [replayed_as(Checked(i, b), m, True) for i, stage in stages.items() for b, m in stage.made().items()]
    made += [replayed_as(checked, making.finish(), False) for checked, making in replayed.items()]
    longest = sorted(links, key=lambda link: max(link.seconds, link.waited), reverse=True)[:MOST_LINKS]
    return Report(
        norms, sum(losses) if losses else None, list(compute), replicated, checksums, state_sums, made, longest
    )
