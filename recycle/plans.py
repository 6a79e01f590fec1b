"""Plan and PlanLibrary: schedules for failure vectors, as files, and which process plays which role in them.

A plan is a schedule in *role* names: the dead roles of a failure vector are chosen once. Workers of one stage are
interchangeable, so any set of dead processes with that vector is served by the same plan; `Plan.roles` says who plays
what, survivors keeping their own positions wherever they can. A plan file *is* a native schedule file whose metadata
holds what the planner knows (period, bound, vector, ...), so `check`, `simulate` and the viewer read it as it is.

Nothing that is read from a directory is trusted: `PlanLibrary.get` checks what it loads and treats a half-written,
foreign or invalid file as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from recycle.errors import JobError, PlanError, RecycleError, ScheduleError
from recycle.files import write_whole
from recycle.ir.check import check
from recycle.ir.columns import Columns
from recycle.ir.formats import native
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import Job
from recycle.shape import Shape, Worker

Vector = tuple[int, ...]
"""Dead workers of each rank."""
Moves = list[dict[str, Any]]
"""Workers that change stage, with the bytes they copy; always empty so far."""
VERSION = 1
"""Of the metadata of a plan file, and of the planner's results that the cache may hold."""


@dataclass(frozen=True)
class Plan:
    """A schedule with what the planner knows about it.

    Attributes:
        schedule: compute-only, in role names; its `failed` are the dead roles.
        makespan: of one iteration from idle, in the profile's unit of time.
        period: between two iterations in steady state, as `simulate` gives it.
        lower_bound: proven for this failure vector: no schedule has a smaller period.
        seconds: what planning took.
        profile: digest of the profile that it was planned with.
        limits: activations that the worker of each rank may hold; None when there is no limit.
        planner: the `[planner]` section and what the search came to.
    """

    schedule: Schedule
    makespan: float
    period: float
    lower_bound: float
    seconds: float
    profile: str
    limits: tuple[float, ...] | None = None
    planner: Mapping[str, Any] = field(default_factory=dict)

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
        excess = self.period - self.lower_bound
        return 0.0 if excess <= 1e-9 * max(1.0, self.period) else excess / max(self.lower_bound, 1e-300)

    @cached_property
    def hash(self) -> str:
        """Content hash of what runs."""
        return schedule_hash(self.schedule)

    def summary(self) -> dict[str, Any]:
        """The figures as `recycle plan --json` prints them."""
        return {
            "vector": list(self.vector),
            "makespan": self.makespan,
            "period": self.period,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "seconds": self.seconds,
            "moves": [],
        }

    def text(self) -> str:
        """The plan file's text: a native schedule file."""
        figures = {**self.summary(), "profile": self.profile, "limits": self.limits and list(self.limits)}
        metadata = {**self.schedule.metadata, **figures, "planner": dict(self.planner), "plan_version": VERSION}
        return native.dumps(replace(self.schedule, metadata=metadata))

    def save(self, path: str | Path) -> None:
        """Write the plan file; whole or not at all."""
        write_whole(path, self.text())

    @classmethod
    def from_schedule(cls, schedule: Schedule, name: str = "plan") -> Plan:
        """The plan that a schedule's metadata describes. Raises PlanError when they are not those of a plan."""
        try:
            stated = msgspec.convert(dict(schedule.metadata), type=_Metadata)
        except msgspec.ValidationError as error:
            raise PlanError(f"{name}: is a schedule but not a plan: metadata: {error}") from None
        if stated.plan_version != VERSION:
            raise PlanError(f"{name}: plan version {stated.plan_version} is not {VERSION}: plan it again")
        if stated.vector != schedule.failure_vector():
            raise PlanError(f"{name}: metadata vector {stated.vector} is not that of the failed workers: plan it again")
        return cls(
            schedule,
            stated.makespan,
            stated.period,
            stated.lower_bound,
            stated.seconds,
            stated.profile,
            stated.limits,
            stated.planner,
        )

    @classmethod
    def from_text(cls, text: str | bytes, name: str = "plan") -> Plan:
        """Read `text()` back. Raises ScheduleError or PlanError that begin with `name`."""
        return cls.from_schedule(native.loads(text, name), name)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file. Raises ScheduleError or PlanError that name the file."""
        return cls.from_schedule(Schedule.load(path), str(path))

    def roles(self, failed: Iterable[Worker]) -> dict[Worker, Worker]:
        """Role of each live process when `failed` are dead. Raises PlanError when the vector is another one."""
        return assign_roles(self.shape, self.schedule.failed, failed)

    def for_processes(self, failed: Iterable[Worker]) -> Plan:
        """The same plan written in the names of the processes: its failed workers are `failed`.

        Micro-batches are renamed along with whole pipelines where that leaves more workers in their positions, so
        that the re-routed ones are those whose home is dead.
        """
        failed = frozenset(failed)
        homes = _align(self.shape, self.schedule.failed, failed)
        dead = {Worker(homes[worker.pipeline], worker.rank) for worker in self.schedule.failed}
        back = {homes[k]: k for k in range(self.shape.pipelines)}
        roles = {
            process: Worker(back[role.pipeline], role.rank)
            for process, role in assign_roles(self.shape, dead, failed).items()
        }
        return replace(self, schedule=rename(self.schedule, roles, homes))


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


def schedule_hash(schedule: Schedule) -> str:
    """Content hash of what runs: shape, programs, failed workers and optimizer; not of how it was found."""
    text = native.dumps(replace(schedule, metadata={}))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def failure_vector(shape: Shape, failed: Iterable[Worker]) -> Vector:
    """Dead workers of each rank. Raises PlanError for a worker outside the shape."""
    vector = [0] * shape.ranks
    for worker in set(failed):
        try:
            shape.require(worker, "failed workers")
        except JobError as error:
            raise PlanError(str(error)) from None
        vector[worker.rank] += 1
    return tuple(vector)


def likely_vectors(shape: Shape, failures: int) -> Iterator[Vector]:
    """All failure vectors with up to `failures` dead that leave each stage a live host, likeliest first.

    Fewer failures are likelier. Among equally many, spread ones: more sets of workers have that vector.
    """
    for total in range(failures + 1):
        found: set[Vector] = set()
        for ranks in combinations_with_replacement(range(shape.ranks), total):
            vector = tuple(ranks.count(rank) for rank in range(shape.ranks))
            if max(vector) < shape.pipelines:
                found.add(vector)
        yield from sorted(found, key=lambda vector: (max(vector), vector[::-1]))


def dead_roles(shape: Shape, vector: Sequence[int]) -> frozenset[Worker]:
    """The canonical dead roles of a vector: the last pipelines of each stage.

    So dead roles of several stages lie in the same pipelines, which is nearly always as good or better for the period.

    Raises:
        PlanError: the vector has another length, or leaves a stage without a live worker.
    """
    if len(vector) != shape.ranks:
        raise PlanError(f"failure vector {tuple(vector)}: needs {shape.ranks} entries, one per rank")
    for rank, count in enumerate(vector):
        if not 0 <= count <= shape.pipelines:
            raise PlanError(f"failure vector {tuple(vector)}: rank {rank} has {shape.pipelines} workers")
        if count == shape.pipelines:
            raise PlanError(f"no live worker is left for stage {rank}: all {shape.pipelines} of its workers are dead")
    return frozenset(Worker(shape.pipelines - 1 - k, rank) for rank, count in enumerate(vector) for k in range(count))


def assign_roles(shape: Shape, dead: Iterable[Worker], failed: Iterable[Worker]) -> dict[Worker, Worker]:
    """Role of each live process, where `dead` are the plan's dead roles and `failed` the dead processes.

    Whoever can keep the role of its own position does; the others take the roles of the dead of their stage, in order.

    Raises:
        PlanError: the two sets have different vectors.
    """
    dead, failed = frozenset(dead), frozenset(failed)
    here, there = failure_vector(shape, failed), failure_vector(shape, dead)
    if here != there:
        raise PlanError(f"a plan for vector {there} cannot serve the failure vector {here}")
    roles: dict[Worker, Worker] = {}
    for rank in range(shape.ranks):
        column = [Worker(k, rank) for k in range(shape.pipelines)]
        vacant = iter([worker for worker in column if worker in failed and worker not in dead])
        for process in column:
            if process not in failed:
                roles[process] = next(vacant) if process in dead else process
    return roles


def _align(shape: Shape, dead: frozenset[Worker], failed: frozenset[Worker]) -> list[int]:
    """Pipeline permutation (role pipeline -> process pipeline) that brings dead roles onto dead processes, greedily."""
    at = [{w.rank for w in dead if w.pipeline == k} for k in range(shape.pipelines)]
    to = [{w.rank for w in failed if w.pipeline == k} for k in range(shape.pipelines)]
    scored = sorted(
        (-len(at[k] & to[p]), len(at[k] ^ to[p]), k != p, k, p)
        for k in range(shape.pipelines)
        for p in range(shape.pipelines)
    )
    homes: dict[int, int] = {}
    for *_, k, p in scored:
        if k not in homes and p not in homes.values():
            homes[k] = p
    return [homes[k] for k in range(shape.pipelines)]


def rename(schedule: Schedule, roles: Mapping[Worker, Worker], homes: Sequence[int] | None = None) -> Schedule:
    """The schedule in process names: each process gets the program of its role.

    Peers are interchangeable, so validity, makespan and period stay (as long as workers are equally fast).

    Args:
        roles: process -> role. Workers left out are dead, and take the dead roles in order.
        homes: pipeline -> new pipeline of its micro-batches; as they are when left out.

    Raises:
        PlanError: `roles` is no permutation within the stages.
    """
    shape = schedule.shape
    full = dict(roles)
    for rank in range(shape.ranks):
        column = [Worker(k, rank) for k in range(shape.pipelines)]
        rest = [role for role in column if role not in roles.values()]
        without = [process for process in column if process not in roles]
        if len(rest) != len(without):
            raise PlanError(f"roles of stage {rank} are no permutation: two processes play one role, or change stage")
        full.update(zip(without, rest, strict=True))
    role_of = [shape.worker_index(full[process]) for process in shape.workers()]
    process_of = np.full(shape.worker_count + 1, -1, dtype=np.int64)  # the last entry maps peer -1 to itself
    process_of[role_of] = np.arange(shape.worker_count)
    c = schedule.columns
    rows = np.concatenate([np.arange(c.offsets[w], c.offsets[w + 1]) for w in role_of]).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.diff(c.offsets)[role_of])]).astype(np.int64)
    taken = c.take(rows, offsets)
    columns = {name: getattr(taken, name) for name in Columns.FIELDS}
    columns["peer"] = process_of[taken.peer]
    if homes is not None:
        to = np.array([*homes, -1])
        columns["pipeline"], columns["pipeline2"] = to[taken.pipeline], to[taken.pipeline2]
    return replace(
        schedule,
        columns=Columns.from_arrays(offsets, **columns),
        placement=tuple(schedule.placement[w] for w in role_of),
        failed=frozenset(process for process, role in full.items() if role in schedule.failed),
    )


def plan_key(job: Job, vector: Sequence[int]) -> str:
    """Content hash of everything that a plan of `vector` depends on: the cache's and the library's file name."""
    asked = {
        "version": VERSION,
        "shape": msgspec.to_builtins(job.grid),
        "profile": job.profile().digest(),
        "limits": job.activation_limits(),
        "planner": {key: value for key, value in msgspec.to_builtins(job.planner).items() if key != "ahead"},
        "vector": list(vector),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where plans outlive a run: $RECYCLE_CACHE/plans, else $XDG_CACHE_HOME/recycle/plans, else ~/.cache."""
    if environment.get("RECYCLE_CACHE"):
        return Path(environment["RECYCLE_CACHE"]) / "plans"
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path(environment.get("HOME") or Path.home()) / ".cache") / "recycle" / "plans"


