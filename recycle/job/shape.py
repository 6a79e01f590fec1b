"""Shape of a job, and its coordinates: a worker `k.r`, a micro-batch `k.j`, and the node of each worker.

Workers and micro-batches are plain tuples; `str` returns the text used in files, on the command line and in errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import Any, Literal, NamedTuple

from recycle.errors import JobError

Placing = Literal["loop", "v"]
"""Rule that gives the rank of each stage."""
MOST_BUCKETS = 64
"""Maximum number of gradient buckets per stage; with more of them latency dominates."""
_PAIR = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
_MOST_COPIES, _MOST_CELLS = 2**20, 2**24
"""Limits against typing errors; larger tables over stages, micro-batches and workers would not fit into memory."""


class Worker(NamedTuple):
    """One pipeline position: a GPU, or a tensor-parallel group that fails as a unit. Prints as `pipeline.rank`."""

    pipeline: int
    rank: int

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.rank}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        match = _PAIR.fullmatch(text.strip())
        if match is None:
            raise JobError(f"{text!r} is not a worker: write pipeline.rank, for example 1.2")
        return cls(int(match[1]), int(match[2]))


class MicroBatch(NamedTuple):
    """The `index`-th micro-batch of home pipeline `pipeline`. Prints as `pipeline.index`."""

    pipeline: int
    index: int  # type: ignore[assignment]  # the field's name; tuple.index is not missed

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.index}"


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a hybrid-parallel job.

    Args:
        pipelines: D, data-parallel replicas of the model.
        ranks: P, workers per pipeline.
        micro_batches: m, micro-batches per pipeline and iteration.
        chunks: V, stages per worker; the model has P * V stages. With a cut: stages per worker of the fault-free job,
            the unit in which activations are counted.
        cut: units of the model in each stage, if workers host parts of different sizes; its length is the number of
            stages, and the schedule's placement maps stages to workers. Empty: P * V stages.
        placement: "loop": chunk c of rank r is stage c * P + r. "v": chunks alternately go down and up the ranks, so
            with two of them rank r hosts stages r and 2 P - 1 - r. Shapes that differ in this alone are equal.

    Raises:
        JobError: a size is not a whole number of at least 1, or is implausibly large.
    """

    pipelines: int
    ranks: int
    micro_batches: int
    chunks: int = 1
    cut: tuple[int, ...] = ()
    placement: Placing = field(default="loop", compare=False)

    def __post_init__(self) -> None:
        for name in ("pipelines", "ranks", "micro_batches", "chunks"):
            size = _size(getattr(self, name))
            if size < 1:
                raise JobError(f"shape: {name} must be a whole number of at least 1, got {getattr(self, name)!r}")
            object.__setattr__(self, name, size)  # converts NumPy integers
        cut = tuple(map(_size, self.cut)) if isinstance(self.cut, list | tuple) else (0,)
        if not all(cut):
            raise JobError(f"shape: cut must list how many units each stage has, at least 1; got {self.cut!r}")
        object.__setattr__(self, "cut", cut)
        copies, cells = self.stages * self.pipelines, self.stages * max(self.global_micro_batches, self.worker_count)
        if copies > _MOST_COPIES or cells > _MOST_CELLS:
            raise JobError(
                f"shape: {self} is too large: at most {_MOST_COPIES} chunks in all (D*P*V), {_MOST_CELLS} forwards"
                f" (P*V*D*m) and {_MOST_CELLS} pairs of worker and stage (D*P*P*V)"
            )

    @property
    def stages(self) -> int:
        """S = P * V, or the length of `cut`."""
        return len(self.cut) or self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that hosts a stage of a shape without a cut."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self._goes_up(chunk) else place

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, one of each chunk, ascending; none with a cut."""
        chunks = range(0 if self.cut else self.chunks)
        return tuple(c * self.ranks + (self.ranks - 1 - rank if self._goes_up(c) else rank) for c in chunks)

    def _goes_up(self, chunk: int) -> bool:
        return self.placement == "v" and chunk % 2 == 1

    @property
    def units(self) -> int:
        """Units of the model: the sum of `cut`, or one per stage."""
        return sum(self.cut) or self.stages

    @property
    def stage_sizes(self) -> list[float]:
        """Size of each stage relative to a fault-free stage: units over U / (P * V) with a cut, else 1."""
        return [units * self.ranks * self.chunks / self.units for units in self.cut] or [1.0] * self.stages

    def to_json(self) -> dict[str, Any]:
        """Return the arguments of `Shape` as JSON values; `cut` only if it is not empty."""
        sizes = {name: getattr(self, name) for name in ("pipelines", "ranks", "micro_batches", "chunks")}
        return sizes | ({"cut": list(self.cut)} if self.cut else {})

    @classmethod
    def from_json(cls, sizes: Mapping[str, Any]) -> Shape:
        """Build a shape from `to_json`. Raises JobError, and TypeError for unknown names."""
        return cls(**sizes)

    @property
    def worker_count(self) -> int:
        return self.pipelines * self.ranks

    @property
    def global_micro_batches(self) -> int:
        """D * m: the micro-batches of one iteration, and the divisor of every gradient."""
        return self.pipelines * self.micro_batches

    def workers(self) -> Iterator[Worker]:
        return (Worker(k, r) for k in range(self.pipelines) for r in range(self.ranks))

    def worker_index(self, worker: Worker) -> int:
        """Return the row of `worker` in per-worker lists and columns."""
        return worker.pipeline * self.ranks + worker.rank

    def worker_at(self, index: int) -> Worker:
        return Worker(*divmod(int(index), self.ranks))

    def __contains__(self, worker: object) -> bool:
        return (
            isinstance(worker, tuple)
            and len(worker) == 2
            and 0 <= worker[0] < self.pipelines
            and 0 <= worker[1] < self.ranks
        )

    def require(self, worker: Worker, where: str) -> Worker:
        """Return `worker` if it lies in this shape. Raises JobError that begins with `where` if not."""
        if worker not in self:
            raise JobError(
                f"{where}: worker {worker} is outside the grid of {self.pipelines} pipelines"
                f" (0 to {self.pipelines - 1}) by {self.ranks} ranks (0 to {self.ranks - 1})"
            )
        return worker

    def __str__(self) -> str:
        chunks = f" V={self.chunks}" if self.chunks > 1 else ""
        stages = f" S={self.stages}" if self.cut else ""
        return f"D={self.pipelines} P={self.ranks} m={self.micro_batches}{chunks}{stages}"


def _size(value: Any) -> int:
    try:
        return 0 if isinstance(value, bool) else max(0, index(value))
    except TypeError:
        return 0


def place_workers(shape: Shape, workers_per_node: int) -> tuple[tuple[Worker, ...], ...]:
    """Return the workers of each node: as few nodes as hold them, but at least two.

    Workers are placed pipeline by pipeline in blocks of nearly equal size, so that neighbors in a pipeline tend to
    share a node. Each of n >= 2 blocks holds at most ceil(D P / 2) workers, and the D peers of a stage span
    (D - 1) P + 1, which is more for every D >= 2. So every stage survives the death of one node.

    Raises:
        JobError: a stage has no second host.
    """
    if shape.pipelines < 2:
        raise JobError(
            "[shape] pipelines: with a single pipeline a stage has no peer, so no placement on nodes survives the loss"
            " of one; take 2 pipelines or more"
        )
    workers = sorted(shape.workers())
    count = max(2, -(-len(workers) // workers_per_node))
    bounds = [len(workers) * node // count for node in range(count + 1)]
    return tuple(tuple(workers[start:end]) for start, end in pairwise(bounds))


def node_of(shape: Shape, workers_per_node: int) -> dict[Worker, int]:
    return {w: node for node, workers in enumerate(place_workers(shape, workers_per_node)) for w in workers}
