"""The order in which communicators form: about as many rounds as the busiest worker has, and the same for everybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from recycle.exec.transport.base import sum_groups
from recycle.exec.transport.formation import Wanted, formation, lanes_of
from recycle.ir.families import dualpipe_v, interleaved, one_f_one_b, zb_v
from recycle.ir.instruction import Send
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.job.shape import Shape, Worker
from recycle.plans import Plan
from recycle.solve.planner import plan_for_training


def adaptive(pipelines: int, ranks: int, micro_batches: int, *dead: int, chunks: int = 1) -> Schedule:
    """The plan that training begins with, with a dead worker of each of these ranks."""
    text = f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\nchunks = {chunks}\n"
    job = price(Job.from_toml(f"{text}[memory]\nlimit = {(ranks + 4) * chunks}\n[planner]\nsteps = 1\n"))
    vector = [dead.count(rank) for rank in range(ranks)]
    return lower(Plan.from_text(plan_for_training(job, vector, True), "plan").schedule)


SCHEDULES = {
    "1f1b": lambda: lower(one_f_one_b(Shape(2, 5, 6))),
    "a ring of odd length": lambda: lower(interleaved(Shape(2, 3, 6, 2))),
    "a V": lambda: lower(zb_v(Shape(1, 4, 8, 2))),
    "two directions": lambda: lower(dualpipe_v(Shape(1, 4, 8, 2))),
    "one dead": lambda: adaptive(6, 4, 12, 2),
    "three dead": lambda: adaptive(6, 4, 12, 1, 2, 2),
    "one dead on a ring of odd length": lambda: adaptive(4, 3, 9, 1, chunks=2),
}


def formed(schedule: Schedule, joins: Sequence[tuple[Worker, Worker]] = ()) -> list[Wanted]:
    return formation({*lanes_of(schedule), *joins}, sum_groups(schedule))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rounds_are_hardly_more_than_the_communicators_of_the_busiest_worker(name: str) -> None:
    wanted = formed(SCHEDULES[name](), [(Worker(0, 0), Worker(1, 0))] if "dead" in name else [])
    busy = Counter((worker, one.round) for one in wanted for worker in one.members)
    assert set(busy.values()) == {1}
    degree = max(Counter(worker for one in wanted for worker in one.members).values())
    assert 1 + max(one.round for one in wanted) <= 1.3 * degree


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pair_with_a_transfer_has_a_lane_and_every_stage_with_several_hosts_a_sum(name: str) -> None:
    schedule = SCHEDULES[name]()
    pairs = {(w, one.peer) for w in schedule.live for one in schedule.program(w) if isinstance(one, Send)}
    wanted = formed(schedule)
    assert sorted(one.members for one in wanted if one.stage is None) == sorted(pairs)
    sums = {one.stage: list(one.members) for one in wanted if one.stage is not None}
    assert sums == {stage: sorted(hosts) for stage, hosts in sum_groups(schedule).items() if len(hosts) > 1}
