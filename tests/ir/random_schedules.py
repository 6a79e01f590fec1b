"""Valid schedules drawn at random, and ways to break one in one place: what the property tests feed on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from recycle import Link, MicroBatch, Profile, Schedule, Shape, Worker
from recycle.ir.dependencies import Cause, dependencies
from recycle.ir.event_graph import event_graph
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    OverlappedPair,
    Send,
    SendActivation,
    Transfer,
    WaitSendActivation,
    WaitSendGradient,
)


def random_schedule(rng: random.Random, most: int = 4) -> Schedule:
    """A compute-only schedule in random order: some workers failed, their micro-batches re-routed to random peers, some
    backwards split, an overlapped pair, one or two chunks per worker in a loop or a V."""
    shape = Shape(rng.randint(1, 3), rng.randint(1, most), rng.randint(1, most), rng.choice([1, 1, 1, 2]))
    ranks, stages = shape.ranks, shape.stages
    vee = shape.chunks == 2 and rng.random() < 0.5
    rank_of = [s if s < ranks else (2 * ranks - 1 - s if vee else s - ranks) for s in range(stages)]
    failed: set[Worker] = set()
    for _ in range(rng.randint(0, 2) if shape.pipelines > 1 else 0):
        worker = Worker(rng.randrange(shape.pipelines), rng.randrange(ranks))
        if sum(other.rank == worker.rank for other in failed | {worker}) < shape.pipelines:
            failed.add(worker)
    host = {}
    for stage in range(stages):
        peers = [w for w in shape.workers() if w.rank == rank_of[stage] and w not in failed]
        for k in range(shape.pipelines):
            for j in range(shape.micro_batches):
                home = Worker(k, rank_of[stage])
                host[stage, MicroBatch(k, j)] = home if home not in failed else rng.choice(peers)
    backwards_first = rng.random() < 0.5
    split = rng.choice([0.0, 0.5, 1.0])
    programs: dict[Worker, list[Instruction]] = {w: [] for w in shape.workers() if w not in failed}
    ready: list[Instruction] = [Forward(0, MicroBatch(*divmod(n, shape.micro_batches))) for n in range(
        shape.global_micro_batches)]  # fmt: skip
    while ready:
        backwards = [n for n, instruction in enumerate(ready) if not isinstance(instruction, Forward)]
        n = rng.choice(backwards) if backwards and backwards_first else rng.randrange(len(ready))
        work = ready.pop(n)
        stage, micro_batch = work.stage, work.micro_batch
        programs[host[stage, micro_batch]].append(work)
        backward = BackwardInput if rng.random() < split else Backward
        if isinstance(work, Forward):
            ready.append(Forward(stage + 1, micro_batch) if stage + 1 < stages else backward(stage, micro_batch))
        elif not isinstance(work, BackwardWeight):
            if isinstance(work, BackwardInput):
                ready.append(BackwardWeight(stage, micro_batch))
            if stage:
                ready.append(backward(stage - 1, micro_batch))
    placement = {w: [s for s in range(stages) if rank_of[s] == w.rank] for w in shape.workers()}
    optimizer = rng.choice(["staggered", "barrier"])
    if rng.random() < 0.3:
        with_pair = Schedule.build(
            shape, _pair_up(rng, programs), placement=placement, failed=failed, optimizer=optimizer
        )
        if event_graph(with_pair).is_acyclic:
            return with_pair
    return Schedule.build(shape, programs, placement=placement, failed=failed, optimizer=optimizer)


def _pair_up(rng: random.Random, programs: dict[Worker, list[Instruction]]) -> dict[Worker, list[Instruction]]:
    """The programs with one F and the B behind it, of another micro-batch, overlapped; which may make a cycle."""
    places = [
        (worker, n)
        for worker, program in programs.items()
        for n, (first, second) in enumerate(pairwise(program))
        if isinstance(first, Forward) and isinstance(second, Backward) and first.micro_batch != second.micro_batch
    ]
    if not places:
        return programs
    worker, n = rng.choice(places)
    first, second = programs[worker][n : n + 2]
    assert isinstance(first, Forward)
    assert isinstance(second, Backward)
    merged = [*programs[worker][:n], OverlappedPair(first, second), *programs[worker][n + 2 :]]
    return {**programs, worker: merged}


def with_waits(rng: random.Random, schedule: Schedule) -> Schedule:
    """The lowered schedule whose workers wait for the arrival of some of what they send, each anywhere behind it."""
    programs = {worker: list(schedule.program(worker)) for worker in schedule.live}
    for program in programs.values():
        for send in [one for one in program if isinstance(one, Send) and rng.random() < 0.4]:
            wait = WaitSendActivation if isinstance(send, SendActivation) else WaitSendGradient
            place = rng.randint(program.index(send) + 1, len(program) - 2)  # a step is the last
            program.insert(place, wait(send.stage, send.micro_batch))
    return Schedule.build(
        schedule.shape, programs, placement=schedule.placement, failed=schedule.failed, optimizer=schedule.optimizer
    )


def random_profile(rng: random.Random, schedule: Schedule) -> Profile:
    """Times that differ by stage, worker and link, some of them round numbers, so that ties occur."""
    stages, workers = schedule.shape.stages, [*schedule.shape.workers()]

    def seconds() -> float:
        return rng.choice([1.0, 2.0, rng.uniform(0.2, 3.0)])

    def any_of() -> str:
        return ".".join(rng.choice(["*", str(number)]) for number in rng.choice(workers))

    def link() -> Link:
        return Link(rng.choice([0.0, 1.0, rng.uniform(0.0, 2.0)]), rng.choice([None, 4.0, rng.uniform(1.0, 9.0)]))

    pairs = [f"{a}>{b}" for a in workers for b in workers if a != b and rng.random() < 0.2]
    pairs += [pair for pair in (f"{any_of()}>{any_of()}" for _ in range(rng.randint(0, 3))) if "*" in pair]
    return Profile(
        forward=[seconds() for _ in range(stages)],
        backward_input=seconds(),
        backward_weight=[seconds() for _ in range(stages)] if rng.random() < 0.5 else seconds(),
        overlapped_pair=rng.choice([None, 2.0, [seconds() for _ in range(stages)]]),
        latency=rng.choice([0.0, 0.5, 3.0, rng.uniform(0.0, 2.0)]),
        bandwidth=rng.choice([None, 5.0]),
        links={pair: link() for pair in pairs} if rng.random() < 0.6 else {},
        message=rng.choice([0.0, 3.0, [rng.uniform(0.0, 6.0) for _ in range(stages)]]),
        step=rng.choice([0.0, 1.0, 0.3]),
        reduce=rng.choice([0.0, 2.0, 0.7]),
        speed={str(worker): rng.uniform(0.5, 2.0) for worker in schedule.live if rng.random() < 0.2},
    )


@dataclass
class Broken:
    """A schedule with one defect, and the workers at which a finding points to it."""

    schedule: Schedule
    how: str
    near: set[Worker]


def _peers(*instructions: Instruction) -> set[Worker]:
    return {i.peer for i in instructions if isinstance(i, Transfer)}


def break_one_place(rng: random.Random, schedule: Schedule) -> Broken | None:
    """One random defect, None when the kind of defect drawn has no place in this schedule."""
    programs = {worker: list(schedule.program(worker)) for worker in schedule.live}
    places = [(worker, n) for worker, program in programs.items() for n in range(len(program))]
    worker, n = rng.choice(places)
    chosen = programs[worker][n]
    near = {worker} | _peers(chosen)
    how = rng.choice(["swap", "drop", "duplicate", "move", "peer"])
    if how == "swap":
        graph = dependencies(schedule)
        local = (graph.cause == Cause.DATA) & (graph.source < graph.rows) & (graph.target < graph.rows)
        owner = schedule.columns.worker
        edges = [e for e in np.flatnonzero(local) if owner[graph.source[e]] == owner[graph.target[e]]]
        if not edges:
            return None
        edge = rng.choice(edges)
        worker, a = schedule.position(int(graph.source[edge]))
        b = schedule.position(int(graph.target[edge]))[1]
        near = {worker}
        programs[worker][a], programs[worker][b] = programs[worker][b], programs[worker][a]
    elif how == "drop":
        programs[worker].pop(n)
    elif how == "duplicate":
        programs[worker].insert(rng.randint(n, len(programs[worker])), chosen)
    elif how == "move":
        others = [other for other in schedule.live if other != worker]
        if not others:
            return None
        other = rng.choice(others)
        near.add(other)
        programs[other].insert(rng.randint(0, len(programs[other])), programs[worker].pop(n))
    else:
        if not isinstance(chosen, Transfer):
            return None
        others = [other for other in schedule.shape.workers() if other != chosen.peer]
        programs[worker][n] = type(chosen)(chosen.stage, chosen.micro_batch, rng.choice(others))
        near |= _peers(programs[worker][n])
    broken = Schedule.build(
        schedule.shape, programs, placement=schedule.placement, failed=schedule.failed, optimizer=schedule.optimizer
    )
    return Broken(broken, how, near)
