"""Specification that a worker process starts from."""

from __future__ import annotations

from msgspec import Struct

SESSION = "RECYCLE_SESSION"
"""Variable with the specification, in JSON, of a process that runs a user's script."""
REFUSED = 2
"""Exit code of a worker process that cannot do what the job states."""


class RunSpecification(Struct, frozen=True, kw_only=True):
    """Settings common to all worker processes of a run on one machine.

    Attributes:
        cut: layers of each stage of the model, if different from the job's at the start (`Shape.cut`).
        stages: worker -> stages that it hosts at the start, if different from the job's shape.
        address: of this machine, for the other workers.
        started: when the run started, by this machine's monotonic clock.
        environment: variables that the transport needs.
        gpus: UUIDs of the machine's GPUs at the start, by local number; empty if the transport computes on CPUs.
        transport: the one chosen at the start.
        command: the user's script and its arguments, which runs in a session; empty for recycle's own trainer.
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
    gpus: list[str] = []
    transport: str = ""
    command: list[str] = []


class WorkerSpecification(Struct, frozen=True, kw_only=True):
    """Settings of one worker process.

    Attributes:
        incarnation: number of this position's process, from 0.
        restored: step of the checkpoint to start from; None for the initial state.
        tensor_rank: of this process in its worker.
        local_index: index of this process on its machine, and of its GPU in `RunSpecification.gpus`.
    """

    run: RunSpecification
    worker: str
    incarnation: int
    generation: int = 0
    restored: int | None = None
    tensor_rank: int = 0
    local_index: int = 0
