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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recycle.exec.checksums import PARTS, Checksum, MicroBatchChecksums, differing_bit
from recycle.exec.members import member_name, split_member
from recycle.exec.protocol import Replayed
from recycle.ir.replays import Checked
from recycle.shape import MicroBatch, Worker


class Voted(NamedTuple):
    """What workers vote on: a stage's work on a micro-batch, as far as one tensor rank of each has it."""

    checked: Checked
    tensor_rank: int = 0


Votes = Mapping[Voted, Mapping[str, MicroBatchChecksums]]
"""What was replayed -> worker -> what it made of it, the one whose work it is first."""


@dataclass(frozen=True)
class Unlike:
    """Hosts made different things of the same.

    Attributes:
        odd: worker -> what it made that others did not.
        disputed: what nobody can say of who is wrong.
        differences: in words.
        held: worker -> what it reported, of all workers that a difference is between.
        parts: for events, what differs in what the odd ones made: worker, stage, micro-batch, tensor, and index of the
            word of 32 bits and bit where one bit explains it.
    """

    odd: dict[str, str] = field(default_factory=dict)
    disputed: tuple[Checked, ...] = ()
    differences: tuple[str, ...] = ()
    held: dict[str, str] = field(default_factory=dict)
    parts: tuple[dict[str, Any], ...] = ()

    @property
    def what(self) -> str:
        return "; ".join(self.differences)


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


def count(votes: Votes, before: Votes | None = None) -> Unlike | None:
    """Who is odd, and what is disputed; None where all agree.

    Args:
        before: the votes of the same iteration when it ran before and something was disputed.
    """
    odd: dict[str, str] = {}
    disputed: dict[Checked, None] = {}
    differences: list[str] = []
    held: dict[str, str] = {}
    parts: list[dict[str, Any]] = []
    for voted, made_by in votes.items():
        checked, rank = voted
        value, agreeing = Counter(made_by.values()).most_common(1)[0]
        if 2 * agreeing <= len(made_by):
            disputed[checked] = None
            held |= {worker: _text(voted, made) for worker, made in made_by.items()}
            one, other, *_ = dict.fromkeys(made_by.values())
            differences.append(f"{_names(made_by)} made different things of {_named(voted)} ({_tensors(one, other)})")
            continue
        wrong = {worker: made for worker, made in made_by.items() if made != value}
        wrong |= _contradicted({} if before is None else before.get(voted, {}), value)
        for worker, made in wrong.items():
            others = _names(other for other, its in made_by.items() if its == value and other != worker)
            what = f"something else of {_named(voted)} than {others} ({_tensors(made, value)})"
            odd.setdefault(worker, f"it made {what}")
            differences.append(f"worker {worker} made {what}")
            process = worker if rank == 0 else member_name(Worker.parse(worker), rank)
            parts += [_part(process, checked, name, made, value) for name in _unlike(made, value)]
            held |= {other: _text(voted, made) for other, made in made_by.items()} | {worker: _text(voted, made)}
    if not differences:
        return None
    return Unlike(odd, tuple(disputed), tuple(differences), held, tuple(parts))


def _contradicted(
    before: Mapping[str, MicroBatchChecksums], value: MicroBatchChecksums
) -> dict[str, MicroBatchChecksums]:
    """Those who said before what all others deny now.

    What differed first counts: what came behind that may have been made of it, also by who was right.
    """
    for made, *its in zip(value, *before.values(), strict=True):
        if len(set(its)) > 1:
            is_right = dict(zip(before, (one == made for one in its), strict=True))
            return {who: before[who] for who in before if not is_right[who]} if any(is_right.values()) else {}
    return {}


def _unlike(one: MicroBatchChecksums, other: MicroBatchChecksums) -> list[str]:
    return [name for name, mine, its in zip(PARTS, one, other, strict=True) if mine != its]


def _tensors(one: MicroBatchChecksums, other: MicroBatchChecksums) -> str:
    return ", ".join(_unlike(one, other))


def _part(
    process: str, checked: Checked, name: str, made: MicroBatchChecksums, value: MicroBatchChecksums
) -> dict[str, Any]:
    place = differing_bit(made[PARTS.index(name)], value[PARTS.index(name)])
    found = {"worker": process, "stage": checked.stage, "micro_batch": str(checked.micro_batch), "tensor": name}
    return found if place is None else found | {"index": place.word, "bit": place.bit}


def _named(voted: Voted) -> str:
    (stage, micro_batch), rank = voted
    return f"micro-batch {micro_batch} at stage {stage}" + (f" in tensor rank {rank}" if rank else "")


def _text(voted: Voted, made: MicroBatchChecksums) -> str:
    sums = ", ".join(f"{name} {one.words:016x}" for name, one in zip(PARTS, made, strict=True))
    return f"{_named(voted)}: {sums}"


def _names(workers: Iterable[str]) -> str:
    names: Sequence[str] = list(workers)
    return ("workers " if len(names) > 1 else "worker ") + " and ".join(names)
