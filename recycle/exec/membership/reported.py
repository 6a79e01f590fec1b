"""What the processes of a running generation have reported of the iteration, or of the evaluation, that comes next."""

from __future__ import annotations

from recycle.exec.leader.commit import evaluate
from recycle.exec.leader.report_columns import ReportColumns
from recycle.exec.members import members_of
from recycle.exec.membership import schema
from recycle.exec.membership.store import Gathering, RunStore
from recycle.exec.protocol import Evaluated, EvaluationReport, GenerationRecord, Report


class Reported:
    """Gathers the reports of one generation after another; complete when every process of every live worker has one.

    Args:
        store: of the run.
        tensor_parallel: processes of each worker.
    """

    def __init__(self, store: RunStore, tensor_parallel: int) -> None:
        self._store, self._tensor_parallel = store, tensor_parallel
        self._named: tuple[list[str], list[str]] = [], []
        self.forget()

    def forget(self) -> None:
        """The generation is over."""
        self._reports: Gathering[Report] | None = None
        self._evaluations: Gathering[EvaluationReport] | None = None

    def present(self, record: GenerationRecord) -> list[str]:
        """Names of all processes of the generation."""
        if self._named[0] is not record.live:
            self._named = record.live, members_of(record.live, self._tensor_parallel)
        return self._named[1]

    def iteration(self, record: GenerationRecord) -> ReportColumns | None:
        """The reports of the iteration behind the record; None until they are complete."""
        key, names = schema.ReportKey(record.generation, record.committed + 1, schema.EVERYBODY), self.present(record)
        if self._reports is None:
            self._reports = self._store.gathering(key, names)
        if not self._reports.look():
            return None
        texts, self._reports = self._reports.texts, None
        return ReportColumns.of({name: key.decode(texts[name]) for name in names})

    def evaluation(self, record: GenerationRecord) -> Evaluated | None:
        """The result of the evaluation of the committed state; None until all have reported their part."""
        key, names = (
            schema.EvaluationReportKey(record.generation, record.committed, schema.EVERYBODY),
            self.present(record),
        )
        if self._evaluations is None:
            self._evaluations = self._store.gathering(key, names)
        if not self._evaluations.look():
            return None
        texts, self._evaluations = self._evaluations.texts, None
        return evaluate(record.committed, {name: key.decode(texts[name]) for name in names})
