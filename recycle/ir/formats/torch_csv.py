"""The schedule CSV of `torch.distributed.pipelining`: row r is the program of rank r, one action in each cell.

    file   = row { newline row }          blank lines at the end are ignored; CRLF on output
    row    = cell { "," cell }            rows may differ in length
    cell   = [ action ]                   empty (a pause) in compute-only files alone; blanks around it are ignored
    action = leaf | "(" leaf ";" leaf ")OVERLAP_F_B"          in a pair one leaf is an F, the other a B
    leaf   = stage ( F | I | W | B | SEND_F | RECV_F | SEND_B | RECV_B ) micro_batch
           | stage ( REDUCE_GRAD | UNSHARD | RESHARD )        stage and micro_batch are digits

Reading is stricter than torch's loader, which takes any cell that begins well. What the file does not say follows
from what it says; numbers beyond that are read as they are, for `check` to find:

- D = 1, and P is the number of rows. m is the number of micro-batches that most stages forward (the larger if even).
- A stage counts when it forwards at least half of m micro-batches. V is the number of such stages over P.
- A stage lives on the row with most of its compute. The peer of a transfer is the home of the stage after or before;
  where there is none, or it is the same row, the transfer gets its own worker as peer, which no schedule may have.
- torch leaves the optimizer to its caller, who steps when the rank's program is over. So a file with any REDUCE_GRAD
  gets a STEP for each stage of each rank at the end of its program, last stage first, as `lower` puts them.
- UNSHARD and RESHARD gather and free sharded parameters; a recycle worker holds its own whole. They are dropped, which
  is logged and counted in the metadata, under "dropped".

Writing undoes this and refuses by name what would not come back: other pipelines and re-routed micro-batches, failed
workers, ties, a STEP elsewhere, a placement that the rows do not show. Metadata and `optimizer` are left out, logged.
"""

from __future__ import annotations

