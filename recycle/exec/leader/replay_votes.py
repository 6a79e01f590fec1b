"""Finds who computed wrong, from what several hosts of a stage made of the same micro-batch: pure.

A host that runs a micro-batch and those that replay it each report checksums of what came out. Whoever differs from
more than half of them is odd. Of two that differ nobody can say which is right. So the iteration is repeated, and all
other hosts of the stage replay what is disputed: then a third host votes, or, where a fault has passed, the two agree,
and who differs from that now in what it said before is odd.

A worker of several tensor ranks votes once with each, against the same rank of the others.

Limits: where none of those that differed said before what all say now, they had other inputs, and nobody is odd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from recycle.exec.checksums import PARTS, Checksum, MicroBatchChecksums, differing_bit
from recycle.exec.leader.disagreement import Disagreement, names
from recycle.exec.members import member_name, split_member
from recycle.exec.protocol import Replayed
from recycle.ir.replays import Checked
from recycle.job.shape import MicroBatch


class Voted(NamedTuple):
    """What workers vote on: a stage's work on a micro-batch, as far as one tensor rank of each has it."""

    checked: Checked
    tensor_rank: int = 0


Votes = Mapping[Voted, Mapping[str, MicroBatchChecksums]]
"""What was replayed -> worker -> what it made of it, the one whose work it is first."""


def replayed_as(checked: Checked, made: MicroBatchChecksums, is_home: bool) -> Replayed:
    """What a worker reports of it."""
    sums = tuple(number for checksum in made for number in checksum)
    return Replayed(checked.stage, *checked.micro_batch, is_home, sums)


def votes_of(said: Iterable[tuple[str, Replayed]]) -> Votes:
    """What (process, report) come to; what only one worker speaks of is left out."""
    found: dict[Voted, dict[str, MicroBatchChecksums]] = {}
    for process, one in sorted(said, key=lambda pair: not pair[1].is_home):
        worker, rank = split_member(process)
        made = MicroBatchChecksums(*(Checksum(*one.sums[place : place + 2]) for place in range(0, len(one.sums), 2)))
        voted = Voted(Checked(one.stage, MicroBatch(one.pipeline, one.index)), rank)
        found.setdefault(voted, {})[worker] = made
    return {voted: votes for voted, votes in sorted(found.items()) if len(votes) > 1}


def count_votes(step: int, votes: Votes, before: Votes | None = None) -> Disagreement | None:
    """Who is odd, and what is disputed; None where all agree.

    Args:
        before: the votes of the same iteration when it ran before and something was disputed.
    """
    found = Disagreement(step)
    for voted, made_by in votes.items():
        (stage, micro_batch), rank = voted
        work = f"micro-batch {micro_batch} at stage {stage}" + (f" in tensor rank {rank}" if rank else "")
        value, count = Counter(made_by.values()).most_common(1)[0]
        if 2 * count <= len(made_by):
            wrong = dict(made_by)
            other = next(made for made in made_by.values() if made != value)
            found.disputed.append(voted.checked)
            tensors = ", ".join(_differences(other, value))
            found.differences.append(f"{names(list(made_by))} made different things of {work} ({tensors})")
        else:
            wrong = {worker: made for worker, made in made_by.items() if made != value}
            wrong |= _contradicted({} if before is None else before.get(voted, {}), value)
            for worker, made in wrong.items():
                others = [other for other, its in made_by.items() if its == value and other != worker]
                differences = _differences(made, value)
                found.accuse(worker, f"made something else of {work} than {names(others)} ({', '.join(differences)})")
                where = {"worker": member_name(worker, rank), "stage": stage, "micro_batch": str(micro_batch)}
                found.parts += ({**where, "tensor": tensor, **bit} for tensor, bit in differences.items())
        if wrong:
            found.held |= {worker: f"{work}: {_text(made)}" for worker, made in {**made_by, **wrong}.items()}
    return found if found.differences else None


def _contradicted(
    before: Mapping[str, MicroBatchChecksums], value: MicroBatchChecksums
) -> dict[str, MicroBatchChecksums]:
    """Those who said before what all others deny now.

    What differed first counts: what came behind that may have been made of it, also by who was right.
    """
    for place, now in enumerate(value):
        if len({made[place] for made in before.values()}) > 1:
            wrong = {worker: made for worker, made in before.items() if made[place] != now}
            return wrong if len(wrong) < len(before) else {}
    return {}


def _differences(one: MicroBatchChecksums, other: MicroBatchChecksums) -> dict[str, dict[str, int]]:
    """Tensor that differs -> index of the word of 32 bits and the bit, where one bit explains it."""
    found: dict[str, dict[str, int]] = {}
    for tensor, mine, its in zip(PARTS, one, other, strict=True):
        if mine != its:
            place = differing_bit(mine, its)
            found[tensor] = {} if place is None else {"index": place.word, "bit": place.bit}
    return found


def _text(made: MicroBatchChecksums) -> str:
    return ", ".join(f"{name} {one.words:016x}" for name, one in zip(PARTS, made, strict=True))
