"""The points of a worker's loop that hooks attach to, and what a hook learns of the generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol

from recycle.exec.device import ExecutedInstruction
from recycle.exec.hooks.phases import Phase
from recycle.exec.protocol import Commit, Evaluated, EvaluationReport, GenerationRecord, Report
from recycle.exec.transport.groups import GroupTransport
from recycle.exec.transport.local import LocalTransport
from recycle.ir.instruction import Instruction
from recycle.ir.replays import Rotation
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker

_Arguments = ParamSpec("_Arguments")


class Commits(Protocol):
    """What decides commits and results of evaluations, for one worker: the leader, or the workers' reports themselves
    where nothing fails (`commit_of`)."""

    def report(self, step: int, report: Report) -> None:
        """This worker's part of the commit of `step`."""

    def decision(self, step: int) -> Commit:
        """Wait for the commit of `step`. Raises GenerationOver when there will be none."""

    def report_evaluation(self, step: int, report: EvaluationReport) -> None:
        """This worker's part of the evaluation after `step`."""

    def evaluated(self, step: int) -> Evaluated:
        """Wait for the result of that. Raises GenerationOver when there will be none."""


@dataclass(kw_only=True)
class Generation:
    """What a worker takes part in until membership or plan change.

    Args:
        record: that the generation began with.
        role: position of the plan that this worker plays.
        schedule: the plan.
        rotation: the plan, lowered, with its replays; gives the program of each iteration.
        evaluated_by: what evaluations run by, lowered; None for a job without.
        transport: to the other workers.
        commits: takes this worker's reports and decides the commits.
        hosts: number of each stage, or shard, that this worker holds -> the processes that do.

    Attributes:
        commit: the last that is known here.
    """

    record: GenerationRecord
    role: Worker
    schedule: Schedule
    rotation: Rotation
    transport: GroupTransport | LocalTransport
    commits: Commits
    evaluated_by: Schedule | None = None
    hosts: Mapping[int, Sequence[str]] = field(default_factory=dict)
    commit: Commit | None = field(init=False)

    def __post_init__(self) -> None:
        self.commit = self.record.commit

    def committed(self, step: int) -> Commit:
        """Wait for the commit of `step`. Raises GenerationOver when there will be none."""
        if self.commit is None or self.commit.step != step:
            self.commit = self.commits.decision(step)
        return self.commit


class IterationHook:
    """Does nothing at any point. A hook overrides the points that it needs; hooks are called in the order listed."""

    def begin_generation(self, generation: Generation) -> None:
        """A generation begins to run."""

    def begin_iteration(self, iteration: int, program: Sequence[Instruction]) -> None:
        """The stages have taken up an iteration, nothing of its program has run."""

    def before(self, position: int, instruction: Instruction) -> None:
        """The instruction at a position of the program is next."""

    def computed(self, seconds: float) -> None:
        """A stage has computed an F, I, W or B in `seconds`; called inside the computation's stack frame."""

    def reach(self, phase: Phase, step: int) -> None:
        """The worker has come to a phase (phases.py) of iteration `step` that lies between instructions."""

    def before_step(self) -> None:
        """A stage is about to step."""

    def report(self, report: Report) -> Report:
        """All gradient sums of the worker's stages are complete; what it reports of the iteration."""
        return report

    def keep(self, record: GenerationRecord, commit: Commit | None) -> None:
        """A step is due, or steps are done; the stages may stand at the state of the last commit that is known."""

    def end_iteration(
        self, iteration: int, executed: list[ExecutedInstruction], whole: bool, batch: int | None = None
    ) -> None:
        """What was executed of an iteration, or of a batch of the evaluation that follows it; a list that nobody
        changes any more. Called also where it was interrupted, and is not whole."""

    def after_iteration(self, iteration: int, is_last: bool) -> None:
        """An iteration and its steps are done.

        Args:
            is_last: all leave the generation behind it.
        """

    def go_back(self, committed: int) -> None:
        """A generation is over, and training goes on behind this iteration."""

    def end_generation(self) -> None:
        """The groups are gone, and the device is idle."""

    def close(self) -> None:
        """The worker ends."""


def overridden(
    hooks: Iterable[IterationHook], point: Callable[Concatenate[Any, _Arguments], None]
) -> list[Callable[_Arguments, None]]:
    """The hooks' methods at one point, of those hooks that do something there."""
    name = point.__name__
    return [getattr(hook, name) for hook in hooks if getattr(type(hook), name) is not point]
