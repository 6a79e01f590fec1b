"""Faults that are struck from outside the worker: by the launcher, or by the agent of the worker's node.

The worker claims the fault at its point and stops there; the coordinator writes the event and asks for the strike in
the store (`StrikeKey`); whoever started the worker's processes strikes.
"""

from __future__ import annotations

from collections.abc import Sequence

from recycle.exec.faults.fault import Fault
from recycle.exec.faults.kinds import KINDS, StruckProcesses
from recycle.exec.membership.schema import StrikeKey
from recycle.exec.membership.store import Store


class OutsideStrikes:
    """Strikes the faults of a run at the processes that this process started.

    Strikes that were asked for before are not made: they were for processes of an earlier agent.

    Args:
        faults: all faults of the run.
        processes: that this process started.
        store: of the run.
    """

    def __init__(self, faults: Sequence[Fault], processes: StruckProcesses, store: Store) -> None:
        self._processes, self._store = processes, store
        self._open = {
            number: fault
            for number, fault in enumerate(faults)
            if KINDS[fault.kind].from_outside is not None and not store.has_all([StrikeKey(number)])
        }

    def tick(self) -> None:
        """Strike what has been asked for since the last call."""
        for number, fault in list(self._open.items()):
            strike = KINDS[fault.kind].from_outside
            assert strike is not None
            asked = self._store.has_all([StrikeKey(number)])
            if asked and strike(number, fault, self._processes, self._store):
                del self._open[number]
