"""Profile: prices of each kind of instruction per stage, in seconds and bytes.

Planner, simulator and checker price a schedule by its profile alone, also by a unit profile (every time 1).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from recycle.errors import JobError
from recycle.files import entries, read_whole, write_whole
from recycle.job.shape import Shape, Worker

PerStage = float | list[float]
_MOST_BYTES = 2**25
_NUMBER = r"(0|[1-9][0-9]{0,8}|\*)"
_TIMES = (
    *("forward", "backward_input", "backward_weight", "reduce", "reduce_latency", "step", "gather"),
    *("overlapped_pair", "redundant_forward"),
)
PER_STAGE = (*_TIMES, "message", "activation", "recomputed_from", "static", "workspace")
_IN_PLACE = {"redundant_forward": "forward", "recomputed_from": "activation"}
_PAIR = re.compile(rf"{_NUMBER}\.{_NUMBER}>{_NUMBER}\.{_NUMBER}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Price of a transfer of a directed pair of workers: `latency` + bytes / `bandwidth` seconds (None: latency)."""

    latency: float = 0.0
    bandwidth: float | None = None


@dataclass(frozen=True)
class Profile:
    """Seconds and bytes of the instructions of every stage.

    A number applies to all stages; a list has one entry per stage. Times may be in any unit, the same for all.

    A key of `links` is `sender>receiver`, each `pipeline.rank`, where `*` stands for any number: `0.1>0.2` is one
    directed pair, `*.1>*.2` all pairs from rank 1 to rank 2, `0.*>1.*` all from pipeline 0 to pipeline 1. A link
    replaces both `latency` and `bandwidth`. If several keys match a pair, the one with the fewest `*` counts, then the
    one with fewer `*` on the left: `0.*>1.*` precedes `*.1>*.2`.

    Attributes:
        forward, backward_input, backward_weight: seconds of F, I and W of one micro-batch. B costs I + W.
        reduce, step: seconds of a stage's gradient reduction and of its optimizer step.
        reduce_latency: seconds of `reduce` that do not depend on bytes, so that each of several buckets takes them.
        gather: seconds in which a host receives the parameters of its stage that other hosts updated.
        overlapped_pair: seconds of one overlapped forward and backward; None: F + I + W.
        redundant_forward: seconds of R, including the visible part of parking its activation on the host; None: as F.
        latency: seconds per transfer between two workers.
        bandwidth: bytes per second of a directed pair of workers; None: only latency counts.
        links: links of directed pairs of workers that differ from the default.
        message: bytes of the activation that a stage passes to the next, and of the gradient that returns.
        activation: bytes held for one micro-batch of a stage from the start of F to the end of W (or B).
        recomputed_from: bytes held instead of `activation` between F and the start of I or B with recomputation; None:
            `activation`.
        weight_stash: share of `activation` that is still held between the end of I and the end of W.
        redundant_stash: share of `activation` that R leaves on the device until the worker's backward of the
            micro-batch; 0 if R parks all of it on the host.
        static: bytes that a stage needs with every schedule (parameters, gradients, optimizer state, undo copy).
        workspace: largest number of further bytes, messages under way included, while an instruction of the stage runs.
            A worker runs one instruction at a time, so the maximum over its stages counts once.
        capacity: bytes of a worker's device for all of this; None if unknown.
        host_bandwidth: bytes per second that a worker copies to the host and, at the same time, back; None: copies of
            activations take no time.
        speed: worker text (`k.r`) -> factor on every compute time of that worker; 1 when left out, 2 is half as fast.
        measured: origin of the figures (machine, versions, date, spread, ...), in any form. It affects neither prices
            nor equality nor `digest`.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    reduce: PerStage = 0.0
    reduce_latency: PerStage = 0.0
    step: PerStage = 0.0
    gather: PerStage = 0.0
    overlapped_pair: PerStage | None = None
    redundant_forward: PerStage | None = None
    latency: float = 0.0
    bandwidth: float | None = None
    links: dict[str, Link] = field(default_factory=dict)
    message: PerStage = 0.0
    activation: PerStage = 1.0
    weight_stash: float = 1.0
    redundant_stash: float = 1.0
    static: PerStage = 0.0
    recomputed_from: PerStage | None = None
    workspace: PerStage = 0.0
    capacity: float | None = None
    host_bandwidth: float | None = None
    speed: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Raise JobError for a negative or non-finite quantity, and for a link or speed that names no worker."""
        for name in ("links", "speed"):
            if not isinstance(getattr(self, name), dict):
                raise JobError(f"profile: {name} must be a dict, got {getattr(self, name)!r}")
        for worker, factor in self.speed.items():
            if str(Worker.parse(worker)) != worker:
                raise JobError(f"profile: speed: write {Worker.parse(worker)} instead of {worker!r}")
            _require_quantity(f"speed of {worker}", factor, above_zero=True)
        for pair, link in self.links.items():
            _require_pair(pair)
            if not isinstance(link, Link):
                raise JobError(f"profile: link {pair} must be a Link, got {link!r}")
            _require_quantity(f"latency of link {pair}", link.latency)
            _require_quantity(f"bandwidth of link {pair}", link.bandwidth, above_zero=True)
        for name in (*PER_STAGE, "latency"):
            value = getattr(self, name)
            for entry in value if isinstance(value, list) else [value]:
                _require_quantity(name, entry)
        for name in ("bandwidth", "capacity", "host_bandwidth"):
            _require_quantity(name, getattr(self, name), above_zero=True)
        for name in ("weight_stash", "redundant_stash"):
            if not _is_number(getattr(self, name)) or not 0 <= getattr(self, name) <= 1:
                raise JobError(f"profile: {name} must lie between 0 and 1, got {getattr(self, name)}")

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
        """Return a profile with the same times on every stage; an activation weighs 1."""
        return cls(forward, backward_input, backward_weight, step=step, latency=link, weight_stash=weight_stash)

    def per_stage(self, name: str, stages: int) -> list[float]:
        """Return the attribute `name` as a list over stages. Raises JobError if a list has another length.

        None falls back to F for R, and to `activation` for `recomputed_from`.
        """
        value = getattr(self, name)
        if value is None and name in _IN_PLACE:
            value = getattr(self, _IN_PLACE[name])
        if not isinstance(value, list):
            return [float(value)] * stages
        if len(value) != stages:
            raise JobError(f"profile: {name} lists {len(value)} stages, the job has {stages}")
        return [float(entry) for entry in value]

    @property
    def host_copy(self) -> PerStage:
        """Seconds in which an activation, as held between F and I, is copied to the host or back."""
        held = self.activation if self.recomputed_from is None else self.recomputed_from
        rate = self.host_bandwidth or math.inf
        return [amount / rate for amount in held] if isinstance(held, list) else held / rate

    def bucket_seconds(self, buckets: int, stages: int) -> list[float]:
        """Return the seconds to reduce one of `buckets` equal buckets of each stage's gradients."""
        total, latency = self.per_stage("reduce", stages), self.per_stage("reduce_latency", stages)
        return [min(a, b) + max(0.0, a - b) / buckets for a, b in zip(total, latency, strict=True)]

    def fixed_bytes(self, hosted: Iterable[int], stages: int) -> float:
        """Return the bytes besides activations that a worker of the stages `hosted` needs, of `stages` in all."""
        static, workspace = (self.per_stage(name, stages) for name in ("static", "workspace"))
        hosted = list(hosted)
        return sum(static[stage] for stage in hosted) + max((workspace[stage] for stage in hosted), default=0.0)

    def require(self, shape: Shape) -> None:
        """Raise JobError if a list does not have one entry per stage of `shape`, or a speed or link names no worker."""
        for name in PER_STAGE:
            if getattr(self, name) is not None:
                self.per_stage(name, shape.stages)
        for worker in self.speed:
            shape.require(Worker.parse(worker), "profile: speed")
        self._links_of(shape, [])

    def transfer_seconds(
        self, shape: Shape, sender: npt.ArrayLike, receiver: npt.ArrayLike, boundary: npt.ArrayLike
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of transfers between worker indices: latency + bytes / bandwidth of each link.

        `boundary` is the stage whose output, or the gradient of whose output, is sent. Raises JobError if a link names
        a worker outside `shape`, or `message` has another length.
        """
        message = np.array(self.per_stage("message", shape.stages))
        return self.copy_seconds(shape, sender, receiver, message[np.clip(boundary, 0, shape.stages - 1)])

    def copy_seconds(
        self, shape: Shape, sender: npt.ArrayLike, receiver: npt.ArrayLike, amount: npt.ArrayLike
    ) -> npt.NDArray[np.float64]:
        """Return the seconds to copy `amount` bytes between workers. Raises JobError as `transfer_seconds` does."""
        sender, receiver = np.asarray(sender, dtype=np.int64), np.asarray(receiver, dtype=np.int64)
        links, which = [Link(self.latency, self.bandwidth)], np.zeros(sender.shape, dtype=np.int64)
        if self.links:
            pairs, which = np.unique(sender * shape.worker_count + receiver, return_inverse=True)
            links = self._links_of(shape, pairs.tolist())
        latency = np.array([link.latency for link in links])[which]
        bandwidth = np.array([link.bandwidth or math.inf for link in links])[which]
        with np.errstate(over="ignore"):
            seconds: npt.NDArray[np.float64] = latency + np.asarray(amount) / bandwidth
        return seconds

    def with_slow_link(self, shape: Shape, first: Worker, second: Worker, factor: float) -> Profile:
        """Return a profile in which transfers between two workers, in both directions, take `factor` times as long.

        Raises JobError if a link names a worker outside `shape`, or the factor is not above 0 and finite.
        """
        links = dict(self.links)
        for ends in ((first, second), (second, first)):
            link = self.link_between(shape, *ends)
            bandwidth = None if link.bandwidth is None else link.bandwidth / factor
            links["{}>{}".format(*ends)] = Link(factor * link.latency, bandwidth)
        return replace(self, links=links)

    def link_between(self, shape: Shape, sender: Worker, receiver: Worker) -> Link:
        """Return the link from one worker to another. Raises JobError if `links` names a worker outside `shape`."""
        pair = shape.worker_index(sender) * shape.worker_count + shape.worker_index(receiver)
        return self._links_of(shape, [pair])[0]

    def _links_of(self, shape: Shape, pairs: list[int]) -> list[Link]:
        most = (shape.pipelines, shape.ranks) * 2
        forms: set[tuple[bool, ...]] = set()
        for key in self.links:
            numbers = re.split("[.>]", key)
            if any(number != "*" and int(number) >= size for number, size in zip(numbers, most, strict=True)):
                raise JobError(
                    f"profile: links: {key!r} names a worker outside the grid of {shape.pipelines} pipelines"
                    f" by {shape.ranks} ranks (counted from 0)"
                )
            forms.add(tuple(number == "*" for number in numbers))
        by_precedence = sorted(forms, key=lambda form: (sum(form), form))
        links = []
        for pair in pairs:
            sender, receiver = divmod(pair, shape.worker_count)
            numbers = [str(number) for worker in (sender, receiver) for number in divmod(worker, shape.ranks)]
            fitting = (
                "{}.{}>{}.{}".format(*("*" if star else n for star, n in zip(form, numbers, strict=True)))
                for form in by_precedence
            )
            link = next((self.links[key] for key in fitting if key in self.links), None)
            links.append(link or Link(self.latency, self.bandwidth))
        return links

    def scaled(self, factor: float) -> Profile:
        """Return the profile in another unit of time: every time `factor` times as long."""

        def scale(value: Any) -> Any:
            return value and ([factor * entry for entry in value] if isinstance(value, list) else factor * value)

        changed = {name: scale(getattr(self, name)) for name in _TIMES}

        def rate(bandwidth: float | None) -> float | None:
            return bandwidth / factor if bandwidth and factor else None

        links = {pair: Link(factor * link.latency, rate(link.bandwidth)) for pair, link in self.links.items()}
        changed |= {name: rate(getattr(self, name)) for name in ("bandwidth", "host_bandwidth")}
        return replace(self, **changed, latency=factor * self.latency, links=links)

    @property
    def are_peers_alike(self) -> bool:
        """Whether the workers of a stage are interchangeable: no speeds, and no link that names a pipeline."""
        return not self.speed and all(pair[0] == "*" == pair.split(">")[1][0] for pair in self.links)

    def speed_of(self, worker: Worker) -> float:
        return self.speed.get(str(worker), 1.0)

    def digest(self) -> str:
        prices = {name: value for name, value in self.to_json().items() if name != "measured"}
        for name in ("gather", "host_bandwidth"):
            if not prices[name]:
                del prices[name]  # keeps the digest of profiles written before this field
        return hashlib.sha256(msgspec.json.encode(prices, order="sorted")).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

    def save(self, path: str | Path) -> None:
        """Write the profile file atomically. Raises RecycleError when it cannot be written."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that `save` wrote. Raises JobError that names the file and the field."""
        return cls.from_bytes(read_whole(path, JobError, _MOST_BYTES), str(path))

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Profile:
        """Parse the content of a profile file; `name` begins every error message. Raises JobError."""
        if content.strip() and not content.lstrip().startswith(b"{"):
            raise JobError(f"{name}: is not a profile, which is a JSON object; give a job file with --job")
        try:
            unknown = set(entries(content, JobError)) - {f.name for f in fields(cls)}
            if unknown:
                raise JobError(f"{sorted(unknown)[0]!r} is not a field of a profile")
            return replace(msgspec.json.decode(content, type=cls))  # sets also the fields that are left out
        except (msgspec.MsgspecError, JobError, UnicodeDecodeError, RecursionError) as error:
            raise JobError(f"{name}: {error}") from None


def _require_quantity(name: str, value: Any, above_zero: bool = False) -> None:
    if value is not None and not (_is_number(value) and 0 <= value < math.inf and (value or not above_zero)):
        bound = "above 0" if above_zero else "at least 0"
        raise JobError(f"profile: {name} must be finite and {bound}, got {value!r}")


def _require_pair(key: str) -> None:
    match = _PAIR.fullmatch(key)
    if match is None:
        raise JobError(
            f"profile: links: {key!r} is not a pair of workers: write sender>receiver, for example 0.1>0.2,"
            f" with * for any number"
        )
    if match.groups()[:2] == match.groups()[2:] and "*" not in key:
        raise JobError(f"profile: links: {key!r} is one worker, which needs no link to itself")
