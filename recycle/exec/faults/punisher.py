"""Faults drawn at random: workers die and come back all through a run, the same ones for the same seed.

Between two faults lie as many iterations as a geometric distribution of the given mean says. Each ends a worker or,
where somebody is dead, as likely a re-join. A stage's last live host is never struck, because its death would end the
run.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from recycle.errors import JobError
from recycle.exec.faults.faults import Fault
from recycle.exec.faults.kinds import KINDS
from recycle.exec.leader.detector import whom_to_fence
from recycle.job.shape import Shape, Worker


def parse_punishment(text: str) -> tuple[float, int]:
    """(mean, seed) of `MEAN_STEPS[,SEED]`; the seed is 0 when left out. Raises JobError."""
    mean, comma, seed = text.partition(",")
    try:
        steps, number = float(mean), int(seed) if comma else 0
    except ValueError:
        steps, number = 0.0, 0
    if not 1 <= steps <= 1e9:
        raise JobError(f"--punish {text}: expected MEAN_STEPS[,SEED], a mean of at least 1 step, for example 20,7")
    return steps, number


def punish(
    shape: Shape,
    steps: int,
    mean: float,
    seed: int,
    absent: Collection[Worker] = (),
    kinds: Sequence[str] = ("kill",),
) -> list[Fault]:
    """Faults for a run of `steps` iterations, in order, none before its second.

    Args:
        mean: iterations between two faults, at least 1.
        absent: workers that the run starts without.
        kinds: of faults that end a worker; one that is listed twice is twice as likely.

    Raises:
        JobError: no worker can ever be killed.
    """
    if shape.pipelines < 2:
        raise JobError("--punish: with 1 pipeline every worker is the only host of its stage, and none may die")
    draw = random.Random(seed)
    dead = set(absent)
    faults: list[Fault] = []
    for step in range(1, steps):
        if draw.random() * mean >= 1.0:
            continue
        kills = [w for w in shape.workers() if w not in dead and _has_peer(w, shape, dead)]
        returns = sorted(dead)
        back = bool(returns) and (not kills or draw.random() < 0.5)
        worker = draw.choice(returns if back else kills)
        if back:
            faults.append(Fault("rejoin", worker, step))
        else:
            kind = draw.choice(kinds) if len(kinds) > 1 else kinds[0]
            other = _cut_from(worker, shape, dead) if KINDS[kind].pair else None
            lacks = KINDS[kind].pair and other is None
            faults.append(Fault("kill" if lacks else kind, worker, step, other=other))
        dead ^= {worker}
    return faults


def _cut_from(worker: Worker, shape: Shape, dead: Collection[Worker]) -> Worker | None:
    """A live neighbour in its pipeline that stays when the two are cut off from each other; None when there is none."""
    live = [other for other in shape.workers() if other not in dead]
    near = [Worker(worker.pipeline, rank) for rank in (worker.rank - 1, worker.rank + 1)]
    return next((other for other in near if other in live and whom_to_fence((worker, other), live) == worker), None)


def _has_peer(worker: Worker, shape: Shape, dead: Collection[Worker]) -> bool:
    return any(peer.rank == worker.rank and peer != worker and peer not in dead for peer in shape.workers())
