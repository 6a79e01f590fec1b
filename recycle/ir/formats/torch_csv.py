"""The schedule CSV of `torch.distributed.pipelining`: row r is the program of rank r, one action in each cell.

    file   = row { newline row }          blank lines at the end are ignored; CRLF on output
    row    = cell { "," cell }            rows may differ in length
    cell   = [ action ]                   empty (a pause) in compute-only files alone; blanks around it are ignored
    action = leaf | "(" leaf ";" leaf ")OVERLAP_F_B"          in a pair one leaf is an F, the other a B
    leaf   = stage ( F | I | W | B | BW | SEND_F | RECV_F | SEND_B | RECV_B ) micro_batch
           | stage ( WAIT_SEND_F | WAIT_SEND_B ) micro_batch
           | stage ( REDUCE_GRAD | UNSHARD | RESHARD )        stage and micro_batch are digits

Reading is stricter than torch's loader, which takes any cell that begins well. What the file does not say (shape,
placement, peers, steps) follows from what it says, by the rules of `torch_actions`; numbers beyond that are read as
they are, for `check` to find. What reading drops is logged. `BW` marks the notation of September and October 2024, in
which it is the whole backward, and B the input's half where the file has its W.

Writing undoes this and refuses by name what would not come back: other pipelines and re-routed micro-batches, failed
workers, ties, a STEP elsewhere, a placement that the rows do not show. Metadata, `optimizer` and `buckets` are left
out, logged.
"""

from __future__ import annotations

import csv
import io
import logging
import re

import numpy as np

from recycle.errors import ScheduleError, errors_as
from recycle.ir.columns import require_few
from recycle.ir.formats.order_only import OrderOnly
from recycle.ir.formats.torch_actions import (
    OLD_NOTATION,
    TORCH_KINDS,
    Actions,
    Program,
    final_steps,
    from_old_notation,
    homes,
    implied_peer,
    inferred,
    looks_like_action,
    parse_action,
    schedule_of,
)
from recycle.ir.instruction import (
    Compute,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    ReduceGradients,
    Transfer,
)
from recycle.ir.schedule import Placement, Schedule
from recycle.ir.trace import away_from
from recycle.job.shape import Worker

_log = logging.getLogger(__name__)

_FORMAT = OrderOnly("a torch CSV", "rows are the ranks of one", "each row is a live rank")
_MOST_CHARACTERS, _MOST_RANKS = 2**26, 2**16
_LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")


def recognises(content: bytes) -> bool:
    """Whether the first cell of a file that begins so is an action."""
    first = re.split(r"[,\r\n]", content[:4096].decode("utf-8", "replace").strip(" \t\r\n,"), maxsplit=1)[0].strip()
    return looks_like_action(first)


def loads(text: str | bytes, name: str = "schedule", most: int | None = None) -> Schedule:
    """The schedule that `text` holds, as the module says; `name` begins every error message.

    What is odd but clear (leading zeros, blank lines at the end, dropped actions) is logged as a warning.

    Raises:
        ScheduleError: a cell is no action (names row and cell, both from 1), or the rows give no shape.
    """
    warnings: list[str] = []
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    with errors_as(ScheduleError, name):
        schedule, dropped = schedule_of(_parse(_rows(decoded, most, warnings), warnings, "BW" in decoded))
    for message in warnings + dropped:
        _log.warning("%s: %s", name, message)
    return schedule


def dumps(schedule: Schedule) -> str:
    """The file's text: compute-only or with communication, as the schedule is. Logs what it leaves out.

    Raises:
        ScheduleError: the file cannot hold the schedule; names what.
    """
    _refuse_other_pipelines(schedule)
    shape, placement = schedule.shape, tuple(tuple(sorted(set(stages))) for stages in schedule.placement)
    _refuse_placement(placement)
    home = homes(placement)
    programs = _without_steps(schedule, placement)
    if not programs[-1]:
        raise _FORMAT.refusal(f"worker 0.{shape.ranks - 1} without instructions", "an empty last row is read as no row")
    for rank, program in enumerate(programs):
        for position, one in enumerate(program):
            where = f"{one} on worker 0.{rank} (position {position})"
            if not isinstance(one, (*TORCH_KINDS, OverlappedPair)):
                raise _FORMAT.refusal(where, "torch has no such action")
            if isinstance(one, Transfer) and one.peer != (peer := implied_peer(one, Worker(0, rank), home)):
                raise _FORMAT.refusal(where, f"torch exchanges with the home of the neighbouring stage, worker {peer}")
    every = [one for program in programs for one in program]
    reduce = next((one for one in every if isinstance(one, ReduceGradients)), None)
    if reduce is not None and shape.ranks > 1 and not any(isinstance(one, Transfer) for one in every):
        raise _FORMAT.refusal(f"{reduce} without any transfer", "torch adds both or none: write out both, or neither")
    try:
        found = inferred(programs)
    except ScheduleError as error:
        raise _FORMAT.refusal(f"{schedule!r}", str(error)) from None
    if found != (shape, placement):
        raise _FORMAT.refusal(
            f"{shape} with the stages {_listed(placement)}",
            f"its rows would be read as {found[0]} with the stages {_listed(found[1])}",
        )
    _FORMAT.warn(schedule)
    return "".join(",".join(map(_cell, program)) + "\r\n" for program in programs)


