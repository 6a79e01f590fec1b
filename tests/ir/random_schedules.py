"""Random valid schedules and profiles for property tests, and random single defects."""

import random
from itertools import pairwise

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


def random_schedule(rng: random.Random, most=4) -> Schedule:
    """A compute-only schedule in random order: some workers failed, their micro-batches re-routed to random peers, some
    backwards split, an overlapped pair, one or two chunks per worker in a loop or a V."""
    shape = Shape(rng.randint(1, 3), rng.randint(1, most), rng.randint(1, most), rng.choice([1, 1, 1, 2]))
    ranks, stages = shape.ranks, shape.stages
    vee = shape.chunks == 2 and rng.random() < 0.5
    rank_of = [s if s < ranks else (2 * ranks - 1 - s if vee else s - ranks) for s in range(stages)]
    failed = set()
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
    programs = {w: [] for w in shape.workers() if w not in failed}
    ready = [Forward(0, MicroBatch(*divmod(n, shape.micro_batches))) for n in range(
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
    """Merge one F and the following B of another micro-batch into a pair, which may make a cycle."""
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
    merged = [*programs[worker][:n], OverlappedPair(first, second), *programs[worker][n + 2 :]]
    return {**programs, worker: merged}


def with_waits(rng: random.Random, schedule: Schedule) -> Schedule:
    """Add waits for some sends of a lowered schedule, at random places after the send."""
    programs = {worker: list(schedule.program(worker)) for worker in schedule.live}
    for program in programs.values():
        for send in [send for send in program if isinstance(send, Send) and rng.random() < 0.4]:
            wait = WaitSendActivation if isinstance(send, SendActivation) else WaitSendGradient
            place = rng.randint(program.index(send) + 1, len(program) - 2)  # a step is the last
            program.insert(place, wait(send.stage, send.micro_batch))
    return Schedule.build(
        schedule.shape, programs, placement=schedule.placement, failed=schedule.failed, optimizer=schedule.optimizer
    )


def random_profile(rng: random.Random, schedule: Schedule) -> Profile:
    """Times that differ by stage, worker and link, some of them round numbers, so that ties occur."""
    stages, workers = schedule.shape.stages, [*schedule.shape.workers()]

    def seconds():
        return rng.choice([1.0, 2.0, rng.uniform(0.2, 3.0)])

    def pattern():
        return ".".join(rng.choice(["*", str(number)]) for number in rng.choice(workers))

    def link():
        return Link(rng.choice([0.0, 1.0, rng.uniform(0.0, 2.0)]), rng.choice([None, 4.0, rng.uniform(1.0, 9.0)]))

    pairs = [f"{a}>{b}" for a in workers for b in workers if a != b and rng.random() < 0.2]
    pairs += [pair for pair in (f"{pattern()}>{pattern()}" for _ in range(rng.randint(0, 3))) if "*" in pair]
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


def break_one_place(rng: random.Random, schedule: Schedule) -> tuple[Schedule, set[Worker]] | None:
    """Return (the schedule with one random defect, workers at which a finding may point), None if none was drawn."""
    programs = {worker: list(schedule.program(worker)) for worker in schedule.live}
    worker, n = rng.choice([(worker, n) for worker, program in programs.items() for n in range(len(program))])
    chosen, other = programs[worker][n], rng.choice(schedule.live)
    near = {worker, other} | ({chosen.peer} if isinstance(chosen, Transfer) else set())
    match rng.choice(["early", "drop", "duplicate", "move", "peer"]):
        case "early":  # before its last input on the same worker
            graph, row = dependencies(schedule), int(schedule.columns.offsets[schedule.shape.worker_index(worker)]) + n
            inputs = graph.source[(graph.target == row) & (graph.cause == Cause.DATA)].tolist()
            local = [position for owner, position in map(schedule.position, inputs) if owner == worker]
            if not local:
                return None
            programs[worker].insert(max(local), programs[worker].pop(n))
        case "drop":
            programs[worker].pop(n)
        case "duplicate":
            programs[worker].insert(rng.randint(n, len(programs[worker])), chosen)
        case "move" if other != worker:
            programs[other].insert(rng.randint(0, len(programs[other])), programs[worker].pop(n))
        case "peer" if isinstance(chosen, Transfer) and other != chosen.peer:
            programs[worker][n] = type(chosen)(chosen.stage, chosen.micro_batch, other)
        case _:
            return None
    options = {name: getattr(schedule, name) for name in ("placement", "failed", "optimizer")}
    return Schedule.build(schedule.shape, programs, **options), near
