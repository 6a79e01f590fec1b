"""The register: the run's one current record, changed by compare-and-set only, and what each change writes beside it.

A generation is announced, ends, or is over from the start; an iteration is committed, or an evaluation done. The
register comes first each time, so that a coordinator that takes over finds there what counts, and completes the rest.
"""

from __future__ import annotations

from typing import Any, Literal

from recycle.errors import RunError
from recycle.exec.membership import schema
from recycle.exec.membership.store import RunStore
from recycle.exec.protocol import GO, VOID, GenerationRecord

OTHER_LAUNCHER = "the register was changed by somebody else; another launcher uses this store"


class Register:
    """Writes the register of one run. Whatever changes it raises RunError if somebody else has changed it since.

    Args:
        store: of the run.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._held: GenerationRecord | None = None

    def announce(self, record: GenerationRecord) -> None:
        """Propose a new generation."""
        self.hold(record)
        self._store.set(schema.BegunKey(), record.generation)
        self._store.compare_set(schema.ProposalKey(record.generation), None, record)

    def hold(self, after: GenerationRecord) -> None:
        """Write a record that nothing follows from: that of a new generation, or of workers that hold more by now."""
        before, self._held = self._held, after
        if not self._store.compare_set(schema.RegisterKey(), before, after):
            raise RunError(OTHER_LAUNCHER)

    def announce_over(self, record: GenerationRecord) -> None:
        """Propose a new generation that is over from the start: what it says is where the next one goes on from."""
        self._store.set(schema.StopKey(record.generation), True)
        self.announce(record)

    def allow(self, record: GenerationRecord, what: Literal["form", "run"]) -> None:
        """Let the generation form its groups, or run: from then on no worker is in an earlier one."""
        self._store.compare_set(schema.PermissionKey(record.generation, what), None, GO)
        if what == "run":
            self._store.forget_before(record.generation)

    def commit(self, after: GenerationRecord) -> None:
        """Write the record with the commit of its iteration, and forget what nobody reads any more."""
        g, n, commit = after.generation, after.committed, after.commit
        assert commit is not None
        # All have read the commit before the last: they stepped n - 1 after it.
        forget: list[schema.Key[Any]] = [schema.ReportKey(g, n, schema.EVERYBODY), schema.CommitKey(g, n - 2)]
        self._advance(after, (schema.CommitKey(g, n), commit), forget)

    def evaluated(self, after: GenerationRecord) -> None:
        """Write the record with the result of the evaluation of the committed state."""
        g, n, result = after.generation, after.committed, after.evaluated
        earlier = self._held.evaluated if self._held is not None else None
        assert result is not None
        forget: list[schema.Key[Any]] = [schema.EvaluationReportKey(g, n, schema.EVERYBODY)]
        if earlier is not None:  # all have read it: they have run an iteration since
            forget.append(schema.EvaluatedKey(g, earlier.step))
        self._advance(after, (schema.EvaluatedKey(g, n), result), forget)

    def _advance(
        self, after: GenerationRecord, decided: tuple[schema.Decision[Any], Any], forget: list[schema.Key[Any]]
    ) -> None:
        before, self._held = self._held, after
        if not self._store.advance(schema.RegisterKey(), before, after, decided, forget):
            raise RunError(OTHER_LAUNCHER)

    def end(self, record: GenerationRecord) -> None:
        """End the generation: whatever it has not decided becomes void, and its workers wake up."""
        g = record.generation
        self._store.compare_set(schema.PermissionKey(g, "form"), None, VOID)
        self._store.compare_set(schema.PermissionKey(g, "run"), None, VOID)
        self._store.compare_set(schema.CommitKey(g, record.committed + 1), None, VOID)
        if record.is_evaluation_due:
            self._store.compare_set(schema.EvaluatedKey(g, record.committed), None, VOID)
        self._store.set(schema.StopKey(g), True)

    def take_over(self, record: GenerationRecord) -> None:
        """Go on from the record that another coordinator left: complete the proposal that it may not have written."""
        self._held = record
        self._store.compare_set(schema.ProposalKey(record.generation), None, record)

    def complete_commit(self, record: GenerationRecord) -> None:
        """Write the record's commit and its evaluation's result for those who wait for them."""
        g, n = record.generation, record.committed
        if record.commit is not None:
            self._store.compare_set(schema.CommitKey(g, n), None, record.commit)
        if record.evaluated is not None and record.evaluated.step == n:
            self._store.compare_set(schema.EvaluatedKey(g, n), None, record.evaluated)

    def has_run(self, record: GenerationRecord) -> bool:
        """Whether the generation was allowed to run."""
        return self._store.read(schema.PermissionKey(record.generation, "run")) == GO

    def still_runs(self, record: GenerationRecord) -> bool:
        """Whether the generation runs, is not at its last iteration, and nothing of it is void."""
        g, commit = record.generation, record.commit
        if not self.has_run(record) or self._store.has_all([schema.StopKey(g)]):
            return False
        if record.is_evaluation_due:
            return self._store.read(schema.EvaluatedKey(g, record.committed)) is None
        is_over = commit is not None and commit.last == commit.step
        return not is_over and self._store.read(schema.CommitKey(g, record.committed + 1)) is None
