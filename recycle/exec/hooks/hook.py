"""Hook interface of a worker's loop, and the generation that hooks get."""

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
    """Source of commits and evaluation results: the leader, or `commit_of` in runs without failures."""

    def report(self, step: int, report: Report) -> None:
        """Send this worker's part of the commit of `step`."""

    def decision(self, step: int) -> Commit:
        """Wait for the commit of `step`. Raises GenerationOver if the generation ends without it."""

    def report_evaluation(self, step: int, report: EvaluationReport) -> None:
        """Send this worker's part of the evaluation after `step`."""

    def evaluated(self, step: int) -> Evaluated:
        """Wait for the result of the evaluation after `step`. Raises GenerationOver if there is none."""


@dataclass(kw_only=True)
class Generation:
    """A period of constant membership and plan, as one worker sees it.

    Args:
        rotation: the lowered plan with its replays; gives the program of each iteration.
        evaluated_by: lowered schedule of evaluations; None for a job without.
        commits: takes this worker's reports and decides the commits.
        hosts: number of each stage, or shard, that this worker holds -> its processes.
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
        """Wait for the commit of `step`. Raises GenerationOver if the generation ends without it."""
        if self.commit is None or self.commit.step != step:
            self.commit = self.commits.decision(step)
        return self.commit


class IterationHook:
    """Base of hooks, with methods that do nothing. Hooks are called in the order listed."""

    def begin_generation(self, generation: Generation) -> None:
        """Called when a generation begins to run."""

    def begin_iteration(self, iteration: int, program: Sequence[Instruction]) -> None:
        """Called when the stages have started an iteration, before its first instruction."""

    def before_instruction(self, position: int, instruction: Instruction) -> None:
        """Called before the instruction at a position of the program."""

    def computed(self, seconds: float) -> None:
        """Called after a stage has computed an F, I, W or B in `seconds`, inside the computation's stack frame."""

    def reach(self, phase: Phase, step: int) -> None:
        """Called when the worker reaches a phase (phases.py) between instructions of iteration `step`."""

    def before_step(self) -> None:
        """Called before a stage steps."""

    def report(self, report: Report) -> Report:
        """Return the report of an iteration, possibly extended. Called when all gradients are reduced."""
        return report

    def save(self, record: GenerationRecord, commit: Commit | None) -> None:
        """Called before and after steps; the stages may be in the state of the last known commit."""

    def end_iteration(
        self, iteration: int, executed: list[ExecutedInstruction], whole: bool, batch: int | None = None
    ) -> None:
        """Called with the instructions executed in an iteration, or in a batch of its evaluation.

        Also called after an interruption, with `whole` false. The list does not change any more.
        """

    def after_iteration(self, iteration: int, is_last: bool) -> None:
        """Called after an iteration and its steps; if `is_last`, all workers leave the generation after it."""

    def rolled_back(self, committed: int) -> None:
        """Called after a generation, when training restarts after iteration `committed`."""

    def end_generation(self) -> None:
        """Called when the groups are gone and the device is idle."""

    def close(self) -> None:
        """Called after the last generation, when the worker has finished or leaves the run."""


def overridden(
    hooks: Iterable[IterationHook], point: Callable[Concatenate[Any, _Arguments], None]
) -> list[Callable[_Arguments, None]]:
    """The hooks' methods for one point, omitting hooks that do not override it."""
    name = point.__name__
    return [getattr(hook, name) for hook in hooks if getattr(type(hook), name) is not point]
