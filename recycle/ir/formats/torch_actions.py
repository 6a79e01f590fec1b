"""What torch.distributed.pipelining writes of a schedule: the text of an action, and what all ranks together imply.

The schedule CSV has one action per cell, the profiler one per label. The grammar is that of `torch_csv`; a rank's
actions alone say no shape, no placement and no peers, so these follow from all of them together:

- D = 1, and P is the number of ranks. m is the number of micro-batches that most stages forward (the larger if even).
- A stage counts when it forwards at least half of m micro-batches. V is the number of such stages over P.
- A stage lives on the rank with most of its compute. The peer of a transfer is the home of the stage after or before;
  where there is none, or it is the same rank, the transfer gets its own worker as peer, which no schedule may have.
- torch leaves the optimizer to its caller, who steps when the rank's program is over. So where there is any
  REDUCE_GRAD, each rank gets a STEP for each of its stages at the end, last stage first, as `lower` puts them.
- UNSHARD and RESHARD gather and free sharded parameters; a recycle worker holds its own whole. WAIT_SEND_F and
  WAIT_SEND_B, of torch after 2.13, wait until a buffer that was sent can be used again; a SEND here never waits. All of
  them are dropped and counted in the metadata, under "dropped".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from recycle.errors import ScheduleError
from recycle.ir.instruction import (
    CARRIERS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    ReduceGradients,
    StageWide,
    Transfer,
)
from recycle.ir.schedule import Placement, Schedule
from recycle.job.shape import MicroBatch, Shape, Worker

TORCH_KINDS: tuple[type[Instruction], ...] = (
    *(Forward, Backward, BackwardInput, BackwardWeight, ReduceGradients),
    *(end for ends in CARRIERS.values() for end in ends),
)
"""The kinds that torch has under the same token."""
_CLASSES: dict[str, type[Instruction]] = {cls.token: cls for cls in TORCH_KINDS} | {"BW": Backward}
_SHARDING, _WAITS = ("UNSHARD", "RESHARD"), ("WAIT_SEND_F", "WAIT_SEND_B")
_TYPES = "|".join(sorted((*_CLASSES, *_SHARDING, *_WAITS), key=len, reverse=True))
_LEAF = re.compile(rf"([0-9]{{1,9}})({_TYPES})([0-9]{{0,9}})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
OLD_NOTATION = "read BW as the whole backward, and B as the input's half of it where its W is there"
"""What to warn of where `from_old_notation` was applied."""
OTHER_END: dict[type[Transfer], int] = {
    end: toward * receive.row.needs[0].offset
    for send, receive in CARRIERS.values()
    for end, toward in ((send, -1), (receive, 1))
}
"""Class of a transfer -> stage at its other end, relative to its own."""

Program = list[Instruction]
Actions = Sequence[Instruction | str]
"""A rank's actions as `parse_action` gives them: instructions, and names of actions for which none stands."""


def looks_like_action(text: str) -> bool:
    """Whether `text` has the form of an action."""
    return bool(_LEAF.fullmatch(text) or _PAIR.fullmatch(text))


def parse_action(text: str, worker: Worker, is_old: bool = False) -> Instruction | str:
    """The instruction that `text` writes on `worker`, or the name of an action for which none stands.

    A transfer gets `worker` itself as its peer; `schedule_of` puts in the one that follows from all ranks.

    Args:
        is_old: in the notation with BW, of which B is the input's half; for `from_old_notation`.

    Raises:
        ScheduleError: `text` is not one whole action; says what is wrong with it.
    """
    if not text.startswith("("):
        action = _leaf(text, worker, text)
        if is_old and isinstance(action, Backward) and "BW" not in text:
            return BackwardInput(action.stage, action.micro_batch)
        return action
    pair = _PAIR.fullmatch(text)
    if pair is not None:
        leaves = (_leaf(part.strip(), worker, text) for part in pair.groups())
        halves = {type(leaf): leaf for leaf in leaves}
        forward, backward = halves.get(Forward), halves.get(Backward)
        if isinstance(forward, Forward) and isinstance(backward, Backward):
            return OverlappedPair(forward, backward)
    raise ScheduleError(f"{_shown(text)}: expected one F and one B of one level, for example (0F1;0B0)OVERLAP_F_B")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _leaf(text: str, worker: Worker, whole: str) -> Instruction | str:
    """What the leaf `text` of the action `whole` writes."""
    match = _LEAF.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{_shown(whole)} is not an action: expected for example 2F1, 0SEND_F3 or 1REDUCE_GRAD")
    stage, token, micro_batch = match.groups()
    cls = _CLASSES.get(token)
    is_stage_wide = cls is not None and issubclass(cls, StageWide)
    if token in _SHARDING or is_stage_wide:
        if micro_batch:
            raise ScheduleError(f"{_shown(whole)}: {token} takes no micro-batch, write {stage}{token}")
    elif not micro_batch:
        raise ScheduleError(f"{_shown(whole)}: the micro-batch is missing, write for example {stage}{token}0")
    if cls is None:
        return token
    if issubclass(cls, StageWide):
        return cls(int(stage))
    home = MicroBatch(0, int(micro_batch))
    if issubclass(cls, Transfer):
        return cls(int(stage), home, worker)
    assert issubclass(cls, Compute)
    return cls(int(stage), home)


