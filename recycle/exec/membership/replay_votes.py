"""Finds who computed wrong, from what several hosts of a stage made of the same micro-batch: pure.

A host that runs a micro-batch and those that replay it each report checksums of what came out. Whoever differs from
more than half of them is odd. Of two that differ nobody can say which is right. So the iteration is repeated, and all
other hosts of the stage replay what is disputed: then a third host votes, or, where a fault has passed, the two agree,
and who differs from that now in what it said before is odd.

Limits: where none of those that differed said before what all say now, they had other inputs, and nobody is odd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recycle.exec.membership.messages import Replayed
from recycle.exec.model.checksum import Checksum, differing_bit
from recycle.exec.model.made import PARTS, Made
from recycle.ir.replays import Checked
from recycle.shape import MicroBatch

Votes = Mapping[Checked, Mapping[str, Made]]
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


def replayed_as(checked: Checked, made: Made, is_home: bool) -> Replayed:
    """What a worker reports of it."""
    sums = tuple(number for checksum in made for number in checksum)
    return Replayed(checked.stage, *checked.micro_batch, is_home, sums)


def votes_of(said: Iterable[tuple[str, Replayed]]) -> Votes:
    """What (worker, report) come to; what only one worker speaks of is left out."""
    found: dict[Checked, dict[str, Made]] = {}
    for worker, one in sorted(said, key=lambda pair: not pair[1].is_home):
        made = Made(*(Checksum(*one.sums[place : place + 2]) for place in range(0, len(one.sums), 2)))
        found.setdefault(Checked(one.stage, MicroBatch(one.pipeline, one.index)), {})[worker] = made
    return {checked: votes for checked, votes in sorted(found.items()) if len(votes) > 1}


def count(votes: Votes, before: Votes | None = None) -> Unlike | None:
    """Who is odd, and what is disputed; None where all agree.

    Args:
        before: the votes of the same iteration when it ran before and something was disputed.
    """
    odd: dict[str, str] = {}
    disputed: list[Checked] = []
    differences: list[str] = []
    held: dict[str, str] = {}
    parts: list[dict[str, Any]] = []
    for checked, made_by in votes.items():
        value, agreeing = Counter(made_by.values()).most_common(1)[0]
        if 2 * agreeing <= len(made_by):
            disputed.append(checked)
            held |= {worker: _text(checked, made) for worker, made in made_by.items()}
            one, other, *_ = dict.fromkeys(made_by.values())
            differences.append(f"{_names(made_by)} made different things of {_named(checked)} ({_tensors(one, other)})")
            continue
        wrong = {worker: made for worker, made in made_by.items() if made != value}
        wrong |= _contradicted({} if before is None else before.get(checked, {}), value)
        for worker, made in wrong.items():
            others = _names(other for other, its in made_by.items() if its == value and other != worker)
            what = f"something else of {_named(checked)} than {others} ({_tensors(made, value)})"
            odd.setdefault(worker, f"it made {what}")
            differences.append(f"worker {worker} made {what}")
            parts += [_part(worker, checked, name, made, value) for name in _unlike(made, value)]
            held |= {other: _text(checked, made) for other, made in made_by.items()} | {worker: _text(checked, made)}
    if not differences:
        return None
    return Unlike(odd, tuple(disputed), tuple(differences), held, tuple(parts))


def _contradicted(before: Mapping[str, Made], value: Made) -> dict[str, Made]:
    """Those who said before what all others deny now.

    What differed first counts: what came behind that may have been made of it, also by who was right.
    """
    for made, *its in zip(value, *before.values(), strict=True):
        if len(set(its)) > 1:
            is_right = dict(zip(before, (one == made for one in its), strict=True))
            return {who: before[who] for who in before if not is_right[who]} if any(is_right.values()) else {}
    return {}


def _unlike(one: Made, other: Made) -> list[str]:
    return [name for name, mine, its in zip(PARTS, one, other, strict=True) if mine != its]


def _tensors(one: Made, other: Made) -> str:
    return ", ".join(_unlike(one, other))


def _part(worker: str, checked: Checked, name: str, made: Made, value: Made) -> dict[str, Any]:
    place = differing_bit(made[PARTS.index(name)], value[PARTS.index(name)])
    found = {"worker": worker, "stage": checked.stage, "micro_batch": str(checked.micro_batch), "tensor": name}
    return found if place is None else found | {"index": place.word, "bit": place.bit}


def _named(checked: Checked) -> str:
    return f"micro-batch {checked.micro_batch} at stage {checked.stage}"


def _text(checked: Checked, made: Made) -> str:
    sums = ", ".join(f"{name} {one.words:016x}" for name, one in zip(PARTS, made, strict=True))
    return f"{_named(checked)}: {sums}"


def _names(workers: Iterable[str]) -> str:
    names: Sequence[str] = list(workers)
    return ("workers " if len(names) > 1 else "worker ") + " and ".join(names)
