"""Profile: what each kind of instruction costs, in seconds and in bytes, per stage.

The planner, the simulator and the checker price a schedule by it and by nothing else. A unit profile (every time 1,
an activation weighs 1) is the special case that papers draw; it takes the same path as measured numbers.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import JobError
from recycle.files import read_whole
from recycle.json_objects import entries
from recycle.shape import Worker

PerStage = float | list[float]
_MOST_BYTES = 2**25


@dataclass(frozen=True)
class Profile:
    """Seconds and bytes of the instructions of every stage.

    A number stands for all stages; a list has one entry per stage. Any unit of time will do as long as it is one.

    Attributes:
        forward, backward_input, backward_weight: seconds of F, I and W of one micro-batch. B costs I + W.
        reduce, step: seconds of a stage's gradient reduction and of its optimizer step.
        overlapped_pair: seconds of one overlapped forward and backward; None means F + I + W.
        latency: seconds per transfer between two workers.
        bandwidth: bytes per second of a directed pair of workers; None means that only latency counts.
        message: bytes of one activation (or its gradient) that crosses a stage boundary.
        activation: bytes held for one micro-batch of a stage from the start of F to the end of W (or B).
        weight_stash: share of `activation` that is still held between the end of I and the end of W.
        static: bytes a stage needs whatever the schedule (parameters, gradients, optimizer state, undo copy).
        speed: worker text (`k.r`) -> factor on every compute time of that worker; 1 when left out, 2 is half as fast.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    reduce: PerStage = 0.0
    step: PerStage = 0.0
    overlapped_pair: PerStage | None = None
    latency: float = 0.0
    bandwidth: float | None = None
    message: float = 0.0
    activation: PerStage = 1.0
    weight_stash: float = 1.0
    static: PerStage = 0.0
    speed: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises JobError for a quantity that is negative or not finite."""
        for name in ("forward", "backward_input", "backward_weight", "reduce", "step", "latency", "message",
                     "activation", "static", "overlapped_pair"):  # fmt: skip
            value = getattr(self, name)
            for entry in value if isinstance(value, list) else [0.0 if value is None else value]:
                if not 0 <= entry < math.inf:
                    raise JobError(f"profile: {name} must be finite and at least 0, got {entry}")
        if not 0 <= self.weight_stash <= 1:
            raise JobError(f"profile: weight_stash must lie between 0 and 1, got {self.weight_stash}")
        for name, value in (("bandwidth", self.bandwidth), *((f"speed of {w}", f) for w, f in self.speed.items())):
            if value is not None and not 0 < value < math.inf:
                raise JobError(f"profile: {name} must be finite and above 0, got {value}")

    @classmethod
    def uniform(
        cls,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        link: float = 0.0,
        step: float = 0.0,
        weight_stash: float = 1.0,
    ) -> Profile:
        """The same times on every stage; an activation weighs 1."""
        return cls(forward, backward_input, backward_weight, step=step, latency=link, weight_stash=weight_stash)

    def per_stage(self, name: str, stages: int) -> list[float]:
        """The attribute `name` as a list over `stages` stages. Raises JobError when a list has another length."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return [float(value)] * stages
        if len(value) != stages:
            raise JobError(f"profile: {name} lists {len(value)} stages, the job has {stages}")
        return [float(entry) for entry in value]

    def transfer(self) -> float:
        """Seconds of one transfer: latency + bytes / bandwidth."""
        return self.latency + (self.message / self.bandwidth if self.bandwidth else 0.0)

    def speed_of(self, worker: Worker) -> float:
        return self.speed.get(str(worker), 1.0)

    def digest(self) -> str:
        """Content hash, by which plans say what they were planned for."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote. Raises JobError that names the file and the field."""
        content = read_whole(path, JobError, _MOST_BYTES)
        try:
            unknown = set(entries(content, JobError)) - {f.name for f in fields(cls)}
            if unknown:
                raise JobError(f"{sorted(unknown)[0]!r} is not a field of a profile")
            return msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, JobError, UnicodeDecodeError, RecursionError) as error:
            raise JobError(f"{path}: {error}") from None
