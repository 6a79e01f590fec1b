"""Plan: a schedule with the planner's results, as a native schedule file with the results as metadata.

A plan names *roles*: the dead roles of a failure vector are fixed. Workers of one stage are interchangeable, so one
plan serves every set of dead processes with its vector; `Plan.roles` assigns the roles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from recycle.errors import PlanError, ScheduleError
from recycle.files import write_whole
from recycle.ir.instruction import GatherParameters, Offload, Replay
from recycle.ir.kinds import is_kind
from recycle.ir.lower import implied_kinds, lower
from recycle.ir.replays import ReplayTarget, Rotation, with_replays
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.job.pricing import profile_of_layout
from recycle.job.profile import Profile
from recycle.job.shape import Placing, Shape, Worker
from recycle.plans.roles import Move, Vector, align, assign_roles, rename
from recycle.plans.verify import Certificate

VERSION = 1
"""Version of plan files and of cached planner results."""


class RaisedLimit(msgspec.Struct, frozen=True):
    """A memory limit of a job, and the smallest value that lets layers move, in the notation of the job file."""

    key: str
    value: int | float | list[int] | str
    needed: int | float | list[int] | str


class LayoutLimit(msgspec.Struct, frozen=True):
    """Why no layer moves in the plan of an elastic layout.

    Attributes:
        cause: "limits": a faster layout needs all of `limits` raised. "bound": the period is within 1 % of the bound of
            every layout. "none": no faster layout was found for any limit. "time": the search ended without a result.
        limits: limits that must be raised together; empty for other causes.
        period: upper bound of the period with the limits raised; None for other causes.
        layers: if "memory.state_limit" is among the limits, (most layers allowed on a worker, most layers on a worker
            of the faster layout).
    """

    cause: Literal["limits", "bound", "none", "time"]
    limits: tuple[RaisedLimit, ...] = ()
    period: float | None = None
    layers: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.cause == "bound":
            return "no layout can be more than 1 % faster"
        if self.cause == "none":
            return "no faster layout was found for any memory limit"
        if self.cause == "time":
            return "no faster layout was found in time"
        now = " and ".join(f"{_as_in_job(limit.key)} = {_value(limit.value)}" for limit in self.limits)
        needed = " and ".join(f"{limit.key.split('.')[1]} = {_value(limit.needed)}" for limit in self.limits)
        whole = ""
        if self.layers is not None:
            most, used = self.layers
            whole = f" (at most {most} layer{'s' * (most != 1)} on a worker, {used} needed)"
        verb = "allows" if len(self.limits) == 1 else "allow"
        return f"{now} {verb} no faster layout{whole}; {needed} would allow a period of {self.period:g}"


class PlacedPeriod(msgspec.Struct, frozen=True):
    """The best period found and the proven lower bound for a placement."""

    placement: Placing
    period: float
    lower_bound: float


def _as_in_job(key: str) -> str:
    section, name = key.split(".")
    return f"[{section}] {name}"


def _value(value: int | float | list[int] | str) -> str:
    return f"{value:g}" if isinstance(value, int | float) else json.dumps(value)


@dataclass(frozen=True)
class Plan:
    """A schedule with the planner's results.

    Attributes:
        schedule: compute-only, in role names; its `failed` are the dead roles.
        makespan: of one iteration from idle, in the profile's unit of time.
        period: between two iterations in steady state, as computed by `simulate`.
        lower_bound: proven for this failure vector and this placement. Another placement, such as zb-v's, may have a
            smaller period.
        seconds: planning time.
        profile: digest of the profile used for planning.
        limits: activations that the worker of each rank may hold; None for no limit.
        planner: the `[planner]` section and the result of the search.
        fixed_bound: lower bound for the job's own stages, if `lower_bound` covers every layout.
        layout_limit: why no layer of an elastic layout moves.
        certificate: proof of a bound that `plans.verify` verifies; None if no bound has one, as of elastic layouts.
        other_placement: what the other placement gives, if the job leaves the choice open.
        moves: workers that change stage before the schedule can run. The schedule then names *positions*: a position
            that a mover leaves is failed, a position that it takes over is live. Plans in role names have no moves.
    """

    schedule: Schedule
    makespan: float
    period: float
    lower_bound: float
    seconds: float
    profile: str
    limits: tuple[float, ...] | None = None
    planner: Mapping[str, Any] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    fixed_bound: float | None = None
    layout_limit: LayoutLimit | None = None
    certificate: Certificate | None = None
    other_placement: PlacedPeriod | None = None

    @property
    def certified_bound(self) -> float | None:
        """The bound that the certificate proves. `lower_bound` may be higher, from branch and bound."""
        return None if self.certificate is None else self.certificate.bound

    @property
    def shape(self) -> Shape:
        return self.schedule.shape

    @cached_property
    def vector(self) -> Vector:
        """Dead workers of each rank: the plan's key in a library."""
        return self.schedule.failure_vector()

    @property
    def gap(self) -> float:
        """(period - lower bound) / lower bound; 0 for a plan that is proven optimal."""
        return self.gap_to(self.lower_bound)

    def gap_to(self, bound: float) -> float:
        """Return (period - bound) / bound; 0 if equal within rounding."""
        excess = self.period - bound
        return 0.0 if excess <= 1e-9 * max(1.0, self.period) else excess / max(bound, 1e-300)

    @cached_property
    def hash(self) -> str:
        """Content hash of the executed schedule."""
        return schedule_hash(self.schedule)

    def summary(self) -> dict[str, Any]:
        """Return the figures as `recycle plan --json` prints them."""
        elastic: dict[str, Any] = {} if self.fixed_bound is None else {"fixed_bound": self.fixed_bound}
        if self.other_placement is not None:
            elastic["other_placement"] = msgspec.to_builtins(self.other_placement)
        if "layout" in self.schedule.metadata:
            elastic["layout"] = self.schedule.metadata["layout"]
        if self.layout_limit is not None:
            elastic["layout_limit"] = msgspec.to_builtins(self.layout_limit)
        if count := int(is_kind(self.schedule.columns.kind, Offload).sum()):
            elastic["offloads"] = count
        placed = {"placement": self.schedule.placing} if self.shape.chunks > 1 else {}
        built = {"certificate": msgspec.to_builtins(self.certificate), "moves": msgspec.to_builtins(list(self.moves))}
        return {**figures(self), **placed, **elastic, **built}

    def as_schedule(self) -> Schedule:
        """Return the schedule with all results as metadata."""
        inputs = {"profile": self.profile, "limits": self.limits and list(self.limits), "planner": dict(self.planner)}
        return self.schedule.with_metadata(**self.summary(), **inputs, plan_version=VERSION)

    def text(self) -> str:
        """Return the text of the plan file, a native schedule file."""
        return self.as_schedule().dumps()

    def show(self, profile: Profile | None = None) -> Any:
        """Draw the lanes as a picture for notebooks, timed by `profile`; its `.page()` supports zoom and search."""
        gap = f"gap {100 * self.gap:.3g} %" if self.gap > 0 else "optimal"
        dead = ", ".join(map(str, sorted(self.schedule.failed)))
        title = f"{f'without {dead}' if dead else 'all workers'}: period {self.period:.6g}, {gap}"
        return self.schedule.show(profile, title)

    def save(self, path: str | Path) -> None:
        """Write the plan file atomically."""
        write_whole(path, self.text())

    @classmethod
    def from_schedule(cls, schedule: Schedule, name: str = "plan") -> Plan:
        """Build the plan that the metadata of a schedule describes. Raises PlanError if they do not describe a plan."""
        try:
            stated = msgspec.structs.asdict(msgspec.convert(dict(schedule.metadata), type=_Metadata))
        except msgspec.ValidationError as error:
            raise PlanError(f"{name}: is a schedule but not a plan: metadata: {error}") from None
        version, vector = stated.pop("plan_version"), stated.pop("vector")
        if version != VERSION:
            raise PlanError(f"{name}: plan version {version} is not {VERSION}: plan it again")
        if vector != schedule.failure_vector():
            raise PlanError(f"{name}: metadata vector {vector} does not match the failed workers: plan it again")
        return cls(schedule, **stated)

    @classmethod
    def from_text(cls, text: str | bytes, name: str = "plan") -> Plan:
        """Parse the result of `text`. Raises ScheduleError or PlanError with a message that begins with `name`."""
        return cls.from_schedule(Schedule.loads(text, name), name)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file. Raises ScheduleError or PlanError that name the file."""
        return cls.from_schedule(Schedule.load(path), str(path))

    def roles(self, failed: Iterable[Worker]) -> dict[Worker, Worker]:
        """Return the role of each live process. Raises PlanError if `failed` has another vector."""
        return assign_roles(self.shape, self.schedule.failed, failed)

    def for_processes(self, failed: Iterable[Worker]) -> Plan:
        """Rewrite the plan in process names, also homes of micro-batches: its failed workers are `failed`."""
        failed = frozenset(failed)
        homes = align(self.shape, self.schedule.failed, failed)
        dead = {Worker(homes[worker.pipeline], worker.rank) for worker in self.schedule.failed}
        back = {homes[k]: k for k in range(self.shape.pipelines)}
        roles = {
            process: Worker(back[role.pipeline], role.rank)
            for process, role in assign_roles(self.shape, dead, failed).items()
        }
        return replace(self, schedule=rename(self.schedule, roles, homes))


def in_process_names(plan: Plan) -> Schedule:
    """Return the schedule of a plan with moves, in process names."""
    roles = {worker: worker for worker in plan.shape.workers()}
    for move in plan.moves:
        if not move.units:
            worker, role = Worker.parse(move.worker), Worker.parse(move.role)
            roles[worker], roles[role] = role, worker
    return rename(plan.schedule, roles)


def figures(plan: Any) -> dict[str, Any]:
    """Return the figures of a plan or library entry by name, with the vector as a list."""
    names = ("makespan", "period", "lower_bound", "certified_bound", "gap", "seconds")
    return {"vector": list(plan.vector), **{name: getattr(plan, name) for name in names}}


class _Metadata(msgspec.Struct):
    vector: Vector
    makespan: float
    period: float
    lower_bound: float
    seconds: float
    profile: str
    plan_version: int
    limits: tuple[float, ...] | None = None
    planner: dict[str, Any] = {}
    moves: tuple[Move, ...] = ()
    fixed_bound: float | None = None
    layout_limit: LayoutLimit | None = None
    certificate: Certificate | None = None
    other_placement: PlacedPeriod | None = None


def schedule_hash(schedule: Schedule) -> str:
    """Hash the executed content: shape, programs, failed workers and optimizer, without metadata."""
    text = replace(schedule, metadata={}).dumps()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_updates_of(schedule: Schedule, job: Job) -> Schedule:
    """Apply the job's ties, gathers and gradient buckets to the schedule, except buckets that it states itself.

    Raises ScheduleError if the schedule has other ties, or gathers parameters that the job does not shard.
    """
    gathers = schedule.gathers or bool((schedule.columns.kind == GatherParameters.kind).any())
    if gathers and not job.train.sharded_optimizer:
        raise ScheduleError(
            "the schedule gathers parameters (GATHER_PARAMS), but the job's optimizer is not sharded; use a schedule"
            " without GATHER_PARAMS, or set [train] sharded_optimizer"
        )
    schedule = replace(schedule, gathers=job.train.sharded_optimizer)
    if schedule.buckets == 1 and not is_kind(schedule.columns.kind, implied_kinds()).any():
        schedule = replace(schedule, buckets=job.train.reduce_buckets)
    ties = job.ties_among(schedule.shape.stages)
    if schedule.ties == ties:
        return schedule
    if schedule.ties:
        stages = " ".join(map(str, schedule.ties[0]))
        raise ScheduleError(
            f"the schedule ties stages {stages}, the job's model does not: [model] tied = true ties the first and the"
            f" last stage"
        )
    return replace(schedule, ties=ties)


_ROOM = "room_for_replays"


def rotation_of(schedule: Schedule, job: Job, disputed: Collection[ReplayTarget] = ()) -> Rotation | None:
    """Add the job's replays to the schedule; None if nothing is ever replayed. `disputed` as in `with_replays`."""
    every = job.integrity.every
    if every or disputed:
        profile = profile_of_layout(job, price(job).prices, schedule.shape)
        return with_replays(schedule, every, profile, disputed, _room_of(schedule) if every == "gaps" else None)
    if (schedule.columns.kind == Replay.kind).any():
        return Rotation(lower(schedule), 0)
    return None


def programs_of(schedule: Schedule, job: Job, disputed: Collection[ReplayTarget] = ()) -> Rotation:
    """Return `rotation_of`, or the schedule in every iteration if nothing is replayed; with the ramp of the batch."""
    rotation = rotation_of(schedule, job, disputed) or Rotation(lower(schedule), 0)
    return rotation if job.train.rampup_batch_size is None else replace(rotation, micro_batches=job.micro_batches_in)


def with_room(schedule: Schedule, job: Job) -> Schedule:
    """Store in the metadata which stages have room for replays, if the job asks for replays in gaps."""
    if job.integrity.every != "gaps" or _room_of(schedule) is not None:
        return schedule
    rotation = rotation_of(with_updates_of(schedule, job), job)
    assert rotation is not None, "there is a rate"
    return replace(schedule, metadata={**schedule.metadata, _ROOM: rotation.room()})


def _room_of(schedule: Schedule) -> list[list[int]] | None:
    try:
        return msgspec.convert(schedule.metadata.get(_ROOM), list[list[int]])
    except msgspec.ValidationError:
        return None
