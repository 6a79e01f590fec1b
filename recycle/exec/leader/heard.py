"""What the processes of the present generation have said."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TypeVar

from recycle.exec.members import members_of, parse_workers
from recycle.exec.protocol import (
    CutOff,
    EvaluationReport,
    Formed,
    FromWorker,
    GenerationRecord,
    Report,
    StepReport,
    Trouble,
    WorkerMessage,
)
from recycle.job.shape import Worker

_Message = TypeVar("_Message", bound=WorkerMessage)
_Part = TypeVar("_Part", Report, EvaluationReport)


class Heard:
    """Keeps the last message of each kind of each process of one generation; of `Trouble` and `CutOff` the first.

    Args:
        tensor_parallel: processes of each worker.

    Attributes:
        members: names of all processes of the generation, in order.
        failed: those that could not form their groups.
    """

    def __init__(self, tensor_parallel: int) -> None:
        self._tensor_parallel = tensor_parallel
        self.begin(GenerationRecord(0, [], {}, ""))

    def begin(self, record: GenerationRecord) -> None:
        """Forget all of the generation before."""
        self._generation = record.generation
        self.members = members_of(record.live, self._tensor_parallel)
        self._known = frozenset(self.members)
        self._said = defaultdict[type, dict[str, Any]](dict)
        self._parts = defaultdict[tuple[type, int], dict[str, Any]](dict)
        self.failed: set[str] = set()

    def take(self, said: FromWorker) -> None:
        """Take a message. That of another generation, or of a process that has no part in this one, is dropped."""
        member, message = said.member, said.message
        if said.generation != self._generation or member not in self._known:
            return
        if isinstance(message, StepReport):
            self._parts[type(message.report), message.step][member] = message.report
            return
        said_before = self._said[type(message)]
        if not (isinstance(message, Trouble | CutOff) and member in said_before):
            said_before[member] = message
        if isinstance(message, Formed):
            (self.failed.add if message.error else self.failed.discard)(member)

    def of(self, kind: type[_Message]) -> dict[str, _Message]:
        """The messages of a kind by process, in the order in which the processes first said one."""
        return self._said[kind]

    def all_said(self, kind: type[WorkerMessage]) -> bool:
        """Whether all processes have said a message of a kind."""
        return len(self._said[kind]) == len(self.members)

    def silent(self, kind: type[WorkerMessage]) -> set[Worker]:
        """The workers with a process that has not said a message of a kind."""
        return parse_workers(self._known - self._said[kind].keys())

    def take_parts(self, kind: type[_Part], step: int) -> dict[str, _Part] | None:
        """The reports of an iteration, or of the evaluation after it, by process, in order, once all have come; then
        they are forgotten."""
        parts = self._parts[kind, step]
        if len(parts) < len(self.members):
            return None
        del self._parts[kind, step]
        return {member: parts[member] for member in self.members}
