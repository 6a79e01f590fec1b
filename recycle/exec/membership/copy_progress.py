"""Copies that are made while a generation runs: who has come to hold what, as its workers say."""

from __future__ import annotations

from collections.abc import Collection

from recycle.exec.leader.holdings import Holdings
from recycle.exec.members import members_of
from recycle.exec.membership.schema import EVERYBODY, CopiedKey
from recycle.exec.membership.store import RunStore
from recycle.exec.protocol import Copied, GenerationRecord
from recycle.shape import Worker


class CopyProgress:
    """Those of one run.

    Args:
        store: of the run.
        holdings: who holds what; learns what was copied.
        tensor_parallel: T. A worker holds what all its tensor ranks have copied.
    """

    def __init__(self, store: RunStore, holdings: Holdings, tensor_parallel: int) -> None:
        self._store, self._holdings, self._tensor_parallel = store, holdings, tensor_parallel

    def look(self, record: GenerationRecord, live: Collection[Worker]) -> list[tuple[str, Copied]]:
        """What has been copied since the last call, by worker; `holdings` holds it now.

        Args:
            record: of the generation, which runs.
            live: its workers.
        """
        missing = [
            copy
            for copy in record.behind
            if (worker := Worker.parse(copy.worker)) in live
            and not any(a <= copy.first and copy.last <= b for a, b in self._holdings.of(worker))
        ]
        if not missing:
            return []
        members = members_of(sorted({copy.worker for copy in missing}), self._tensor_parallel)
        answers = self._store.answers(CopiedKey(record.generation, EVERYBODY), members)
        found = []
        for copy in missing:
            units = copy.first, copy.last
            said = [
                next((one for one in answers.get(member, []) if (one.first, one.last) == units), None)
                for member in members_of([copy.worker], self._tensor_parallel)
            ]
            if said[0] is not None and None not in said:
                found.append((copy.worker, said[0]))
                self._holdings.copied(Worker.parse(copy.worker), units)
        return found
