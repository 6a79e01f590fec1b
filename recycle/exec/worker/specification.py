"""What a worker process is started with."""

from __future__ import annotations

from msgspec import Struct

REFUSED = 2
"""Exit code of a worker process that cannot do what the job states."""


class RunSpecification(Struct, frozen=True, kw_only=True):
    """What all worker processes of a run on one machine have in common.

    Attributes:
        job: the job as TOML text.
        cut: layers of each stage of the model, where the run begins with another cut than the job's (`Shape.cut`).
        stages: that workers host when they start, where that is not as the job's shape says: worker -> stages.
        faults: texts of all faults of the run, in the order of their numbers.
        agent: name of the agent's socket.
        address: of this machine, which the other workers connect to.
        started: when the run started, by this machine's monotonic clock.
        directory: the run directory.
        environment: variables that the transport needs.
    """

    job: str
    cut: list[int]
    stages: dict[str, list[int]]
    faults: list[str]
    agent: str
    address: str
    started: float
    directory: str
    environment: dict[str, str] = {}


class WorkerSpecification(Struct, frozen=True, kw_only=True):
    """What one worker process is started with.

    Attributes:
        run: what it has in common with the others.
        worker: position, `k.r`.
        incarnation: number of this position's process, from 0.
        generation: the last one before the process.
        restored: step of the checkpoint to start from; None for the initial state.
        tensor_rank: of this process in its worker.
        local_index: of this process among those of its machine, which is its GPU's number.
    """

    run: RunSpecification
    worker: str
    incarnation: int
    generation: int = 0
    restored: int | None = None
    tensor_rank: int = 0
    local_index: int = 0
