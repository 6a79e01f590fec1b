"""What the processes of the present generation have said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, TypeVar

from recycle.exec.members import members_of
from recycle.exec.protocol import (
    Acknowledged,
    Copied,
    CopyProgress,
    CutOff,
    EvaluationReport,
    Formed,
    FromWorker,
    GenerationRecord,
    Report,
    StepReport,
    Trouble,
)

_Answer = TypeVar("_Answer")


class _Answers(Generic[_Answer]):
    """Answers of processes: `by_member` has them in the order of `members` once none is missing."""

    def __init__(self, members: Sequence[str]) -> None:
        self.by_member: dict[str, _Answer] = dict.fromkeys(members)  # type: ignore[assignment]
        self.missing = len(members)

    def add(self, member: str, answer: _Answer) -> None:
        self.missing -= self.by_member[member] is None
        self.by_member[member] = answer


class Heard:
    """Keeps the last message of each kind of each process of one generation.

    Args:
        tensor_parallel: processes of each worker.

    Attributes:
        generation: its number.
        members: names of all its processes, in order.
        undone: process that has acknowledged -> whether it has taken back a step.
        is_stale: live parameters of some process are not those of the committed iteration.
        formed, copied: process -> what it said.
        failed: the processes that could not form their groups.
        trouble: why the transport of a process broke, of the first that said so; empty when none did.
        cut: the first two workers that cannot reach each other.
    """

    def __init__(self, tensor_parallel: int) -> None:
        self._tensor_parallel = tensor_parallel
        self.begin(GenerationRecord(0, [], {}, ""))

    def begin(self, record: GenerationRecord) -> None:
        """Forget all of the generation before."""
        self.generation = record.generation
        self.members = members_of(record.live, self._tensor_parallel)
        self._known = frozenset(self.members)
        self.undone: dict[str, bool] = {}
        self.is_stale = False
        self.formed: dict[str, Formed] = {}
        self.failed: set[str] = set()
        self.copied: dict[str, list[Copied]] = {}
        self._reports = defaultdict[int, _Answers[Report]](lambda: _Answers(self.members))
        self._evaluations = defaultdict[int, _Answers[EvaluationReport]](lambda: _Answers(self.members))
        self.trouble = ""
        self.cut: tuple[str, str] | None = None

    def take(self, said: FromWorker) -> None:
        """Take a message. That of another generation, or of a process that has no part in this one, is dropped."""
        member, message = said.member, said.message
        if said.generation != self.generation or member not in self._known:
            return
        match message:
            case StepReport(step=step, report=Report() as report):
                self._reports[step].add(member, report)
            case StepReport(step=step, report=EvaluationReport() as evaluation):
                self._evaluations[step].add(member, evaluation)
            case Acknowledged():
                self.undone[member] = message.undone
                self.is_stale |= message.stale
            case Formed():
                self.formed[member] = message
                (self.failed.add if message.error else self.failed.discard)(member)
            case CopyProgress():
                self.copied[member] = message.copied
            case Trouble():
                self.trouble = self.trouble or message.message
            case CutOff():
                self.cut = self.cut or (member.partition("t")[0], message.peer)

    def take_reports(self, said: Iterable[FromWorker]) -> list[FromWorker]:
        """Take the reports of iterations, by far the most frequent messages, among these; the others."""
        others, generation, known, answers = [], self.generation, self._known, self._reports
        for each in said:
            message = each.message
            if not isinstance(message, StepReport) or not isinstance(message.report, Report):
                others.append(each)
            elif each.generation == generation and each.member in known:
                answers[message.step].add(each.member, message.report)
        return others

    def is_complete(self, answers: Collection[str]) -> bool:
        """Whether all processes have answered."""
        return len(answers) == len(self.members)

    def missing(self, answers: Collection[str]) -> set[str]:
        """The processes that have not answered."""
        return set(self.members).difference(answers)

    def reports(self, step: int) -> dict[str, Report] | None:
        """The reports of an iteration by process, in order, once all have come; then they are forgotten."""
        return self._complete(self._reports, step)

    def evaluations(self, step: int) -> dict[str, EvaluationReport] | None:
        """Likewise of the evaluation after an iteration."""
        return self._complete(self._evaluations, step)

    def _complete(self, by_step: dict[int, _Answers[_Answer]], step: int) -> dict[str, _Answer] | None:
        if step not in by_step or by_step[step].missing:
            return None
        return by_step.pop(step).by_member
