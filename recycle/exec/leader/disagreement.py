"""Finds disagreements between the reports of one iteration, and the worker at fault: pure functions.

After reduction, the hosts of a stage hold the same gradient sums, and the tensor ranks of a worker the same loss and
gradients of replicated parameters. Workers report squared norms and a checksum over every bit of the sums, and at a
fixed interval checksums of the state at the start of the iteration.

A worker is odd if its own tensor ranks disagree, or if it differs from more than half of the stage's hosts; else none
is.
Limits: one host's wrong addend in all sums does not show.

**Replays.** A host that runs a micro-batch and the hosts that replay it each report checksums of the results. A worker
that differs from more than half of them is odd. Between two, the iteration is repeated, and all other hosts of the
stage replay the disputed micro-batch. If the fault was transient, the two hosts agree, and the host whose earlier
result differs is odd. A worker with several tensor ranks votes once per rank, against the same rank of the others.
Limits: if no earlier result equals the result that all hosts now agree on, the inputs differed, and no worker is odd.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from recycle.errors import RunError
from recycle.exec.checksums import PARAMETERS, PARTS, BitPlace, Checksum, MicroBatchChecksums, differing_bit
from recycle.exec.members import member_name, split_member
from recycle.exec.protocol import Replayed, Report
from recycle.ir.replays import Checked
from recycle.job.shape import MicroBatch

_NOT_FINITE = (math.nan,)


@dataclass(frozen=True)
class Bit:
    """The single bit of a process's state that differs from its peers' states."""

    worker: str
    tensor_rank: int
    stage: int
    place: BitPlace


class Disagreement(RunError):
    """Workers hold or computed different numbers that must be equal.

    Attributes:
        step: the iteration.
        differences: descriptions of the differences.
        odd: worker -> description of its deviation; empty if the fault cannot be attributed.
        held: worker -> its report as text, for all workers that the difference concerns.
        is_of_state: states differ; repeating the iteration does not help.
        ranks: stages in which tensor ranks of a worker differ while no states differ. The error may have spread from
            another stage through the sums, so the stage is weak evidence of the faulty worker.
        bits: differing bits of states, where a single bit explains the difference.
        disputed: micro-batches with different results whose fault cannot be attributed.
        parts: for events, the differing results of odd workers for a micro-batch.
    """

    code = "states-differ"

    def __init__(self, step: int) -> None:
        self.step, self.is_of_state = step, False
        self.differences: list[str] = []
        self.odd: dict[str, str] = {}
        self.held: dict[str, str] = {}
        self.ranks: list[int] = []
        self.bits: list[Bit] = []
        self.disputed: list[Checked] = []
        self.parts: list[dict[str, Any]] = []

    def __str__(self) -> str:
        return f"step {self.step}: {self.description}"

    @property
    def description(self) -> str:
        return "; ".join(self.differences)

    @property
    def is_of_replays(self) -> bool:
        return bool(self.disputed or self.parts)

    def accuse(self, worker: str, deviation: str) -> None:
        self.odd.setdefault(worker, f"it {deviation}")
        self.differences.append(f"worker {worker} {deviation}")


def stage_name(number: int) -> str:
    """Return a stage as text; a number from `PARAMETERS` on stands for the live parameters of a stage."""
    return f"stage {number % PARAMETERS}"


def names(workers: Sequence[str]) -> str:
    return ("workers " if len(workers) > 1 else "worker ") + " and ".join(workers)


def compare(step: int, reports: Mapping[str, Report], named: Callable[[int], str] = stage_name) -> None:
    """Raise Disagreement if the reports of `step` (all processes of each worker, all hosts of each stage) disagree.

    Differing live parameters accuse a worker only if all optimizer states agree, because a wrong state spreads to the
    live parameters of hosts without that state. `named` names a stage's or shard's number.
    """
    workers: dict[str, list[Report]] = defaultdict(list)
    for member in sorted(reports, key=split_member):
        workers[split_member(member)[0]].append(reports[member])
    disagreement, unlike = Disagreement(step), dict[str, str]()
    hosts_of: dict[int, list[str]] = defaultdict(list)
    for worker, ranks in workers.items():
        if difference := _unlike_ranks(ranks, named):
            disagreement.differences.append(f"tensor ranks of worker {worker} hold different {difference}")
            losses = [f"loss {report.loss!r}" for report in ranks if report.loss is not None]
            disagreement.held[worker] = "; ".join([_text(ranks, ranks[0].norms, named), *losses])
            unlike[worker] = f"its tensor ranks hold different {difference}"
        for number in ranks[0].norms:
            hosts_of[number].append(worker)
    for number, hosts in sorted(hosts_of.items()):
        if number >= PARAMETERS and disagreement.is_of_state:
            break
        states: dict[str, object] = {
            worker: tuple(report.states[number] for report in workers[worker])
            for worker in hosts
            if all(number in report.states for report in workers[worker])  # not while the state is copied
        }
        gradients: dict[str, object] = {
            worker: tuple(_gradient(report, number) for report in workers[worker]) for worker in hosts
        }
        name_of_state = "state" if number < PARAMETERS else "parameter"
        for difference, values in ((name_of_state, states), ("gradient", gradients)):
            votes = Counter(values.values())
            if len(votes) <= 1:
                continue
            for worker in values:
                disagreement.held.setdefault(worker, _text(workers[worker], [number], named))
            value, count = votes.most_common(1)[0]
            most = [worker for worker in values if values[worker] == value]
            if 2 * count > len(values):
                for worker in (worker for worker in values if values[worker] != value):
                    disagreement.accuse(worker, f"holds a different {difference} of {named(number)} than {names(most)}")
            else:
                disagreement.differences.append(
                    f"{names(list(values))} hold different {difference}s of {named(number)}"
                )
            if values is states:
                disagreement.is_of_state = True
                peer = workers[most[0]]
                disagreement.bits += (bit for worker in values for bit in _bits(worker, workers[worker], peer, number))
    if not disagreement.differences:
        return
    if not disagreement.is_of_state:
        disagreement.ranks = sorted({number for worker in unlike for number in workers[worker][0].norms})
    if not (disagreement.is_of_state and disagreement.odd):  # a wrong state spreads to tensor ranks of all hosts
        disagreement.odd = unlike | disagreement.odd | unlike
    raise disagreement


def _bits(worker: str, ranks: Sequence[Report], peer_ranks: Sequence[Report], stage: int) -> Iterator[Bit]:
    for rank, (own, other) in enumerate(zip(ranks, peer_ranks, strict=True)):
        if own.states[stage] != other.states[stage]:
            place = differing_bit(Checksum(*own.states[stage]), Checksum(*other.states[stage]))
            if place is not None:
                yield Bit(worker, rank, stage, place)


def _unlike_ranks(ranks: Sequence[Report], named: Callable[[int], str]) -> str:
    """If gradients are not finite, each rank sums only its own part, so ranks may differ."""
    losses = {report.loss for report in ranks}
    if len(losses) > 1 and all(loss is None or math.isfinite(loss) for loss in losses):
        return "losses"
    for stage in ranks[0].replicated:
        gradients = {_parts(report.replicated[stage]) for report in ranks}
        if len(gradients) > 1 and _NOT_FINITE not in gradients:
            return f"gradients of {named(stage)}"
    return ""


def _gradient(report: Report, stage: int) -> tuple[object, ...]:
    parts = _parts(report.norms[stage]), _parts(report.replicated.get(stage, []))
    return *parts, None if _NOT_FINITE in parts else report.checksums.get(stage)


def _parts(parts: Sequence[float]) -> tuple[float, ...]:
    return tuple(parts) if all(map(math.isfinite, parts)) else _NOT_FINITE


def _text(ranks: Sequence[Report], stages: Iterable[int], named: Callable[[int], str]) -> str:
    texts = []
    for report in ranks:
        for stage in stages:
            squared = math.fsum([*report.norms[stage], *report.replicated.get(stage, [])])
            state = "".join(f"{part:016x}" for part in report.states.get(stage, ()))
            checksum = f"{report.checksums.get(stage, 0):016x}" + (f", state {state}" if state else "")
            texts.append(f"{named(stage)}: norm {math.sqrt(squared)!r}, checksum {checksum}")
    return "; ".join(texts)


class Voted(NamedTuple):
    """The subject of a vote: a stage's work on a micro-batch, in one tensor rank."""

    checked: Checked
    tensor_rank: int = 0


