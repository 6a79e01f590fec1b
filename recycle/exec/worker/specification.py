"""What a worker process is told when it starts."""

from __future__ import annotations

from msgspec import Struct


class WorkerSpecification(Struct, frozen=True):
    """What the launcher tells a worker process.

    Attributes:
        job: the job as TOML text.
        worker: position, `k.r`.
        stages: that it hosts.
        incarnation: number of this position's process, from 0.
        store: URL of the store.
        run: name of the run in the store.
        address: of this machine, which the other workers connect to.
        faults: (number in the run, text) of what strikes here.
        trace: file for the executed instructions; None for none.
        launcher: process id of the launcher.
        started: when the run started, by this machine's monotonic clock.
        checkpoints: folder of the run's checkpoints.
        generation: the last one of an earlier part of the run.
        restored: step of the checkpoint to start from; None for the initial state.
        tensor_rank: of this process in its worker.
        local_index: of this process among those of its machine, which is its GPU's number.
    """

    job: str
    worker: str
    stages: list[int]
    incarnation: int
    store: str
    run: str
    address: str
    faults: list[tuple[int, str]]
    trace: str | None
    launcher: int
    started: float
    checkpoints: str
    generation: int = 0
    restored: int | None = None
    tensor_rank: int = 0
    local_index: int = 0
