"""PlanLibrary: the plans of a job in a directory, with fast look-ups for any set of dead workers; and the plan cache.

A plan is one file named by the hash of its content; `manifest.json` lists the file and the figures of each failure
vector. A file counts as absent unless its content has that hash. Limits: a look-up trusts the manifest. The cache of
the user has one file per plan, named by everything that the plan depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from recycle.errors import PlanError, RecycleError, ScheduleError
from recycle.files import read_whole, write_whole
from recycle.ir.check import check
from recycle.ir.event_graph import EventGraph
from recycle.ir.lower import lowered_graph
from recycle.ir.schedule import Placement, Schedule, loop_placement, placement_of
from recycle.ir.simulate import time_graph
from recycle.job import Job, PricedJob, price
from recycle.job.profile import Profile
from recycle.job.sections import AUTO
from recycle.job.shape import Shape, Worker
from recycle.plans.plan import VERSION, Plan, figures
from recycle.plans.roles import Arrangement, Move, Vector, arrange, failure_vector, roles_after

MANIFEST = "manifest.json"
FORMAT = "recycle-plan-library"
LOADED = 32
MOST = 4
"""Number of plans tried without moves, and as many with moves, best period first."""


NOT_IN_PLAN = ("ahead", "move", "iterations_between_changes")
"""Keys of `[planner]` that select vectors; the plan of a vector does not depend on them."""


def plan_key(job: PricedJob, vector: Sequence[int]) -> str:
    """Hash everything that a plan of `vector` depends on. The hash is the file name in the cache."""
    asked = {
        "version": VERSION,
        "shape": msgspec.to_builtins(job.grid),
        "profile": job.prices.digest(),
        "limits": job.limits,
        "planner": {key: value for key, value in msgspec.to_builtins(job.planner).items() if key not in NOT_IN_PLAN},
        "vector": list(vector),
    }
    if job.ties:
        asked["ties"] = job.ties
    if job.train.reduce_buckets > 1:
        asked["buckets"] = job.train.reduce_buckets
    if job.train.sharded_optimizer:
        asked["gathers"] = True
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Return the plan cache: $RECYCLE_CACHE/plans, else $XDG_CACHE_HOME/recycle/plans, else ~/.cache/recycle/plans."""
    if environment.get("RECYCLE_CACHE"):
        return Path(environment["RECYCLE_CACHE"]) / "plans"
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path(environment.get("HOME") or Path.home()) / ".cache") / "recycle" / "plans"


def cache_path(directory: str | Path, job: PricedJob, vector: Sequence[int]) -> Path:
    """Return the file of the plan of `vector` in a cache directory."""
    return Path(directory) / f"{plan_key(job, vector)}.json"


def cached_plan(path: str | Path, job: PricedJob, vector: Sequence[int]) -> Plan | None:
    """Read the plan in `path`; None unless it is intact, valid, for this job and vector, and its figures are true."""
    try:
        plan = Plan.load(path)
        fits = (plan.shape, plan.vector, _key_of_plan(plan)) == (job.shape, tuple(vector), job_key(job))
        return plan if fits and is_true(plan, job) else None
    except RecycleError:
        return None


def is_true(plan: Plan, job: PricedJob) -> bool:
    """Return whether a plan passes `check` under the job's limits and has the stated period and makespan."""
    graph = lowered_graph(plan.schedule)
    if errors(plan.schedule, job, graph):
        return False
    timeline = time_graph(graph, job.prices)
    stated, simulated = (plan.period, plan.makespan), (timeline.period, timeline.makespan)
    return bool(np.allclose(stated, simulated, rtol=1e-6)) and plan.lower_bound <= plan.period * (1 + 1e-9)


def errors(schedule: Schedule, job: PricedJob | None, graph: EventGraph | None = None) -> list[str]:
    """Return the error messages of `check` under the job's limits, if any job is given; `graph` as in `check`."""
    profile, limits = (None, None) if job is None else (job.prices, job.limits)
    findings = check(schedule, profile=profile, limits=limits, graph=graph)
    return [finding.message for finding in findings if finding.severity == "error"]


