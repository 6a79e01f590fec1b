"""Certificates: they prove the planner's bound, every schedule satisfies every row, and changed ones prove nothing new.

In `tests/solve/test_bounds.py` no certified bound is above the optimum of an exhaustive search.
"""

import ast
import copy
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings

from benchmarks import cp_sat
from benchmarks.planner_random import FAMILIES, drawn
from recycle import RecycleError, Schedule, Worker
from recycle.job import Job, PricedJob, price
from recycle.plans import Plan
from recycle.plans.verify import ALONE, TOGETHER, Certificate, ExactJob, NotProven, Program, prove, verify
from recycle.solve.bounds import lower_bound, rising_bounds
from recycle.solve.bounds.bound import Bound, certify
from recycle.solve.effort import Deadline
from recycle.solve.planner import plan
from recycle.solve.problem import Order, Problem
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy
from recycle.solve.search.order_kernels import time_order
from tests import ROOT
from tests.solve.jobs import DEAD, job, small_jobs, worked_example

VERIFIER = ROOT / "recycle/plans/verify.py"


def certified(priced: PricedJob, problem: Problem, bound: Bound, order: Order | None = None) -> Plan:
    """A plan, without instructions unless an order is given, that has the certificate of a bound."""
    schedule = problem.schedule([[] for _ in problem.cap] if order is None else order)
    limits = None if priced.limits is None else tuple(priced.limits)
    section = msgspec.to_builtins(priced.planner)
    period = float(bound)
    return certify(
        Plan(schedule, period, period, period, 0.0, priced.prices.digest(), limits, section), bound, priced.prices
    )


@pytest.mark.process
def test_verifier_shares_no_code_with_the_planner():
    source = VERIFIER.read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    own = [ast.unparse(node).split()[1].split(".") for node in imports if "recycle" in ast.unparse(node)]
    assert {name[1] for name in own} == {"errors", "ir", "job"}
    loaded = "import sys, recycle.plans.verify; sys.exit(any(m.startswith('recycle.solve') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
    assert len(source.splitlines()) <= 400


def random_jobs() -> Iterator[tuple[PricedJob, list[Worker]]]:
    for seed in range(0, 164, 2):
        priced, dead = cp_sat.small_job(random.Random(seed))
        placement = "v" if priced.shape.chunks == 2 and seed % 4 else "loop"
        yield msgspec.structs.replace(priced, grid=msgspec.structs.replace(priced.grid, placement=placement)), dead
    yield from (drawn(family, seed, 0, 4)[:2] for family in FAMILIES for seed in range(2))


@pytest.mark.search
def test_certificates_of_random_jobs_prove_the_bound_of_the_planner():
    rules = set()
    for number, (priced, dead) in enumerate(random_jobs()):
        problem = Problem.from_job(priced, dead)
        bound = lower_bound(problem, Deadline(0.1 if number % 8 else None))  # some in full, on a busy machine too
        made = certified(priced, problem, bound)
        assert made.certificate is not None, (priced, dead)
        assert made.certified_bound == bound == prove(made.as_schedule())
        rules |= {rule for rule, *_ in made.certificate.rows}
    assert rules >= {*ALONE, "rate", "memory"}


def test_each_bound_of_times_in_microseconds_has_a_certificate():
    text = (
        "[shape]\npipelines = 1\nranks = 3\nmicro_batches = 4\nchunks = 2\n[memory]\nlimit = 3\n[model]\nlayers = 12\n"
    )
    priced = price(Job.from_toml(text + '[times]\nprofile = "analytic"\n'))
    problem = Problem.from_job(priced, [])
    for bound in rising_bounds(problem):
        assert certified(priced, problem, bound).certified_bound == bound < 4e-4


def test_share_of_the_busiest_host_is_needed():
    priced = job(4, 2, 2, 2, chunks=2)
    problem = Problem.from_job(priced, [Worker(0, 1)])
    planned = certified(priced, problem, lower_bound(problem))
    assert planned.certified_bound == 21
    file = msgspec.json.decode(planned.text())
    assert {rule for rule, *_ in file["metadata"]["certificate"]["rows"]} == {*TOGETHER}
    without("share")(file["metadata"]["certificate"])
    assert bound_of(file) is None


def test_plan_file_has_its_certificate(tmp_path):
    planned = plan(worked_example(4, steps=1), [DEAD])
    assert planned.certified_bound == planned.lower_bound == 29
    planned.save(tmp_path / "plan.json")
    assert verify(Schedule.load(tmp_path / "plan.json")) == (29, planned.period)
    assert Plan.load(tmp_path / "plan.json").certificate == planned.certificate