def cache_path(directory: str | Path, job: Job, vector: Sequence[int]) -> Path:
    """File of the plan of `vector` in a cache directory."""
    return Path(directory) / f"{plan_key(job, vector)}.json"


def cached_plan(path: str | Path, job: Job, vector: Sequence[int]) -> Plan | None:
    """The plan in `path` if it is whole, of this job and vector, valid, and its figures are true; else None."""
    try:
        plan = Plan.load(path)
        limits = job.activation_limits()
        fits = (
            plan.shape == job.shape
            and plan.vector == tuple(vector)
            and plan.profile == job.profile().digest()
            and plan.limits == (None if limits is None else tuple(limits))
        )
        if not fits or errors(plan.schedule, job):
            return None
        timeline = simulate(plan.schedule, job.profile())
        stated, found = (plan.period, plan.makespan), (timeline.period, timeline.makespan)
        return plan if np.allclose(stated, found, rtol=1e-6) and plan.lower_bound <= plan.period else None
    except RecycleError:
        return None


def errors(schedule: Schedule, job: Job) -> list[str]:
    """What `check` has against running the schedule under the job's limits; empty when nothing."""
    found = check(schedule, profile=job.profile(), limits=job.activation_limits())
    return [finding.message for finding in found if finding.severity == "error"]