class Entry(msgspec.Struct, frozen=True):
    """One plan as listed in the manifest.

    Attributes:
        vector: dead workers of each rank.
        digest: hash of the file content.
        hash: content hash of the schedule, its name in runs.
        makespan, period, lower_bound, certified_bound, gap, seconds, profile: as in `Plan`.
        job: hash of all that the plan must fit: shape, profile, limits and techniques.
        quick: whether no search was made yet, so a better plan may exist.
    """

    vector: Vector
    file: str
    digest: str
    hash: str
    makespan: float
    period: float
    lower_bound: float
    gap: float
    seconds: float
    profile: str
    job: str
    quick: bool = False
    certified_bound: float | None = None

    @classmethod
    def of(cls, plan: Plan, file: str = "", digest: str = "") -> Entry:
        return cls(
            **{**figures(plan), "vector": plan.vector},
            file=file,
            digest=digest,
            hash=plan.hash,
            profile=plan.profile,
            job=_key_of_plan(plan),
            quick=bool(plan.planner.get("quick")) and plan.gap > 0,
        )

    @property
    def failures(self) -> int:
        return sum(self.vector)

    def summary(self) -> dict[str, Any]:
        """Return the figures as `recycle plan --json` prints them."""
        return {**figures(self), "moves": []}


class _Manifest(msgspec.Struct, frozen=True):
    format: str
    version: int
    plans: list[Entry]


def job_key(job: PricedJob) -> str:
    """Hash what a library's plans must fit. Planning effort and seed do not count."""
    section, train = job.planner, job.train
    offloads = job.memory.offload == AUTO and job.limits is not None
    updates = job.ties, train.reduce_buckets, train.sharded_optimizer, offloads
    placement = placement_of(job.shape)
    return _key(job.shape, placement, job.prices.digest(), job.limits, section.decoupled, section.staggered, updates)


def _key_of_plan(plan: Plan) -> str:
    limits = None if plan.limits is None else list(plan.limits)
    staggered = plan.schedule.optimizer == "staggered"
    decoupled = bool(plan.planner.get("decoupled", True))
    updates = plan.schedule.ties, plan.schedule.buckets, plan.schedule.gathers, bool(plan.planner.get("offload"))
    return _key(plan.shape, plan.schedule.placement, plan.profile, limits, decoupled, staggered, updates)


def _key(
    shape: Shape,
    placement: Placement,
    profile: str,
    limits: list[float] | None,
    decoupled: bool,
    staggered: bool,
    updates: tuple[tuple[tuple[int, ...], ...], int, bool, bool],
) -> str:
    sizes = [shape.pipelines, shape.ranks, shape.micro_batches, shape.chunks]
    ties, buckets, *flags = updates
    updates_part: list[Any] = [part for part in (ties, buckets) if part not in ((), 1)]
    updates_part += [name for name, flag in zip(("gathers", "offload"), flags, strict=True) if flag]
    updates_part += [placement] if placement != loop_placement(shape) else []
    text = json.dumps([VERSION, sizes, profile, limits, decoupled, staggered, *updates_part])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _by_failures(entry: Entry) -> tuple[int, Vector]:
    return entry.failures, entry.vector


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