import csv
import io
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from recycle.errors import JobError, ScheduleError
from recycle.ir.dependencies import CARRIERS, NEEDS
from recycle.ir.instruction import (
    KIND_CLASSES,
    Backward,
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
from recycle.shape import MicroBatch, Shape, Worker

_log = logging.getLogger(__name__)

_CLASSES = {cls.token: cls for cls in KIND_CLASSES if cls not in (OverlappedPair, OptimizerStep)}
_SHARDING = ("UNSHARD", "RESHARD")
_TYPES = "|".join(sorted((*_CLASSES, *_SHARDING), key=len, reverse=True))
_LEAF = re.compile(rf"([0-9]{{1,9}})({_TYPES})([0-9]{{0,9}})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_OLD_BACKWARD = re.compile(r"([0-9]+)BW([0-9]+)")
_MOST_CHARACTERS, _MOST_CELLS = 2**26, 2**23
"""A million instructions with their transfers take half of either; every cell becomes an object."""
_LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")
_OTHER_END = {
    kind: toward * NEEDS[receive][0][1]
    for send, receive in CARRIERS.values()
    for kind, toward in ((send, -1), (receive, 1))
}
"""Kind of a transfer -> stage at its other end, relative to its own."""

Program = list[Instruction]


def recognises(content: bytes) -> bool:
    """Whether the first cell of a file that begins so is an action."""
    first = re.split(r"[,\r\n]", content[:4096].decode("utf-8", "replace").strip(" \t\r\n,"), maxsplit=1)[0].strip()
    return bool(_LEAF.fullmatch(first) or _PAIR.fullmatch(first))


def loads(text: str | bytes, name: str = "schedule") -> Schedule:
    """The schedule that `text` holds, as the module says; `name` begins every error message.

    What is odd but clear (leading zeros, blank lines at the end, dropped actions) is logged as a warning.

    Raises:
        ScheduleError: a cell is no action (names row and cell, both from 1), or the rows give no shape.
    """
    told: list[str] = []
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        programs, dropped = _parse(_rows(decoded, told), told)
        shape, placement = _inferred(programs)
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (ScheduleError, JobError) as error:
        raise ScheduleError(f"{name}: {error}") from None
    home = _homes(placement)
    reduces = any(isinstance(instruction, ReduceGradients) for program in programs for instruction in program)
    full: dict[Worker, Program] = {}
    for rank, program in enumerate(programs):
        worker = Worker(0, rank)
        full[worker] = [
            replace(one, peer=_peer(one, worker, home)) if isinstance(one, Transfer) else one for one in program
        ] + (_steps(placement[rank]) if reduces else [])
    for message in told:
        _log.warning("%s: %s", name, message)
    metadata = {"dropped": dict(sorted(dropped.items()))} if dropped else {}
    return Schedule.build(shape, full, placement=placement, metadata=metadata)


def dumps(schedule: Schedule) -> str:
    """The file's text: compute-only or with communication, as the schedule is. Logs what it leaves out.

    Raises:
        ScheduleError: the file cannot hold the schedule; names what.
    """
    _refuse_other_pipelines(schedule)
    shape, placement = schedule.shape, tuple(tuple(sorted(set(stages))) for stages in schedule.placement)
    if schedule.ties:
        raise _refusal(f"ties (stages {schedule.ties[0]} reduce together)", "untie them")
    _refuse_placement(placement)
    home = _homes(placement)
    programs = _without_steps(schedule, placement)
    if not programs[-1]:
        raise _refusal(f"worker 0.{shape.ranks - 1} without instructions", "an empty last row is read as no row")
    for rank, program in enumerate(programs):
        for position, one in enumerate(program):
            where = f"{one} on worker 0.{rank} (position {position})"
            if isinstance(one, Transfer) and one.peer != (peer := _peer(one, Worker(0, rank), home)):
                raise _refusal(where, f"torch exchanges with the home of the neighbouring stage, worker {peer}")
    if not any(isinstance(one, Transfer) for program in programs for one in program) and shape.ranks > 1:
        for program in programs:
            for one in program:
                if isinstance(one, ReduceGradients):
                    raise _refusal(f"{one} without any transfer", "torch adds both or none: write out both, or neither")
    try:
        found = _inferred(programs)
    except ScheduleError as error:
        raise _refusal(f"{schedule!r}", str(error)) from None
    if found != (shape, placement):
        raise _refusal(
            f"{shape} with the stages {_listed(placement)}",
            f"its rows would be read as {found[0]} with the stages {_listed(found[1])}",
        )
    left_out = [f"metadata ({', '.join(schedule.metadata)})"] if schedule.metadata else []
    if schedule.optimizer != "staggered":
        left_out.append(f'optimizer = "{schedule.optimizer}"')
    if left_out:
        _log.warning("a torch CSV cannot hold, and leaves out: %s", ", ".join(left_out))
    return "".join(",".join(map(_cell, program)) + "\r\n" for program in programs)


def _rows(text: str, told: list[str]) -> list[list[str]]:
    if len(text) > _MOST_CHARACTERS or sum(map(text.count, ",\r\n")) > _MOST_CELLS:
        raise ScheduleError(f"too large: at most {_MOST_CHARACTERS} characters and {_MOST_CELLS} cells")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [[cell.strip() for cell in row] for row in reader]
    except csv.Error as error:
        raise ScheduleError(f"line {reader.line_num}: {error}") from None
    blank = 0
    while rows and rows[-1] in ([], [""]):
        rows.pop()
        blank += 1
    if not rows:
        raise ScheduleError("the file is empty: expected one row per rank, for example 0F0,0F1,0B0,0B1")
    if blank:
        told.append(f"ignored {blank} blank line(s) at the end, which torch takes for ranks")
    return [[] if row == [""] else row for row in rows]


def _parse(rows: list[list[str]], told: list[str]) -> tuple[list[Program], Counter[str]]:
    """(a program per row, its transfers with peers still to be found; how many UNSHARD and RESHARD were dropped)."""
    programs: list[Program] = []
    dropped: Counter[str] = Counter()
    zeros: list[str] = []
    empty = communication = ""
    for rank, row in enumerate(rows):
        programs.append([])
        for number, text in enumerate(row, 1):
            where = f"row {rank + 1} (rank {rank}), cell {number}"
            if not text:
                empty = empty or where
                continue
            try:
                action = _action(text, Worker(0, rank))
            except ScheduleError as error:
                raise ScheduleError(f"{where}: {error}") from None
            if _LEADING_ZERO.search(text):
                zeros.append(f"{where}: {text!r}")
            if not isinstance(action, Compute | OverlappedPair):
                communication = communication or f"{text} in {where}"
            if isinstance(action, str):
                dropped[action] += 1
            else:
                programs[-1].append(action)
    if empty and communication:
        raise ScheduleError(
            f"{empty}: empty, which only a compute-only file may have, and this one has {communication}:"
            " remove the cell"
        )
    if zeros:
        told.append(f"{zeros[0]} has leading zeros" + (f", and {len(zeros) - 1} more" if len(zeros) > 1 else ""))
    if dropped:
        counts = " and ".join(f"{count} {action}" for action, count in sorted(dropped.items()))
        told.append(f"dropped {counts}: workers here hold their parameters whole")
    return programs, dropped


def _action(text: str, worker: Worker) -> Instruction | str:
    """The instruction in a cell (a transfer gets its own worker as peer for now), or the name of a sharding action."""
    shown = repr(text if len(text) <= 60 else text[:60] + "...")
    pair = _PAIR.fullmatch(text)
    if pair is not None:
        leaves = (_leaf(part.strip(), worker, shown) for part in pair.groups())
        halves = {type(leaf): leaf for leaf in leaves}
        forward, backward = halves.get(Forward), halves.get(Backward)
        if isinstance(forward, Forward) and isinstance(backward, Backward):
            return OverlappedPair(forward, backward)
    if text.startswith("("):
        raise ScheduleError(f"{shown}: expected one F and one B of one level, for example (0F1;0B0)OVERLAP_F_B")
    return _leaf(text, worker, shown)


def _leaf(text: str, worker: Worker, shown: str) -> Instruction | str:
    old = _OLD_BACKWARD.fullmatch(text)
    if old is not None:
        raise ScheduleError(
            f"{shown}: the notation of before October 2024, where BW was the whole backward and B the input's:"
            f" write {old[1]}B{old[2]} for this one and {old[1]}I{old[2]} for its B"
        )
    match = _LEAF.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{shown} is not an action: expected for example 2F1, 0SEND_F3 or 1REDUCE_GRAD")
    stage, token, micro_batch = match.groups()
    cls = _CLASSES.get(token)
    if cls is None or issubclass(cls, StageWide):
        if micro_batch:
            raise ScheduleError(f"{shown}: {token} takes no micro-batch, write {stage}{token}")
        return token if cls is None else cls(int(stage))
    if not micro_batch:
        raise ScheduleError(f"{shown}: the micro-batch is missing, write for example {stage}{token}0")
    home = MicroBatch(0, int(micro_batch))
    if issubclass(cls, Transfer):
        return cls(int(stage), home, worker)
    assert issubclass(cls, Compute)
    return cls(int(stage), home)


def _pieces(program: Iterable[Instruction]) -> Iterator[Compute]:
    for one in program:
        if isinstance(one, OverlappedPair):
            yield from (one.forward, one.backward)
        elif isinstance(one, Compute):
            yield one


def _inferred(programs: Sequence[Program]) -> tuple[Shape, Placement]:
    """Shape and placement that the rows imply, as the module says. Raises ScheduleError where they imply none."""
    forwards: dict[int, set[int]] = {}
    compute: dict[int, Counter[int]] = {}
    for rank, program in enumerate(programs):
        for piece in _pieces(program):
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


def _homes(placement: Placement) -> dict[int, Worker]:
    return {stage: Worker(0, rank) for rank, stages in enumerate(placement) for stage in stages}


def _peer(transfer: Transfer, worker: Worker, home: dict[int, Worker]) -> Worker:
    return home.get(transfer.stage + _OTHER_END[transfer.kind], worker)


def _steps(stages: Iterable[int]) -> Program:
    return [OptimizerStep(stage) for stage in sorted(stages, reverse=True)]


def _refusal(what: str, why: str) -> ScheduleError:
    return ScheduleError(f"a torch CSV cannot hold {what}: {why}")


def _listed(placement: Placement) -> str:
    return "; ".join(" ".join(map(str, stages)) for stages in placement)


def _refuse_other_pipelines(schedule: Schedule) -> None:
    for worker in schedule.live:
        for position, one in enumerate(schedule.program(worker)):
            micro_batches = [piece.micro_batch for piece in _pieces([one])]
            if isinstance(one, Transfer):
                micro_batches.append(one.micro_batch)
            if any(micro_batch.pipeline != worker.pipeline for micro_batch in micro_batches):
                raise _refusal(
                    f"{one} on worker {worker} (position {position})",
                    "the micro-batch of another pipeline is re-routed to this one",
                )
    if schedule.failed:
        dead = ", ".join(map(str, sorted(schedule.failed)))
        raise _refusal(f"failed workers ({dead})", "each row is a live rank")
    if schedule.shape.pipelines > 1:
        raise _refusal(f"{schedule.shape.pipelines} pipelines", "its rows are the ranks of one, so build it with D = 1")


def _refuse_placement(placement: Placement) -> None:
    owner: dict[int, int] = {}
    for rank, stages in enumerate(placement):
        for stage in stages:
            if owner.setdefault(stage, rank) != rank:
                raise _refusal(f"stage {stage} on workers 0.{owner[stage]} and 0.{rank}", "a stage has one rank")


def _without_steps(schedule: Schedule, placement: Placement) -> list[Program]:
    """The programs less the steps that reading puts back. Raises ScheduleError at any other STEP."""
    programs = [list(schedule.program(worker)) for worker in schedule.shape.workers()]
    steps = any(isinstance(one, OptimizerStep) for program in programs for one in program)
    if not steps:
        return programs
    reduces = any(isinstance(one, ReduceGradients) for program in programs for one in program)
    bodies: list[Program] = []
    for rank, program in enumerate(programs):
        tail = _steps(placement[rank])
        body = program[: len(program) - len(tail)]
        first = next((i for i, one in enumerate(program) if isinstance(one, OptimizerStep)), len(program))
        if not reduces or first < len(body) or program[len(body) :] != tail:
            where = f"{program[first]} on worker 0.{rank}" if first < len(program) else f"no STEP on worker 0.{rank}"
            raise _refusal(
                f"{where} (position {first})",
                "torch's caller steps all stages of a rank after its program, which must reduce and then end with"
                f" {' '.join(map(str, tail)) or 'no STEP'}",
            )
        bodies.append(body)
    return bodies


def _cell(instruction: Instruction) -> str:
    if isinstance(instruction, OverlappedPair):
        return f"({_cell(instruction.forward)};{_cell(instruction.backward)})OVERLAP_F_B"
    if isinstance(instruction, Compute | Transfer):
        return f"{instruction.stage}{instruction.token}{instruction.micro_batch.index}"
    return str(instruction)
