"""Injected faults, parsed from text and checked: `KIND[=ARGUMENT]:WORKER[,WORKER]@STEP[-STEP][.PHASE]`.

A fault strikes in the middle of its iteration, or at the given phase. It strikes once per run, even if the iteration is
repeated. A fault in the `undo` of a step strikes only if a step is undone, and one in its `evaluation` only if there is
one. With tensor parallelism it strikes the worker's process of tensor rank 0, unless `kill:1.1t1@10` names another.

`punish` draws random faults, reproducibly for a seed. The iterations between two follow a geometric distribution. Each
ends a worker or, if some worker is dead, is a rejoin with equal probability. A stage's last live host is never struck.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from recycle.errors import JobError
from recycle.exec.faults.kinds import KINDS
from recycle.exec.leader.detector import select_fenced
from recycle.exec.members import member_name
from recycle.job import Job
from recycle.job.shape import Shape, Worker

_NUMBER = "[0-9]{1,9}"
_WORKER = re.compile(rf"{_NUMBER}\.{_NUMBER}")
_FAULT = re.compile(
    rf"([a-z-]+)(?:=([^:@]*))?:({_NUMBER}\.{_NUMBER})(?:t({_NUMBER}))?(?:,({_NUMBER}\.{_NUMBER}))?"
    rf"@({_NUMBER})(?:-({_NUMBER}))?(?:\.([a-z]+))?"
)
MAJORITY_HOSTS = 3
"""Least number of hosts of a stage for a majority if one is wrong."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        phase: None for the middle of the iteration.
        argument: number after the `=`; None if absent.
        target: target of the strike, if the kind has several; before the argument.
        last: last step of a fault with a range; None for a single step.
        tensor_rank: of the process that is struck.
    """

    kind: str
    worker: Worker
    step: int
    phase: str | None = None
    argument: float | None = None
    last: int | None = None
    other: Worker | None = None
    tensor_rank: int = 0
    target: str | None = None

    def __str__(self) -> str:
        number = None if self.argument is None else f"{self.argument:g}"
        on_link = KINDS[self.kind].on_link
        arguments = [str(part) for part in (None if on_link else self.other, self.target, number) if part is not None]
        written = f"={','.join(arguments)}" if arguments else ""
        last = "" if self.last is None else f"-{self.last}"
        struck = member_name(self.worker, self.tensor_rank) + (f",{self.other}" if on_link else "")
        return f"{self.kind}{written}:{struck}@{self.step}{last}" + (f".{self.phase}" if self.phase else "")

    def holds_at(self, step: int) -> bool:
        return self.step <= step <= (self.step if self.last is None else self.last)


def parse_fault(text: str) -> Fault:
    """Parse a fault. Raises JobError with the reason."""
    match = _FAULT.fullmatch(text)
    if match is None:
        raise JobError(
            f"fault {text!r}: expected KIND[=ARGUMENT]:WORKER@STEP[.PHASE], for example kill:1.1@10 or rejoin:1.1@20"
        )
    name, argument, worker, tensor_rank, second, step, last, phase = match.groups()
    if name not in KINDS:
        raise JobError(f"fault {text!r}: unknown kind {name!r}; known are {', '.join(KINDS)}")
    kind = KINDS[name]
    if phase is not None and phase not in kind.phases:
        takes = f"one of {', '.join(kind.phases)}" if kind.phases else "none"
        raise JobError(f"fault {text!r}: unknown phase {phase!r}; {name} takes {takes}")
    if kind.on_link and (second is None or Worker.parse(second) == Worker.parse(worker)):
        raise JobError(f"fault {text!r}: {name} takes two workers separated by a ',', for example {kind.example}")
    if second is not None and not kind.on_link:
        raise JobError(f"fault {text!r}: {name} strikes one worker; leave out ,{second}")
    if tensor_rank is not None and (kind.pair or kind.on_link or not kind.struck):
        raise JobError(f"fault {text!r}: {name} strikes whole workers; leave out t{tensor_rank}")
    if last is not None and not kind.ranged:
        raise JobError(f"fault {text!r}: {name} strikes at one step, not in a range")
    if last is not None and int(last) < int(step):
        raise JobError(f"fault {text!r}: the range ends before it begins; write the smaller step first")
    last_step = None if last is None else int(last)
    other = _other(text, name, worker, argument) if kind.pair else None if second is None else Worker.parse(second)
    target, argument = _target(text, name, argument) if kind.targets else (None, argument)
    value = None if kind.pair else _argument(text, name, argument)
    return Fault(name, Worker.parse(worker), int(step), phase, value, last_step, other, int(tensor_rank or 0), target)


def _target(text: str, name: str, written: str | None) -> tuple[str, str | None]:
    target, comma, argument = (written or "").partition(",")
    kind = KINDS[name]
    if target not in kind.targets:
        known = ", ".join(kind.targets)
        raise JobError(f"fault {text!r}: {name} takes one of {known} after a '=', for example {kind.example}")
    return target, argument if comma else None


def _other(text: str, name: str, worker: str, written: str | None) -> Worker:
    if written is None or not _WORKER.fullmatch(written) or Worker.parse(written) == Worker.parse(worker):
        raise JobError(f"fault {text!r}: {name} takes another worker after a '=', for example {KINDS[name].example}")
    return Worker.parse(written)


def _argument(text: str, name: str, written: str | None) -> float | None:
    argument = KINDS[name].argument
    if argument is None and written is not None:
        raise JobError(f"fault {text!r}: {name} takes no argument; leave out the '='")
    if argument is None or (written is None and not argument.needed):
        return None
    try:
        value = float(written or "")
    except ValueError:
        value = math.nan
    if not argument.least <= value <= argument.most:
        mark = "',' that follows its target" if KINDS[name].targets else "'='"
        raise JobError(
            f"fault {text!r}: {name} takes {argument.meaning}, {argument.least:g} to {argument.most:g}, after a {mark}"
        )
    return value


def check_faults(faults: Sequence[Fault], job: Job, steps: int, absent: frozenset[Worker] = frozenset()) -> None:
    """Raise JobError for a fault that can never strike: bad worker, step past the end, or wrong state of its worker.

    A worker with a memory fault is fenced later if hosts compare states, and with a computation fault if they replay.
    """
    shape, copies = job.shape, job.train.optimizer_copies if job.train.sharded_optimizer else None
    alive: dict[Worker, bool | None] = {worker: worker not in absent for worker in shape.workers()}
    for fault in sorted(faults, key=lambda f: (f.step, list(KINDS).index(f.kind))):
        kind = KINDS[fault.kind]
        shape.require(fault.worker, f"fault {fault}")
        if fault.tensor_rank >= job.grid.tensor_parallel:
            raise JobError(
                f"fault {fault}: tensor rank {fault.tensor_rank}, but [shape] tensor_parallel ="
                f" {job.grid.tensor_parallel}; ranks count from 0"
            )
        if fault.phase == "gather" and copies is None:
            raise JobError(f"fault {fault}: nothing is gathered without [train] sharded_optimizer; use phase step")
        if max(fault.step, fault.last or 0) >= steps:
            raise JobError(f"fault {fault}: the run ends after step {steps - 1}; steps count from 0")
        if kind.struck and alive[fault.worker] is False:
            raise JobError(f"fault {fault}: worker {fault.worker} is already dead at step {fault.step}")
        if not kind.struck and alive[fault.worker] is True:
            raise JobError(f"fault {fault}: worker {fault.worker} is alive at step {fault.step}; kill it before")
        if fault.other is not None:
            shape.require(fault.other, f"fault {fault}")
            if alive[fault.other] is False:
                raise JobError(f"fault {fault}: worker {fault.other} is already dead at step {fault.step}")
            if kind.on_link:
                _check_link(fault, fault.other, shape)
            elif (fenced := _check_pair(fault, fault.other, shape, alive)) is not None:
                alive[fenced] = False
        else:
            hosts = sum(state is not False for worker, state in alive.items() if worker.rank == fault.worker.rank)
            target = None if fault.target is None else kind.targets[fault.target]
            is_found = target is not None and (
                job.integrity.compares_states if target.shows_in_state else bool(job.integrity.every)
            )
            if target is not None and is_found and not target.ends:
                alive[fault.worker] = None
            elif target is not None and target.ends:
                alive[fault.worker] = (hosts if copies is None else min(hosts, copies)) < MAJORITY_HOSTS
            else:
                alive[fault.worker] = not kind.ends


def _check_link(fault: Fault, other: Worker, shape: Shape) -> None:
    worker = fault.worker
    distance = (worker.rank - other.rank) % shape.ranks
    wraps = shape.chunks > 1 and distance in (1, shape.ranks - 1)
    if abs(worker.rank - other.rank) != 1 and (not wraps or worker.rank == other.rank):
        raise JobError(
            f"fault {fault}: workers {worker} and {other} exchange no messages; choose two of neighbouring ranks"
        )


def _check_pair(fault: Fault, other: Worker, shape: Shape, alive: dict[Worker, bool | None]) -> Worker | None:
    worker = fault.worker
    distance = abs(worker.rank - other.rank)
    if distance > 1 and not (shape.chunks > 1 and distance == shape.ranks - 1):
        return None
    if distance == 1 and worker.pipeline != other.pipeline:
        raise JobError(
            f"fault {fault}: whether workers {worker} and {other} exchange messages depends on the plan;"
            " cut neighbours of a pipeline, two of the same stage, or two of ranks further apart"
        )
    fenced = select_fenced((worker, other), [w for w, state in alive.items() if state is not False])
    if fenced is None:
        raise JobError(f"fault {fault}: each of the two is the last live host of its stage, and cannot be fenced")
    return fenced


def parse_punishment(text: str) -> tuple[float, int]:
    """Parse `MEAN_STEPS[,SEED]` to (mean, seed); the seed is 0 by default. Raises JobError."""
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
    """Draw faults for a run of `steps` iterations, in order, none before the second.

    Raises JobError if no worker can ever be killed.

    Args:
        mean: iterations between two faults, at least 1.
        kinds: of faults that end a worker; a kind listed twice is twice as likely.
    """
    if shape.pipelines < 2:
        raise JobError(
            "--punish: with 1 pipeline every worker is the only host of its stage, and its death would end the run"
        )
    draw = random.Random(seed)
    dead = set(absent)
    faults: list[Fault] = []
    for step in range(1, steps):
        if draw.random() * mean >= 1.0:
            continue
        live = Counter(w.rank for w in shape.workers() if w not in dead)
        kills = [w for w in shape.workers() if w not in dead and live[w.rank] > 1]
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
    live = [other for other in shape.workers() if other not in dead]
    near = [Worker(worker.pipeline, rank) for rank in (worker.rank - 1, worker.rank + 1)]
    return next((other for other in near if other in live and select_fenced((worker, other), live) == worker), None)