Votes = Mapping[Voted, Mapping[str, MicroBatchChecksums]]
"""Subject -> worker -> its results; the worker that owns the work is first."""


def replayed_as(checked: Checked, checksums: MicroBatchChecksums, is_home: bool) -> Replayed:
    """Build a worker's report of a replayed micro-batch."""
    sums = tuple(number for checksum in checksums for number in checksum)
    return Replayed(checked.stage, *checked.micro_batch, is_home, sums)


def votes_of(replayed: Iterable[tuple[str, Replayed]]) -> Votes:
    """Group (process, report) by subject; subjects with only one worker are omitted."""
    votes: dict[Voted, dict[str, MicroBatchChecksums]] = {}
    for process, row in sorted(replayed, key=lambda pair: not pair[1].is_home):
        worker, rank = split_member(process)
        checksums = MicroBatchChecksums(
            *(Checksum(*row.sums[place : place + 2]) for place in range(0, len(row.sums), 2))
        )
        voted = Voted(Checked(row.stage, MicroBatch(row.pipeline, row.index)), rank)
        votes.setdefault(voted, {})[worker] = checksums
    return {voted: votes for voted, votes in sorted(votes.items()) if len(votes) > 1}


def count_votes(step: int, votes: Votes, before: Votes | None = None) -> Disagreement | None:
    """Return the odd workers and disputed micro-batches, or None; `before` holds votes of a disputed earlier run."""
    disagreement = Disagreement(step)
    for voted, results in votes.items():
        (stage, micro_batch), rank = voted
        work = f"micro-batch {micro_batch} at stage {stage}" + (f" in tensor rank {rank}" if rank else "")
        value, count = Counter(results.values()).most_common(1)[0]
        if 2 * count <= len(results):
            wrong = dict(results)
            other = next(result for result in results.values() if result != value)
            disagreement.disputed.append(voted.checked)
            tensors = ", ".join(_differences(other, value))
            disagreement.differences.append(f"{names(list(results))} computed different results for {work} ({tensors})")
        else:
            wrong = {worker: result for worker, result in results.items() if result != value}
            wrong |= _contradicted({} if before is None else before.get(voted, {}), value)
            for worker, result in wrong.items():
                others = [other for other, result in results.items() if result == value and other != worker]
                differences = _differences(result, value)
                disagreement.accuse(
                    worker, f"computed another result for {work} than {names(others)} ({', '.join(differences)})"
                )
                where = {"worker": member_name(worker, rank), "stage": stage, "micro_batch": str(micro_batch)}
                disagreement.parts += ({**where, "tensor": tensor, **bit} for tensor, bit in differences.items())
        if wrong:
            for worker, result in {**results, **wrong}.items():
                words = (f"{name} {checksum.words:016x}" for name, checksum in zip(PARTS, result, strict=True))
                disagreement.held[worker] = f"{work}: {', '.join(words)}"
    return disagreement if disagreement.differences else None


def _contradicted(
    before: Mapping[str, MicroBatchChecksums], value: MicroBatchChecksums
) -> dict[str, MicroBatchChecksums]:
    """Only the first differing tensor counts: later tensors may derive from it, also on a correct worker."""
    for place, agreed in enumerate(value):
        if len({result[place] for result in before.values()}) > 1:
            wrong = {worker: result for worker, result in before.items() if result[place] != agreed}
            return wrong if len(wrong) < len(before) else {}
    return {}


def _differences(first: MicroBatchChecksums, second: MicroBatchChecksums) -> dict[str, dict[str, int]]:
    differences: dict[str, dict[str, int]] = {}
    for tensor, own, other in zip(PARTS, first, second, strict=True):
        if own != other:
            place = differing_bit(own, other)
            differences[tensor] = {} if place is None else {"index": place.word, "bit": place.bit}
    return differences