@pytest.mark.search
@settings(max_examples=12)
@given(small_jobs())
def test_every_schedule_satisfies_every_row(case):
    priced, dead = case
    problem = Problem.from_job(priced, dead)
    stages, ranks = problem.shape.stages, problem.shape.ranks
    for policy in itertools.islice(portfolio(problem), 2):
        order = schedule_by_policy(problem, policy)
        if time_order(problem, order).period == float("inf"):
            continue  # with several chunks some orders wait for themselves
        runs = Runs(problem, order)
        for chain in {(0,), tuple(range(stages)), tuple(range(0, stages, ranks))}:
            begin, window = runs.window(chain)
            grid = [(0.0, window / 11, 11), (window, 0.0, 1)]
            certificate = Certificate(0.0, 1.0, window, {}, [], list(chain), grid)
            stated = SimpleNamespace(limits=priced.limits, planner={"decoupled": priced.planner.decoupled})
            exact = ExactJob(problem.schedule(order), stated, priced.prices, certificate)
            program = Program(exact, certificate)
            assert runs.broken_rows(program, begin) == []


class Runs:
    """When and where a schedule runs its operations."""

    def __init__(self, problem: Problem, order: Order):
        self.problem, n, stages = problem, problem.micro_batches, problem.shape.stages
        started, times = time_order(problem, order).latest_starts.tolist(), problem.times.tolist()
        self.of = {}
        for w, program in enumerate(order):
            for x in program:
                seconds = times[x // n] * problem.speed[w]
                self.of.setdefault((x // n % stages, x // n // stages), []).append(
                    (started[x], started[x] + seconds, w)
                )

    def window(self, chain: tuple[int, ...]) -> tuple[float, float]:
        """The first start at the rank of the chain's first stage, and the time to its last update."""
        problem, shape = self.problem, self.problem.shape
        own = shape.stages_of_rank(shape.rank_of(chain[0]))
        chosen = own if problem.staggered else range(shape.stages)
        begin = min(begun for (s, _), runs in self.of.items() if s in chosen for begun, *_ in runs)
        ends = [
            end + problem.update_seconds[s] for (s, _), runs in self.of.items() if s in chosen for _, end, _ in runs
        ]
        return begin, (max(ends) - begin) * (1 + 1e-9)

    def broken_rows(self, program: Program, begin: float):
        stages = range(self.problem.shape.stages)
        broken = []
        for rule, numbers in itertools.product(TOGETHER, itertools.product(stages, range(3), range(3), range(12))):
            place = numbers[: 2 if rule in ("rate", "memory", "share", "end") else 3] + numbers[3:]
            try:
                terms, limit = program.row(rule, *place)
            except (RecycleError, LookupError, ValueError):
                continue
            done = [self.done(program, part, begin + float(program.grid[point])) for part, point, _ in terms]
            most = [program.most(part, point) for part, point, _ in terms]
            total = sum(float(share) * count for (*_, share), count in zip(terms, done, strict=True))
            total += self.problem.micro_batches * (rule == "end")
            if total > limit + 1e-6 or any(a > b + 1e-6 for a, b in zip(done, most, strict=True)):
                broken.append((rule, place))
        return broken

    def done(self, program: Program, part: tuple[int, int, int], time: float) -> float:
        stage, group, kind = part
        hosts = self.problem.hosts[stage]
        if len(program.groups[stage]) > 1:
            rank_of = self.problem.shape.rank_of
            chunks = [s for s in program.stages if rank_of(s) == rank_of(stage)]
            units = {w: sum(run[2] == w for s in chunks for run in self.of[s, 0]) for w in hosts}
            busiest = max(hosts, key=units.__getitem__)
            hosts = [w for w in hosts if (w == busiest) == (group == 0)]
        runs = [run for run in self.of[stage, kind] if run[2] in hosts]
        return sum(min(1.0, max(0.0, time - begun) / max(end - begun, 1e-12)) for begun, end, _ in runs)


def each(rule: str, change):
    """A change of all rows of a rule."""
    return lambda certificate: [change(row) for row in certificate["rows"] if row[0] == rule]


def scaled(factor: float):
    return lambda row: row.__setitem__(3, [factor * multiplier for multiplier in row[3]])


def without(rule: str):
    return lambda certificate: certificate["rows"].__setitem__(
        slice(None), [r for r in certificate["rows"] if r[0] != rule]
    )


def moved(number: int, by: int):
    return lambda row: row[1].__setitem__(number, row[1][number] + by)


CHANGES = {
    **{f"{rule} raised": each(rule, scaled(3.0)) for rule in TOGETHER if rule != "share"},
    **{f"{rule} negative": each(rule, scaled(-1.0)) for rule in ("rate", "memory", "end")},
    **{f"{rule} missing": without(rule) for rule in TOGETHER if rule != "share"},
    **{f"{rule} of another stage": each(rule, moved(0, 1)) for rule in ("rate", "memory", "order", "end")},
    **{f"{rule} of another kind": each(rule, moved(-1, -1)) for rule in ("order", "path", "grow")},
    "rate of another group": each("rate", moved(1, 1)),
    "later points": each("memory", lambda row: row.__setitem__(2, [point + 1 for point in row[2]])),
    "point before the grid": each("memory", lambda row: row[2].__setitem__(0, -1)),
    "unknown rule": each("memory", lambda row: row.__setitem__(0, "_tails")),
    "rule of the job": each("memory", lambda row: row.__setitem__(0, "load")),
    "no place": each("memory", lambda row: row.__setitem__(1, [])),
    "infinite multiplier": each("rate", lambda row: row[3].__setitem__(0, float("1e999"))),
    "no rows": lambda certificate: certificate.update(rows=[]),
    "longer window": lambda certificate: certificate.update(window=29.0),
    "smaller window": lambda certificate: certificate.update(window=27.0),
    "larger unit": lambda certificate: certificate.update(unit=2.0),
    "no unit": lambda certificate: certificate.update(unit=0.0),
    "fewer stages": lambda certificate: certificate["stages"].pop(),
    "later stages": lambda certificate: certificate.update(stages=[1, 2, 3]),
    "descending stages": lambda certificate: certificate["stages"].reverse(),
    "short grid": lambda certificate: certificate.update(grid=[[0.0, 1.0, 20]]),
    "descending grid": lambda certificate: certificate["grid"].reverse(),
    "coarse grid": lambda certificate: certificate.update(grid=[[0.0, 2.0, 30]]),
    "faster forwards": lambda certificate: certificate["profile"].update(forward=0.5),
    "slower links": lambda certificate: certificate["profile"].update(latency=1.0),
    "slower worker": lambda certificate: certificate["profile"].update(speed={"0.0": 2.0}),
    "a load too small": lambda certificate: certificate.update(rows=[["load", [2], [], []]]),
    "a detour too short": lambda certificate: certificate.update(rows=[["detour", [0, 3], [], []]]),
    "a detour that runs back": lambda certificate: certificate.update(rows=[["detour", [3, 0], [], []]]),
    "a lane from the last stage": lambda certificate: certificate.update(rows=[["lane", [3], [], []]]),
}


@pytest.fixture(scope="module")
def planned():
    found = plan(worked_example(4, steps=1), [DEAD])
    return msgspec.json.decode(found.text())


def bound_of(file) -> float | None:
    try:
        return prove(Schedule.loads(msgspec.json.encode(file)))
    except RecycleError:
        return None


@pytest.mark.parametrize("name", CHANGES)
def test_changed_certificate_proves_nothing(planned, name):
    changed = copy.deepcopy(planned)
    CHANGES[name](changed["metadata"]["certificate"])
    assert changed != planned
    assert bound_of(changed) is None


def test_negative_multiplier_proves_no_larger_bound(planned):
    changed = copy.deepcopy(planned)
    rows = [["memory", [0, 0], [0], [-1000.0]]]  # no forward is done at time 0, so its limit alone would count
    changed["metadata"]["certificate"].update(window=99.0, bound=100.0, grid=[[0.0, 1.0, 100]], rows=rows)
    assert bound_of(changed) is None


def test_grid_without_end_is_cut(planned):
    changed = copy.deepcopy(planned)
    changed["metadata"]["certificate"]["grid"] = [[0.0, 1.0, 10**12]]
    assert bound_of(changed) == 29


def test_certificate_proves_no_more_than_its_bound(planned):
    assert bound_of(planned) == 29
    for bound, proven in ((29.0, 29.0), (28.0, 28.0), (29.5, None), (30.0, None)):
        changed = copy.deepcopy(planned)
        changed["metadata"]["certificate"]["bound"] = bound
        assert bound_of(changed) == proven


@pytest.mark.parametrize(
    "change",
    [
        {"limits": [5.0, 5.0, 5.0, 5.0]},
        {"profile": "0" * 16},
        {"certificate": None},
        {"certificate": {"bound": 1}},
        {"planner": {"decoupled": False}},
    ],
)
def test_certificate_of_another_job_proves_nothing(planned, change):
    changed = copy.deepcopy(planned)
    changed["metadata"].update(change)
    assert bound_of(changed) is None


def test_verified_plan_has_a_valid_schedule_and_its_period(planned):
    for key, value in (("period", 28.0), ("period", 31.0), ("limits", [3.0, 3.0, 3.0, 3.0])):
        changed = copy.deepcopy(planned)
        changed["metadata"][key] = value
        with pytest.raises(NotProven, match="schedule"):
            verify(Schedule.loads(msgspec.json.encode(changed)))


def test_certificate_of_other_hosts_proves_nothing(planned):
    for failed in ([], ["1.1"]):
        assert bound_of({**planned, "failed": failed}) is None
