"""Which workers' present processes have started up and wait to take part."""

from __future__ import annotations

from recycle.exec.members import members_of
from recycle.exec.membership import schema
from recycle.exec.membership.interfaces import Processes
from recycle.exec.membership.store import Store
from recycle.shape import Worker


class Readiness:
    """What the processes of a run say when they have started up.

    Args:
        store, processes: of the run.
        tensor_parallel: processes of each worker.
    """

    def __init__(self, store: Store, processes: Processes, tensor_parallel: int) -> None:
        self._store, self._processes, self._tensor_parallel = store, processes, tensor_parallel

    def is_ready(self, worker: Worker) -> bool:
        """Whether all of the worker's present processes have started up."""
        number = self._processes.incarnation(worker)
        names = members_of([worker], self._tensor_parallel)
        return self._store.has_all([schema.ReadyKey(name, number) for name in names])

    def forget(self, worker: Worker) -> None:
        """No process that the worker has had so far waits to take part."""
        incarnations = range(self._processes.incarnation(worker) + 1)
        names = members_of([worker], self._tensor_parallel)
        self._store.delete([schema.ReadyKey(name, number) for name in names for number in incarnations])
