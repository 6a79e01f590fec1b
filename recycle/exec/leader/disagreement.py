"""Finds where reports of one iteration disagree about numbers that must have the same bits, and who is odd: pure.

The hosts of a stage hold the same sums of gradients once these are reduced, and the tensor ranks of a worker the same
loss and the same gradients of what they do not cut between them. A worker reports the squared norms, and a checksum in
which every bit of the sums counts. A difference comes from hardware: memory that changed, or a sum that went wrong on
one host only. Every so often the hosts of a stage also report checksums of the state that the iteration began with.

Who is odd: a worker whose own tensor ranks disagree, and whoever differs from more than half of the stage's hosts. Of
two hosts that differ, or of groups of which none is more than half, nobody can say.
Limits: what is wrong in the same way on all hosts (one host's addend, summed by all) is not seen here.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from recycle.errors import RunError
from recycle.exec.checksums import PARAMETERS, BitPlace, Checksum, differing_bit
from recycle.exec.members import split_member
from recycle.exec.protocol import Report

_Held = tuple[object, ...]
_NOT_FINITE = (math.nan,)


@dataclass(frozen=True)
class Bit:
    """The one bit of a process's state that differs from its peers'."""

    worker: str
    tensor_rank: int
    stage: int
    place: BitPlace


class Disagreement(RunError):
    """Workers hold different numbers where they must be the same.

    Attributes:
        step: the iteration.
        odd: worker -> what it holds that others do not; empty when nobody can say who is wrong.
        held: worker -> what it reported, of all workers that the difference is between.
        is_of_state: states differ, which no repetition mends.
        ranks: the stages in which tensor ranks of a worker hold different things, and no states differ. What was wrong
            in one of them has spread through the sums to others: it says little of who computed wrong.
        bits: of states, where one bit explains the difference.
    """

    def __init__(
        self,
        step: int,
        differences: Sequence[str],
        odd: Mapping[str, str],
        held: Mapping[str, str],
        is_of_state: bool = False,
        bits: Sequence[Bit] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(f"step {step}: {'; '.join(differences)}")
        self.is_of_state, self.bits, self.ranks = is_of_state, list(bits), list(ranks)
        self.step, self.odd, self.held = step, dict(odd), dict(held)
        self.what = "; ".join(differences)


def stage_name(number: int) -> str:
    """A stage in words; also the one whose live parameters a number stands for."""
    return f"stage {number % PARAMETERS}"


def compare(step: int, reports: Mapping[str, Report], named: Callable[[int], str] = stage_name) -> None:
    """Raise Disagreement if the reports of `step` disagree.

    Args:
        reports: process -> its report; all processes of each worker, all hosts of each stage.
        named: gives the words for the number under which reports have a stage, or a shard of one.

    Live parameters that differ accuse somebody only where all states of optimizers agree: a wrong state spreads to the
    live parameters of hosts that do not hold it.
    """
    workers: dict[str, list[Report]] = defaultdict(list)
    for member in sorted(reports, key=split_member):
        workers[split_member(member)[0]].append(reports[member])
    differences: list[str] = []
    odd: dict[str, str] = {}
    unlike: dict[str, str] = {}
    held: dict[str, str] = {}
    is_of_state, bits = False, list[Bit]()
    for worker, ranks in workers.items():
        if what := _unlike_ranks(ranks, named):
            differences.append(f"tensor ranks of worker {worker} hold different {what}")
            unlike[worker] = f"its tensor ranks hold different {what}"
            said = [_text(report, stage, named) for report in ranks for stage in report.norms]
            held[worker] = "; ".join([*said, *(f"loss {report.loss!r}" for report in ranks if report.loss is not None)])
    of_stages: dict[int, dict[str, _Held]] = defaultdict(dict)
    for worker, ranks in workers.items():
        for stage in ranks[0].norms:
            of_stages[stage][worker] = _held(ranks, stage)
    for stage, hosts in sorted(of_stages.items()):
        if stage >= PARAMETERS and is_of_state:
            break
        states: dict[str, _Held] = {
            name: tuple(one.states[stage] for one in workers[name])
            for name in hosts
            if all(stage in one.states for one in workers[name])  # one that is still copied is not compared
        }
        name_of_state = "state" if stage < PARAMETERS else "parameter"
        for what, of_hosts in ((name_of_state, states), ("gradient", hosts)):
            votes = Counter(of_hosts.values())
            if len(votes) <= 1:
                continue
            for worker in of_hosts:
                held.setdefault(worker, "; ".join(_text(report, stage, named) for report in workers[worker]))
            value, count = votes.most_common(1)[0]
            if 2 * count > len(of_hosts):
                most = _names(worker for worker, its in of_hosts.items() if its == value)
                for worker in (worker for worker, its in of_hosts.items() if its != value):
                    odd.setdefault(worker, f"it holds another {what} of {named(stage)} than {most}")
                    differences.append(f"worker {worker} holds another {what} of {named(stage)} than {most}")
            else:
                differences.append(f"{_names(of_hosts)} hold different {what}s of {named(stage)}")
            if of_hosts is states:
                is_of_state = True
                peer = next(worker for worker, its in of_hosts.items() if its == value)
                bits += (bit for worker in of_hosts for bit in _bits(worker, workers[worker], workers[peer], stage))
    if differences:
        of_ranks = [] if is_of_state else sorted({stage for worker in unlike for stage in workers[worker][0].norms})
        if not (is_of_state and odd):  # a wrong state has spread to tensor ranks of all hosts
            odd = unlike | odd | unlike
        raise Disagreement(step, differences, odd, held, is_of_state, bits, of_ranks)


def _bits(worker: str, ranks: Sequence[Report], of_peer: Sequence[Report], stage: int) -> Iterator[Bit]:
    """The bits of a worker's states that differ from a peer's, as far as there is one in each."""
    for rank, (own, other) in enumerate(zip(ranks, of_peer, strict=True)):
        if stage in own.states and stage in other.states and own.states[stage] != other.states[stage]:
            place = differing_bit(Checksum(*own.states[stage]), Checksum(*other.states[stage]))
            if place is not None:
                yield Bit(worker, rank, stage, place)


def _unlike_ranks(ranks: Sequence[Report], named: Callable[[int], str]) -> str:
    """What the tensor ranks of one worker should have in common, and have not; empty when they have it all.

    Of what is not finite each rank sums its own part only.
    """
    losses = {report.loss for report in ranks}
    if len(losses) > 1 and all(loss is None or math.isfinite(loss) for loss in losses):
        return "losses"
    for stage in ranks[0].replicated:
        found = {_parts(report.replicated[stage]) for report in ranks}
        if len(found) > 1 and _NOT_FINITE not in found:
            return f"gradients of {named(stage)}"
    return ""


def _held(ranks: Sequence[Report], stage: int) -> _Held:
    """What a host says of a stage. Bits of what is not finite mean nothing."""
    said = []
    for report in ranks:
        parts = _parts(report.norms[stage]), _parts(report.replicated.get(stage, []))
        said.append((parts, None if _NOT_FINITE in parts else report.checksums.get(stage)))
    return tuple(said)


def _parts(parts: Sequence[float]) -> tuple[float, ...]:
    return tuple(parts) if all(map(math.isfinite, parts)) else _NOT_FINITE


def _text(report: Report, stage: int, named: Callable[[int], str]) -> str:
    squared = math.fsum([*report.norms[stage], *report.replicated.get(stage, [])])
    state = report.states.get(stage)
    state_text = "" if state is None else f", state {state[0]:016x}{state[1]:016x}"
    return f"{named(stage)}: norm {math.sqrt(squared)!r}, checksum {report.checksums.get(stage, 0):016x}{state_text}"


def _names(workers: Iterable[str]) -> str:
    names: Collection[str] = list(workers)
    return ("workers " if len(names) > 1 else "worker ") + " and ".join(names)