class PlanLibrary:
    """The plans of one job in a directory, which is created on demand. A `job` of None accepts any checked plan."""

    def __init__(self, directory: Path, job: Job | None = None) -> None:
        self.directory, self.job = Path(directory), None if job is None else price(job)
        self._stamp: tuple[int, ...] | None = None
        self._entries: dict[Vector, Entry] = {}
        self._is_listed = False
        self._loaded: dict[str, Plan] = {}

    @cached_property
    def key(self) -> str | None:
        return None if self.job is None else job_key(self.job)

    def prepare(self) -> None:
        """Create the directory and adopt unlisted plan files. Raises PlanError if it cannot be created or written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(
                f"{self.directory}: the plan library cannot be created ({error.strerror}); choose another directory"
            ) from None
        if not os.access(self.directory, os.W_OK):
            raise PlanError(f"{self.directory}: is not writable: choose another directory for the plan library")
        entries = dict(self.entries())
        adopted = self._adopt({entry.file for entry in entries.values()})
        new = {vector: entry for vector, entry in adopted.items() if not self._fits(entries.get(vector))}
        if new or (entries and not self._is_listed):
            self._write({**entries, **new})

    def add(self, plan: Plan) -> Entry:
        """Replace the plan of its vector. Raises PlanError if it is invalid or has moves, or cannot be written."""
        messages = errors(plan.schedule, self.job)
        if messages or plan.moves:
            raise PlanError(
                f"plan of vector {plan.vector} is not valid and was not stored: {(messages or ['has moves'])[0]}"
            )
        if not self.directory.is_dir():
            self.prepare()
        text = plan.text()
        digest = _digest(text.encode())
        entry = Entry.of(plan, f"{digest}.json", digest)
        write_whole(self.directory / entry.file, text)
        entries = dict(self.entries())
        before = entries.get(entry.vector)
        self._write({**entries, entry.vector: entry})
        if before is not None and before.file != entry.file:
            self._file(before).unlink(missing_ok=True)
        return entry

    def entries(self) -> dict[Vector, Entry]:
        """Return all entries of the manifest, for any job; read again after the file changed."""
        stamp = self._now()
        if stamp != self._stamp:
            listed = self._listed()
            self._is_listed = listed is not None
            self._entries = self._adopt(set()) if listed is None else {entry.vector: entry for entry in listed}
            self._stamp = stamp
        return self._entries

    def _listed(self) -> list[Entry] | None:
        with contextlib.suppress(PlanError, msgspec.MsgspecError):
            read = msgspec.json.decode(read_whole(self.directory / MANIFEST, PlanError), type=_Manifest)
            return read.plans if (read.format, read.version) == (FORMAT, VERSION) else None
        return None

    def files(self) -> list[Path]:
        """Return the files of the listed plans; without a readable manifest, all files that may hold a plan."""
        listed = self._listed()
        return self._candidates() if listed is None else sorted(map(self._file, listed))

    def _candidates(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("*.json") if path.name != MANIFEST)

    def _now(self) -> tuple[int, ...]:
        for path in (self.directory / MANIFEST, self.directory):
            with contextlib.suppress(OSError):
                status = path.stat()
                return status.st_ino, status.st_mtime_ns, status.st_size
        return ()

    def usable(self) -> list[Entry]:
        """Return the plans for the library's job, fewest failures first."""
        return sorted(filter(self._fits, self.entries().values()), key=_by_failures)

    def vectors(self) -> list[Vector]:
        """Return the vectors with a plan for the library's job, fewest failures first."""
        return [entry.vector for entry in self.usable()]

    def entry(self, vector: Sequence[int]) -> Entry | None:
        """Return the entry of a vector; None without a plan for the library's job."""
        entry = self.entries().get(tuple(vector))
        return entry if self._fits(entry) else None

    def get(self, vector: Sequence[int]) -> Plan | None:
        """Return the plan of a vector; None without one, or if its file is truncated, foreign or edited."""
        entry = self.entry(vector)
        return None if entry is None else self.read(entry)

    def plans(self) -> Iterator[Plan]:
        """Return the usable plans, fewest failures first."""
        return filter(None, map(self.read, self.usable()))

    def read(self, entry: Entry) -> Plan | None:
        """Read the plan of an entry, for any job; None if the file is not the stored content."""
        if entry.digest not in self._loaded:
            content = self._verified(self._file(entry), entry.digest)
            if content is None:
                return None
            try:
                plan = Plan.from_text(content, entry.file)
            except RecycleError:
                return None
            if plan.vector != entry.vector or _key_of_plan(plan) != entry.job:
                return None
            while len(self._loaded) >= LOADED:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[entry.digest] = plan
        return self._loaded[entry.digest]

    def proven(self, entry: Entry | None) -> Plan | None:
        """Read a plan, check and simulate it, and compare the figures; None if anything differs."""
        plan = None if entry is None else self.read(entry)
        if entry is None or plan is None or self.job is None or not is_true(plan, self.job):
            return None
        return plan if Entry.of(plan, entry.file, entry.digest) == entry else None

    def _file(self, entry: Entry) -> Path:
        return self.directory / Path(entry.file).name  # the manifest may name a file elsewhere

    @staticmethod
    def _verified(path: Path, digest: str) -> bytes | None:
        try:
            content = read_whole(path, PlanError)
        except PlanError:
            return None
        return content if _digest(content) == digest else None

    def lookup(
        self, failed: Iterable[Worker], shape: Shape | None = None
    ) -> tuple[Plan, dict[Worker, Worker], list[Move]]:
        """Return (plan, role of each working process, moves) for a set of dead processes; the others stand idle.

        Choose the smallest period; each move adds its copy time divided by the iterations until the next change.
        `shape` is optional if the library has a job.

        Raises:
            PlanError: no usable plan can be filled, or workers differ in speed or links, so peers differ.
        """
        failed = frozenset(failed)
        if shape is None:
            if self.job is None:
                raise PlanError(f"{self.directory}: a lookup needs the job or its shape")
            shape = self.job.shape
        if self.job is not None and not self.job.prices.are_peers_alike:
            raise PlanError(
                f"{self.directory}: the profile's workers differ in speed or links: plan for this set of dead workers"
            )
        vector = failure_vector(shape, failed)
        for entry, arrangement in self._nearest(shape, failed, vector):
            plan = self.read(entry)
            if plan is not None and plan.shape == shape:
                roles = roles_after(arrangement.moves, plan.roles(arrangement.vacant))
                return plan, roles, list(arrangement.moves)
        raise PlanError(
            f"{self.directory}: no plan for failure vector {vector}, nor one for more dead workers;"
            f" run `recycle plan` for it"
        )

    def _nearest(self, shape: Shape, failed: frozenset[Worker], vector: Vector) -> Iterator[tuple[Entry, Arrangement]]:
        entries = [entry for entry in self.usable() if len(entry.vector) == shape.ranks]
        vectors = np.array([entry.vector for entry in entries], dtype=np.int64).reshape(-1, shape.ranks)
        periods = [entry.period for entry in entries]
        short = np.maximum(np.array(vector) - vectors, 0).sum(axis=1)
        spare = np.maximum(vectors - np.array(vector), 0).sum(axis=1)
        order = np.lexsort((spare, short, periods))
        chosen = order[short[order] == 0][:MOST].tolist()
        profile, horizon = Profile.uniform(), 1.0
        if self.job is not None:
            profile, horizon = self.job.prices, self.job.planner.iterations_between_changes
            if self.job.planner.move:
                chosen += order[(short[order] > 0) & (short[order] <= spare[order])][:MOST].tolist()
        scored = []
        for i in chosen:
            period = entries[i].period
            if short[i]:
                period += arrange(shape, failed, entries[i].vector, profile).seconds / horizon
            scored.append((period, int(short[i]), int(spare[i]), i))
        for *_, i in sorted(scored):
            yield entries[i], arrange(shape, failed, entries[i].vector, profile)

    def _fits(self, entry: Entry | None) -> bool:
        return entry is not None and (self.key is None or entry.job == self.key)

    def _adopt(self, listed: set[str]) -> dict[Vector, Entry]:
        adopted: dict[Vector, Entry] = {}
        for path in self._candidates():
            if path.name in listed:
                continue
            try:
                content = read_whole(path, PlanError)
                plan = Plan.from_text(content, path.name)
            except (ScheduleError, PlanError):
                continue
            if self.job is None:
                is_valid = not errors(plan.schedule, None)
            else:
                is_valid = cached_plan(path, self.job, plan.vector) is not None
            if not is_valid or plan.moves:
                continue
            entry = Entry.of(plan, path.name, _digest(content))
            kept = adopted.get(entry.vector)
            if self._fits(entry) and (kept is None or (entry.quick, entry.period) < (kept.quick, kept.period)):
                adopted[entry.vector] = entry
        return adopted

    def _write(self, entries: dict[Vector, Entry]) -> None:
        manifest = _Manifest(FORMAT, VERSION, sorted(entries.values(), key=_by_failures))
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        write_whole(self.directory / MANIFEST, text.decode() + "\n")
        self._entries, self._stamp, self._is_listed = entries, self._now(), True