def _rows(text: str, most: int | None, warnings: list[str]) -> list[list[str]]:
    if len(text) > _MOST_CHARACTERS:
        raise ScheduleError(f"too large: {len(text):,} characters, at most {_MOST_CHARACTERS:,}")
    require_few(sum(map(text.count, ",\r\n")))
    if (lines := max(text.count("\n"), text.count("\r"))) > _MOST_RANKS:
        raise ScheduleError(f"too large: {lines:,} lines, at most {_MOST_RANKS:,} ranks")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [[cell.strip() for cell in row] for row in reader]
    except csv.Error as error:
        raise ScheduleError(f"line {reader.line_num}: {error}") from None
    require_few(sum(1 for row in rows for cell in row if cell) - 1, "", most)  # as many as lie between two cells
    blank = 0
    while rows and rows[-1] in ([], [""]):
        rows.pop()
        blank += 1
    if not rows:
        raise ScheduleError("the file is empty: expected one row per rank, for example 0F0,0F1,0B0,0B1")
    if blank:
        warnings.append(f"ignored {blank} blank line(s) at the end, which torch takes for ranks")
    return [[] if row == [""] else row for row in rows]


def _parse(rows: list[list[str]], warnings: list[str], is_old: bool) -> list[Actions]:
    """The actions of each row, the peers of transfers still to be found; `is_old`: in the notation with BW."""
    ranks: list[list[Instruction | str]] = []
    zeros: list[str] = []
    empty = communication = ""
    for rank, row in enumerate(rows):
        ranks.append([])
        worker = Worker(0, rank)
        for number, text in enumerate(row, 1):
            if not text:
                empty = empty or _place(rank, number)
                continue
            try:
                action = parse_action(text, worker, is_old)
            except ScheduleError as error:
                raise ScheduleError(f"{_place(rank, number)}: {error}") from None
            if "0" in text and _LEADING_ZERO.search(text):
                zeros.append(f"{_place(rank, number)}: {text!r}")
            if not (communication or isinstance(action, Compute | OverlappedPair)):
                communication = f"{text} in {_place(rank, number)}"
            ranks[-1].append(action)
    if empty and communication:
        raise ScheduleError(
            f"{empty}: empty, which only a compute-only file may have, and this one has {communication}:"
            " remove the cell"
        )
    if zeros:
        warnings.append(f"{zeros[0]} has leading zeros" + (f", and {len(zeros) - 1} more" if len(zeros) > 1 else ""))
    if is_old:
        warnings.append(OLD_NOTATION)
    return [from_old_notation(rank) for rank in ranks] if is_old else list(ranks)


def _place(rank: int, number: int) -> str:
    return f"row {rank + 1} (rank {rank}), cell {number}"


def _listed(placement: Placement) -> str:
    return "; ".join(" ".join(map(str, stages)) for stages in placement)


def _refuse_other_pipelines(schedule: Schedule) -> None:
    away = np.flatnonzero(away_from(schedule.columns, schedule.columns.worker // schedule.shape.ranks))
    if len(away):
        worker, position = schedule.position(int(away[0]))
        raise _FORMAT.refusal(
            f"{schedule.instruction(int(away[0]))} on worker {worker} (position {position})",
            "the micro-batch of another pipeline is re-routed to this one",
        )
    _FORMAT.require_one_pipeline(schedule)


def _refuse_placement(placement: Placement) -> None:
    owner: dict[int, int] = {}
    for rank, stages in enumerate(placement):
        for stage in stages:
            if owner.setdefault(stage, rank) != rank:
                raise _FORMAT.refusal(f"stage {stage} on workers 0.{owner[stage]} and 0.{rank}", "a stage has one rank")


def _without_steps(schedule: Schedule, placement: Placement) -> list[Program]:
    """The programs less the steps that reading puts back. Raises ScheduleError at any other STEP."""
    programs = [list(schedule.program(worker)) for worker in schedule.shape.workers()]
    kinds = {type(one) for program in programs for one in program}
    if OptimizerStep not in kinds:
        return programs
    bodies: list[Program] = []
    for rank, program in enumerate(programs):
        tail = final_steps(placement[rank])
        body = program[: len(program) - len(tail)]
        first = next((i for i, one in enumerate(program) if isinstance(one, OptimizerStep)), len(program))
        if ReduceGradients not in kinds or first < len(body) or program[len(body) :] != tail:
            where = f"{program[first]} on worker 0.{rank}" if first < len(program) else f"no STEP on worker 0.{rank}"
            raise _FORMAT.refusal(
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