@dataclass(frozen=True)
class PlanLibrary:
    """Plans of one job in a directory, one file per failure vector: `0-0-1-0.json` is one dead worker at rank 2.

    Args:
        directory: is made when the first plan is added, or by `prepare`.
        job: what the plans must be for. None takes any checked plan, whatever job it was made for.
    """

    directory: Path
    job: Job | None = None

    def path(self, vector: Sequence[int]) -> Path:
        return Path(self.directory) / f"{'-'.join(map(str, vector))}.json"

    def add(self, plan: Plan) -> Path:
        """Store a plan that passes `check`. Raises PlanError when it does not, or the directory is not writable."""
        found = self._errors(plan.schedule)
        if found:
            raise PlanError(f"plan of vector {plan.vector} is not valid and was not stored: {found[0]}")
        self.prepare()
        path = self.path(plan.vector)
        plan.save(path)
        return path

    def prepare(self) -> None:
        """Make the directory. Raises PlanError when it cannot be made or written, before any time is spent."""
        directory = Path(self.directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(f"{directory}: cannot be made a plan library ({error.strerror})") from None
        if not os.access(directory, os.W_OK):
            raise PlanError(f"{directory}: is not writable: choose another directory for the plan library")

    def _errors(self, schedule: Schedule) -> list[str]:
        if self.job is not None:
            return errors(schedule, self.job)
        return [finding.message for finding in check(schedule) if finding.severity == "error"]

    def get(self, vector: Sequence[int]) -> Plan | None:
        """The plan of a vector; None when there is none, or its file is half-written, foreign or invalid."""
        if self.job is not None:
            return cached_plan(self.path(vector), self.job, vector)
        try:
            plan = Plan.load(self.path(vector))
        except (ScheduleError, PlanError):
            return None
        return plan if plan.vector == tuple(vector) and not self._errors(plan.schedule) else None

    def vectors(self) -> list[Vector]:
        """Vectors that have a file, fewest failures first."""
        found = []
        for path in Path(self.directory).glob("*.json"):
            parts = path.stem.split("-")
            if all(part.isdecimal() for part in parts):
                found.append(tuple(map(int, parts)))
        return sorted(found, key=lambda vector: (sum(vector), vector))

    def list(self) -> Iterator[Plan]:
        """The usable plans, fewest failures first."""
        for vector in self.vectors():
            plan = self.get(vector)
            if plan is not None:
                yield plan

    def lookup(self, failed: Iterable[Worker], shape: Shape | None = None) -> tuple[Plan, dict[Worker, Worker], Moves]:
        """(plan, role of each live process, moves) for a set of dead processes.

        Moves (workers that change stage) are always empty: a worker stays at the stage whose weights it has.

        Args:
            failed: the dead processes, whatever their number per stage.
            shape: of the job; may be left out where the library knows its job.

        Raises:
            PlanError: the library has no usable plan for that failure vector.
        """
        failed = frozenset(failed)
        if shape is None:
            if self.job is None:
                raise PlanError(f"{self.directory}: a lookup needs the job or its shape")
            shape = self.job.shape
        vector = failure_vector(shape, failed)
        plan = self.get(vector)
        if plan is None:
            raise PlanError(f"{self.directory}: no plan for failure vector {vector}; run `recycle plan` for it")
        return plan, plan.roles(failed), []
