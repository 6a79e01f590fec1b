"""Verify the bound of a plan from its certificate, with nothing of the planner.

A certificate states that no iteration fits into a window, and lists rows that prove it: instances of the rules of
`docs/explanations/bounds.md`, with multipliers. One row of `ALONE` contradicts the window by itself. Rows of `TOGETHER`
form a linear program over the operations done; their weighted sum limits how many micro-batches complete. Every
schedule satisfies every row, so wrong multipliers only prove less.

Rows are derived again from the schedule and the profile, in fractions. Numbers are read with 12 digits; periods and
bounds are compared with a relative tolerance of 1e-9.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate, chain, product
from math import ceil, floor, gcd, inf, lcm
from typing import Any

import msgspec
import numpy as np

from recycle.errors import PlanError
from recycle.ir.check import check
from recycle.ir.instruction import BackwardWeight, HostCopy
from recycle.ir.kinds import is_kind
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import timeline_of
from recycle.job.profile import Profile

ALONE = ("load", "detour", "lane")
TOGETHER = ("rate", "grow", "order", "path", "memory", "share", "end")
MOST_POINTS = 1_000
TOLERANCE = Fraction(1, 10**9)
F, I, W = 0, 1, 2  # noqa: E741
Part = tuple[int, int, int]
"""Stage, group of hosts, kind."""
Row = tuple[Sequence[tuple[Part, int, Fraction | int]], Fraction | int]
"""The inequality: sum of coefficient * done(part, point of the grid) <= limit."""


class Certificate(msgspec.Struct, frozen=True):
    """Proof that no iteration fits into a window.

    Attributes:
        bound: proven lower bound on the period, in the profile's unit of time.
        unit: unit of `window` and `grid`.
        window: longest time into which no iteration fits.
        profile: fields of the profile that differ from the defaults.
        rows: (rule, place, points of the grid, multipliers).
        stages: of the linear program, ascending.
        grid: times of the linear program, as (first, step, count).
    """

    bound: float
    unit: float
    window: float
    profile: dict[str, Any]
    rows: list[tuple[str, list[int], list[int], list[float]]]
    stages: list[int] = []
    grid: list[tuple[float, float, int]] = []


class _Stated(msgspec.Struct):
    period: float
    profile: str
    limits: list[float] | None = None
    planner: dict[str, Any] = {}
    certificate: Certificate | None = None


class NotProven(PlanError):
    """A plan whose certificate does not prove its bound. The message names the row, if one is at fault."""


def verify(schedule: Schedule, name: str = "plan") -> tuple[float, float]:
    """Return the bound that the certificate of a plan proves, and the period of its schedule, which is checked.

    Raises:
        NotProven: the schedule is not valid, has another period, or the rows do not prove the bound.
        PlanError: the metadata are not a plan's.
    """
    stated, profile = _read(schedule, name)
    for finding in check(schedule, profile=profile, limits=stated.limits):
        if finding.severity == "error":
            raise NotProven(f"the schedule is not valid: {finding.message}")
    bound, period = prove(schedule, name), timeline_of(schedule, profile).period
    if abs(period - stated.period) > TOLERANCE * period or bound > period * (1 + TOLERANCE):
        raise NotProven(f"the schedule has a period of {period:.12g}, the plan states {stated.period:.12g}")
    return bound, period


def prove(schedule: Schedule, name: str = "plan") -> float:
    """Return the bound that the certificate in the metadata proves; raises as `verify`, but ignores the schedule."""
    stated, profile = _read(schedule, name)
    certificate = stated.certificate
    if certificate is None or not certificate.unit > 0 or profile.digest() != stated.profile:
        raise NotProven("the plan has no certificate for its profile")
    job = ExactJob(schedule, stated, profile, certificate)
    rule, place, *_ = certificate.rows[0] if certificate.rows else ("", [0])
    if rule in ALONE:
        if not _derived(getattr(job, rule), 1, rule, place):
            raise NotProven(f"row 1 ({rule}, stage {place[0]}): an iteration may fit into the window")
    elif _most_completed(Program(job, certificate), certificate.rows) >= job.n:
        raise NotProven(f"the rows leave room for all {job.n} micro-batches in the window")
    proven = (job.window // job.grain + 1) * job.grain * job.unit
    if _exact(certificate.bound) > proven * (1 + TOLERANCE):
        raise NotProven(f"the rows prove {float(proven):.12g}, the certificate states {certificate.bound:.12g}")
    return certificate.bound


def _most_completed(program: Program, rows: Sequence[Any]) -> Fraction:
    goal, most, sums = Fraction(1), Fraction(0), dict[tuple[Part, int], Fraction]()
    for number, (rule, place, points, multipliers) in enumerate(rows, 1):
        for point, multiplier in zip(points, map(_exact, multipliers), strict=False):
            terms, limit = _derived(partial(program.row, rule), number, rule, [*place, point])
            if multiplier < 0:
                raise NotProven(f"row {number} ({rule}, stage {place[0]}): a multiplier is negative")
            most += multiplier * limit
            goal -= multiplier * (rule == "end")
            for part, at, coefficient in terms:
                sums[part, at] = sums.get((part, at), Fraction(0)) + multiplier * coefficient
    excess = sum(-total * program.most(*column) for column, total in sums.items() if total < 0)
    return most + max(Fraction(0), goal) * program.job.n + excess


def _derived(derive: Callable[..., Any], number: int, rule: str, place: list[int]) -> Any:
    try:
        if min(place) >= 0:
            return derive(*place)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        pass
    raise NotProven(f"row {number} ({rule}, stage {place[0] if place else '?'}): is not an instance of a rule")


def _read(schedule: Schedule, name: str) -> tuple[_Stated, Profile]:
    try:
        stated = msgspec.convert(dict(schedule.metadata), type=_Stated)
    except msgspec.ValidationError as error:
        raise PlanError(f"{name}: is not a plan: metadata: {error}") from None
    prices = {} if stated.certificate is None else stated.certificate.profile
    return stated, Profile.from_bytes(msgspec.json.encode(prices), f"{name}: certificate: profile")


@lru_cache(4096)
def _exact(value: float) -> Fraction:
    if not abs(value) < inf:
        raise NotProven(f"{value} is not a finite number")
    return Fraction(f"{value:.12g}")


def _common(values: Sequence[Fraction]) -> Fraction:
    scale = lcm(*(value.denominator for value in values))
    return Fraction(gcd(*(int(value * scale) for value in values)), scale)


class ExactJob:
    """The job in exact numbers, times in a unit; and the rules that contradict a window by themselves, if true."""

    def __init__(self, schedule: Schedule, stated: _Stated, profile: Profile, certificate: Certificate) -> None:
        if schedule.placing is None:
            raise NotProven("no rule covers this placement")
        shape, stages = replace(schedule.shape, placement=schedule.placing), schedule.shape.stages
        profile.require(shape)
        self.rank = shape.rank_of
        self.n, self.is_staggered = shape.global_micro_batches, schedule.optimizer != "barrier"
        self.stages, self.window, self.unit = range(stages), _exact(certificate.window), _exact(certificate.unit)

        def times(values: Sequence[float]) -> list[Fraction]:
            return [_exact(value) / self.unit for value in values]

        names = ("forward", "backward_input", "backward_weight", "step", "gather")
        forward, inputs, weight, step, gather = (times(profile.per_stage(name, stages)) for name in names)
        self.kinds, self.stash = 3, _exact(profile.weight_stash)
        if not stated.planner.get("decoupled", True):
            self.kinds, self.stash = 2, Fraction(1)
            inputs, weight = [a + b for a, b in zip(inputs, weight, strict=True)], [Fraction(0)] * stages
        self.times = [forward, inputs, weight]
        reduce = times(profile.bucket_seconds(schedule.buckets, stages))
        self.update = [a + b + c * schedule.gathers for a, b, c in zip(reduce, step, gather, strict=True)]
        live = schedule.live
        hosts = [[w for w in live if w.rank == self.rank(s)] for s in self.stages]
        limits = None if is_kind(schedule.columns.kind, HostCopy).any() else stated.limits  # none bound the host
        caps = [min(limit, self.n * shape.chunks) for limit in limits or [inf] * shape.ranks]
        if self.kinds == 2 and is_kind(schedule.columns.kind, BackwardWeight).any():
            raise NotProven("the bound is of whole backwards, which the schedule splits")
        if not all(hosts) or len(caps) != shape.ranks or min(forward + inputs) <= 0:
            raise NotProven("a stage has no host, no limit or no time above 0")
        self.hosts = [Counter((_exact(profile.speed_of(w)), _exact(caps[w.rank])) for w in ws) for ws in hosts]
        self.fastest = [[t * min(self.hosts[s])[0] for s, t in enumerate(kind)] for kind in self.times]
        some = slice(None if profile.links else 2)
        neighbors = [product(hosts[s][some], hosts[s + 1][some], [s]) for s in self.stages[:-1]]
        pairs = [(shape.worker_index(a), shape.worker_index(b), s) for a, b, s in chain(*neighbors) if a != b]
        near, far, after = np.array(pairs, dtype=np.int64).reshape(-1, 3).T
        seconds = [profile.transfer_seconds(shape, *ends, after).tolist() for ends in ((near, far), (far, near))]
        links = times(sorted({*seconds[0], *seconds[1]})) or [Fraction(0)]
        self.hops = [links[0] * (self.rank(s) != self.rank(s + 1)) for s in self.stages[:-1]] + [Fraction(0)]
        steps = ([a + b for a, b in zip(kind, self.hops, strict=True)] for kind in self.fastest[:W])
        self.to_end = [[*accumulate(reversed(step))][::-1] for step in steps]
        self.begins = [self.between(F, 0, 0 if self.is_staggered else s) for s in self.stages]
        speeds = {speed for live in self.hosts for speed, _ in live}
        work = (t * speed for t in forward + inputs + [t / schedule.buckets for t in weight] for speed in speeds)
        self.grain = _common([*work, *links, *self.update, *reduce])

    def chunks(self, rank: int) -> list[int]:
        """Return the stages of a rank, named by its first stage."""
        chunks = [s for s in self.stages if self.rank(s) == self.rank(rank)]
        if chunks[0] != rank:
            raise NotProven(f"stage {rank} is not the first of its rank")
        return chunks

    def between(self, kind: int, near: int, far: int) -> Fraction:
        """Return the time through F or I from one stage to just before another."""
        return self.to_end[kind][near] - self.to_end[kind][far]

    def turn(self, stage: int) -> Fraction:
        """Return the time from the end of an F through all later stages until its backward may start."""
        return self.to_end[F][stage] - self.fastest[F][stage] + self.to_end[I][stage] - self.fastest[I][stage]

    def load(self, rank: int) -> bool:
        update = sum(self.update[s] for s in self.chunks(rank))
        return self._lacks(rank, self.window - self.begins[rank] - update, range(self.kinds))

    def detour(self, near: int, far: int) -> bool:
        if not near <= far in self.chunks(far) or not self.chunks(near):
            raise ValueError
        time = self.window - self.begins[near] - self.fastest[W][near] - self.update[near]
        time -= self.between(F, near, far) + self.between(I, near, far)
        return self._lacks(far, time, (F, I)) or self._holds_longer(far, time)

    def lane(self, stage: int) -> bool:
        waits = ceil(Fraction(self.n, self.hosts[stage].total() * self.hosts[stage + 1].total())) - 1
        own = sum(kind[stage] for kind in self.fastest) + waits * self.hops[stage]
        return self.begins[stage] + own + self.turn(stage) + self.update[stage] > self.window

    def _lacks(self, rank: int, time: Fraction, kinds: Sequence[int]) -> bool:
        """Return whether the hosts of a rank cannot do the operations of these kinds within a time."""
        chunks = self.chunks(rank)
        each = [sum(self.times[kind][s] for kind in kinds) for s in chunks]
        path = self.to_end[F][rank] + self.to_end[I][chunks[-1]] - self.fastest[I][chunks[-1]]
        weight = min(self.times[W][s] for s in chunks) * (W not in kinds) * (self.stash > 0)
        units, work = self.n * len(chunks), self.n * sum(each)
        for (speed, cap), hosts in self.hosts[rank].items():
            part, longest = _common([t * speed for t in each]), max(self.times[F][s] for s in chunks) * speed
            count, most = 0, Fraction(0)
            for k in range(1, min(self.n * len(chunks), time // (min(each) * speed)) + 1):
                waits = max(Fraction(0), path - min(floor(cap), k) * longest)
                if weight:
                    waits += max(0, ceil((k - cap - (1 - self.stash) * (k - 1)) / self.stash)) * weight * speed
                if k * min(each) * speed + waits <= time:
                    count = k
                    most = max(most, min(k * max(each) * speed, (time - waits) // part * part))
            units -= hosts * count
            work -= hosts * most / speed
        return units > 0 or work > 0

    def _holds_longer(self, rank: int, time: Fraction) -> bool:
        """Return whether the slots of a rank cannot hold all units until their last backwards within a time."""
        chunks = self.chunks(rank)
        kinds = range(W + (self.stash == 1))
        after = max(self.fastest[W][s] for s in chunks) * (self.stash == 1)

        def held(speed: Fraction) -> list[Fraction]:
            return [sum(self.times[kind][s] for kind in kinds) * speed + self.turn(s) for s in chunks]

        least = held(min(self.hosts[rank])[0])
        missing = self.n * sum(least)
        for (speed, cap), hosts in self.hosts[rank].items():
            own, first = held(speed), min(self.times[F][s] for s in chunks) * speed
            room = sum(_filled(time + after - slot * first, own, self.n * len(chunks)) for slot in range(floor(cap)))
            missing -= hosts * room / min(a / b for a, b in zip(own, least, strict=True))
        return missing > 0 or time < self.fastest[F][rank] + self.turn(rank) + self.fastest[I][rank]


def _filled(time: Fraction, lengths: list[Fraction], units: int) -> Fraction:
    """Return how much of a time pieces of one or two lengths can fill, if less than `units`; all for more lengths."""
    short, long = min(lengths), max(lengths)
    if time <= 0 or len(lengths) > 2:
        return max(Fraction(0), time)
    counts = range(min(time // long, units) + 1 if long > short else 1)
    return max(count * long + (time - count * long) // short * short for count in counts)


class Program:
    """Rules of the linear program; each method returns a row."""

    def __init__(self, job: ExactJob, certificate: Certificate) -> None:
        self.job, self.stages = job, certificate.stages
        if not self.stages or self.stages != sorted({*self.stages} & {*job.stages}):
            raise NotProven(f"{self.stages} are not ascending stages of the job")
        own = job.chunks(self.stages[0])
        if own[0] and not job.is_staggered:
            raise NotProven("with the barrier, the linear program begins with stage 0")
        self.ends = {s: job.window - job.update[s] for s in self.stages if s in own or not job.is_staggered}
        pieces = [(_exact(first), _exact(step), min(count, MOST_POINTS)) for first, step, count in certificate.grid]
        self.grid = [first + i * step for first, step, count in pieces[:MOST_POINTS] for i in range(count)]
        if self.grid != sorted({*self.grid}) or not self.grid or self.grid[-1] < max(self.ends.values()):
            raise NotProven("the grid does not ascend to the end of the window")
        self.groups = {s: self._groups(s) for s in self.stages}
        self.tails = self._tails()

    def _chunks(self, stage: int) -> list[int]:
        return [s for s in self.stages if self.job.rank(s) == self.job.rank(stage)]

    def _groups(self, stage: int) -> list[tuple[Counter[tuple[Fraction, Fraction]], int]]:
        """Return hosts and most units of each group of a rank: one busiest host apart if all are alike."""
        hosts, units = self.job.hosts[stage], self.job.n * len(self._chunks(stage))
        if len(hosts) > 1 or units % hosts.total() == 0:
            return [(hosts, units)]
        ((host, count),) = hosts.items()
        return [(Counter({host: 1}), units), (Counter({host: count - 1}), units - ceil(Fraction(units, count)))]

    def _parts(self, stage: int, kind: int) -> list[Part]:
        return [(stage, group, kind) for group in range(len(self.groups[stage]))]

    def row(self, rule: str, *place: int) -> Row:
        terms, limit = getattr(self, rule if rule in TOGETHER else "")(*place)
        for part, point, _ in terms:
            if part not in self._parts(part[0], part[2]) or part[2] >= self.job.kinds or point >= len(self.grid):
                raise ValueError
        return terms, limit

    def most(self, part: Part, point: int) -> int:
        """Return the most operations of a part: none before a micro-batch can arrive from the first stage."""
        (stage, group, kind), job = part, self.job
        head = job.between(F, self.stages[0], stage)
        if kind:
            head += job.fastest[F][stage] + job.turn(stage) + job.fastest[I][stage] * (kind == W)
        return min(job.n, self.groups[stage][group][1]) * (self.grid[point] > head)

    def rate(self, stage: int, group: int, point: int) -> Row:
        parts = [(s, group, kind) for s in self._chunks(stage) for kind in range(self.job.kinds)]
        terms = [(part, point + k, (2 * k - 1) * self.job.times[part[2]][part[0]]) for part in parts for k in (0, 1)]
        pace = sum(count / speed for (speed, _), count in self.groups[stage][group][0].items())
        return terms, (self.grid[point + 1] - self.grid[point]) * pace

    def grow(self, stage: int, group: int, kind: int, point: int) -> Row:
        part = stage, group, kind
        return [(part, point, 1), (part, point + 1, -1)], 0

    def order(self, stage: int, group: int, kind: int, point: int) -> Row:
        away = {I: self.job.turn(stage), W: Fraction(0)}[kind]
        lag = away + min(self.job.fastest[kind][stage], self.job.fastest[kind - 1][stage])
        return self._after([(stage, group, kind)], [((stage, group, kind - 1), 1, lag)], point)

    def path(self, near: int, far: int, kind: int, point: int) -> Row:
        if near >= far:
            raise ValueError
        times = self.job.fastest[kind]
        lag = self.job.between(kind, near, far) - times[near] + min(times[near], times[far])
        source, target = (far, near) if kind else (near, far)
        return self._after(self._parts(target, kind), [(part, 1, lag) for part in self._parts(source, kind)], point)

    def memory(self, stage: int, group: int, point: int) -> Row:
        job, chunks, (hosts, units) = self.job, self._chunks(stage), self.groups[stage][group]
        stash = job.stash * (job.kinds == 3)
        caps = [(min(cap, Fraction(units)), count) for (_, cap), count in hosts.items()]
        slots = sum(count * (floor(cap) if stash in (0, 1) else cap) for cap, count in caps)
        least = min(job.fastest[F][s] for s in chunks)
        shares = [(kind, share) for kind, share in ((I, 1 - stash), (W, stash)) if share]
        before = [((s, group, kind), share, min(least, job.fastest[kind][s])) for s in chunks for kind, share in shares]
        return self._after([(s, group, F) for s in chunks], before, point, slots)

    def share(self, stage: int, group: int, _: int) -> Row:
        """Units of a group; with one group more, of the whole stage."""
        parts = [(s, group, F) for s in self._chunks(stage)]
        if group == len(self.groups[stage]):
            parts = self._parts(stage, F)
        limits = [*(units for _, units in self.groups[stage]), self.job.n]
        return [(part, len(self.grid) - 1, 1) for part in parts], limits[group]

    def end(self, stage: int, kind: int, _: int) -> Row:
        at = bisect_left(self.grid, self.tails[stage, kind])
        return [(part, at, -1) for part in self._parts(stage, kind)], 0

    def _after(self, nexts: list[Part], before: Sequence[Any], point: int, more: Fraction | int = 0) -> Row:
        """Return: what is done of `nexts`, less the shares of `before` that were done `lag` earlier, is at most."""
        earlier = [(part, share, self.grid[point] - lag) for part, share, lag in before]
        terms: list[Any] = [(part, point, 1) for part in nexts]
        terms += [(part, bisect_left(self.grid, time), -share) for part, share, time in earlier if time > 0]
        return terms, more

    def _tails(self) -> dict[tuple[int, int], Fraction | float]:
        """By stage and kind: when all operations must be done; infinite without a limit."""
        job, stages = self.job, self.job.stages[self.stages[0] :]
        end: Fraction | float = inf
        tails: dict[tuple[int, int], Fraction | float] = {}
        for s in stages:
            tails[s, W] = self.ends.get(s, inf)
            tails[s, I] = end = min(end, tails[s, W] - job.fastest[W][s])
            end -= job.fastest[I][s] + job.hops[s]
        end = inf
        for s in reversed(stages):
            tails[s, F] = end = min(end, tails[s, I] - job.fastest[I][s])
            end -= job.fastest[F][s] + job.hops[s - 1]
        return tails