def from_old_notation(actions: Actions) -> Actions:
    """A rank's actions of a file that has a BW, as `parse_action` read them, each I without a W as the B that it is.

    torch wrote FULL_BACKWARD as "BW" and BACKWARD as "B" then; an option of the schedule said whether B was the whole
    backward or its half, which a W followed.
    """
    weights = {(one.stage, one.micro_batch) for one in actions if isinstance(one, BackwardWeight)}
    return [
        Backward(one.stage, one.micro_batch)
        if isinstance(one, BackwardInput) and (one.stage, one.micro_batch) not in weights
        else one
        for one in actions
    ]


def schedule_of(ranks: Sequence[Actions]) -> tuple[Schedule, list[str]]:
    """The schedule of what `parse_action` gave, rank by rank, and what to warn of.

    Shape, placement, peers and steps are filled in, and actions for which none stands left out, as the module says.

    Raises:
        ScheduleError: the actions imply no shape.
    """
    programs = [[one for one in actions if not isinstance(one, str)] for actions in ranks]
    dropped = Counter(sorted(one for actions in ranks for one in actions if isinstance(one, str)))
    shape, placement = inferred(programs)
    home = homes(placement)
    reduces = any(isinstance(instruction, ReduceGradients) for program in programs for instruction in program)
    full: dict[Worker, Program] = {}
    for rank, program in enumerate(programs):
        worker = Worker(0, rank)
        full[worker] = [
            replace(one, peer=implied_peer(one, worker, home)) if isinstance(one, Transfer) else one for one in program
        ] + (final_steps(placement[rank]) if reduces else [])
    if not dropped:
        return Schedule.build(shape, full, placement=placement), []
    counts = " and ".join(f"{count} {action}" for action, count in dropped.items())
    reasons = {
        "workers here hold their parameters whole": _SHARDING,
        "a SEND here never waits": _WAITS,
    }
    why = " and ".join(reason for reason, actions in reasons.items() if any(action in dropped for action in actions))
    warning = f"dropped {counts}: {why}"
    return Schedule.build(shape, full, placement=placement, metadata={"dropped": dict(dropped)}), [warning]


def computes(program: Iterable[Instruction | str]) -> Iterator[Compute]:
    """The computes of a program, overlapped pairs taken apart."""
    for one in program:
        if isinstance(one, OverlappedPair):
            yield from (one.forward, one.backward)
        elif isinstance(one, Compute):
            yield one


def inferred(programs: Sequence[Program]) -> tuple[Shape, Placement]:
    """Shape and placement that the programs imply, as the module says. Raises ScheduleError where they imply none."""
    forwards: dict[int, set[int]] = {}
    compute: dict[int, Counter[int]] = {}
    for rank, program in enumerate(programs):
        for piece in computes(program):
            compute.setdefault(piece.stage, Counter())[rank] += 1
            if isinstance(piece, Forward):
                forwards.setdefault(piece.stage, set()).add(piece.micro_batch.index)
    if not forwards:
        raise ScheduleError("no forward in any row: stages and micro-batches follow from the forwards")
    sizes = Counter(len(found) for found in forwards.values())
    m = max(sizes, key=lambda size: (sizes[size], size))
    counted = [stage for stage, found in sorted(forwards.items()) if 2 * len(found) >= m]
    ranks = len(programs)
    if len(counted) % ranks:
        raise ScheduleError(
            f"{len(counted)} stage(s) on {ranks} rows: as many stages are needed for each rank, S = P * V"
            f" (stages that forward at least half of {m} micro-batches: {', '.join(map(str, counted))})"
        )
    shape = Shape(1, ranks, m, len(counted) // ranks)
    stages: list[list[int]] = [[] for _ in programs]
    for stage, count in sorted(compute.items()):
        if stage < shape.stages:
            stages[max(count, key=lambda rank: (count[rank], -rank))].append(stage)
    return shape, tuple(map(tuple, stages))


def homes(placement: Placement) -> dict[int, Worker]:
    """The worker that each stage lives on."""
    return {stage: Worker(0, rank) for rank, stages in enumerate(placement) for stage in stages}


def implied_peer(transfer: Transfer, worker: Worker, home: dict[int, Worker]) -> Worker:
    """The worker at the other end of a transfer, itself where the placement has none."""
    return home.get(transfer.stage + OTHER_END[type(transfer)], worker)


def final_steps(stages: Iterable[int]) -> Program:
    """What torch's caller does at the end of a rank's program."""
    return [OptimizerStep(stage) for stage in sorted(stages, reverse=True)]
