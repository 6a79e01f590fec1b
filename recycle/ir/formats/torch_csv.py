"""The schedule CSV of torch.distributed.pipelining, and the text of its actions, which the profiler's labels share.

Row r is the program of rank r, one action per cell. Shape, placement, peers and steps follow from the actions by the
rules in docs/reference/file-format.md.

    file   = row { newline row }          blank lines at the end are ignored; CRLF on output
    row    = cell { "," cell }            rows may differ in length
    cell   = [ action ]                   empty (a pause) in compute-only files only; surrounding blanks are ignored
    action = leaf | "(" leaf ";" leaf ")OVERLAP_F_B"          in a pair one leaf is an F, the other a B
    leaf   = stage ( F | I | W | B | BW | SEND_F | RECV_F | SEND_B | RECV_B ) micro_batch
           | stage ( WAIT_SEND_F | WAIT_SEND_B ) micro_batch
           | stage ( REDUCE_GRAD | UNSHARD | RESHARD )        stage and micro_batch are digits

A transfer without a peer on another rank gets its own worker as peer, which `check` rejects.
"""

from __future__ import annotations

import csv
import io
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recycle.errors import ScheduleError, errors_as
from recycle.ir.columns import MOST_INSTRUCTIONS, Flags, require_few
from recycle.ir.formats.schedule_input import OrderOnly
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
    WaitSend,
    WaitSendActivation,
    WaitSendGradient,
    computes,
    is_kind,
    make_instruction,
    paired,
)
from recycle.ir.schedule import Placement, Schedule
from recycle.ir.trace import away_from
from recycle.job.shape import MicroBatch, Shape, Worker

TORCH_KINDS: tuple[type[Instruction], ...] = (
    *(Forward, Backward, BackwardInput, BackwardWeight, ReduceGradients),
    *(end for ends in CARRIERS.values() for end in ends),
    *(WaitSendActivation, WaitSendGradient),
)
"""Kinds with the same token in torch."""
_CLASSES: dict[str, type[Instruction]] = {cls.token: cls for cls in TORCH_KINDS} | {"BW": Backward}
_SHARDING = ("UNSHARD", "RESHARD")
_TYPES = "|".join(sorted((*_CLASSES, *_SHARDING), key=len, reverse=True))
_LEAF = re.compile(rf"([0-9]{{1,9}})({_TYPES})([0-9]{{0,9}})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
OLD_NOTATION = "torch's notation of before October 2024: read BW as B, and B as I where there is a W"
OTHER_END: dict[type[Transfer], int] = {
    end: toward * receive.row.needs[0].offset
    for send, receive in CARRIERS.values()
    for end, toward in ((send, -1), (receive, 1))
}
"""Class of a transfer -> stage at its other end, relative to its own stage."""

Program = list[Instruction]
Actions = Sequence[Instruction | str]
"""A rank's actions from `parse_action`: instructions, and names of actions without an instruction."""


def looks_like_action(text: str) -> bool:
    """Return whether `text` has the form of an action."""
    return bool(_LEAF.fullmatch(text) or _PAIR.fullmatch(text))


def parse_action(text: str, worker: Worker, is_old: bool = False) -> Instruction | str:
    """Parse the action of `worker`: an instruction, or the name of an action without one.

    A transfer gets `worker` itself as its peer, which `schedule_of` replaces. `is_old` marks files with BW.
    """
    if not text.startswith("("):
        action = _leaf(text, worker, text)
        if is_old and isinstance(action, Backward) and "BW" not in text:
            return BackwardInput(action.stage, action.micro_batch)
        return action
    match = _PAIR.fullmatch(text)
    pair = paired(_leaf(part.strip(), worker, text) for part in match.groups()) if match else None
    if pair is not None:
        return pair
    raise ScheduleError(f"{_shown(text)}: expected one F and one B, not nested, for example (0F1;0B0)OVERLAP_F_B")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _leaf(text: str, worker: Worker, whole: str) -> Instruction | str:
    match = _LEAF.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{_shown(whole)} is not an action: expected for example 2F1, 0SEND_F3 or 1REDUCE_GRAD")
    stage, token, micro_batch = match.groups()
    cls = _CLASSES.get(token)
    if cls is None or issubclass(cls, StageWide):
        if micro_batch:
            raise ScheduleError(f"{_shown(whole)}: {token} takes no micro-batch, write {stage}{token}")
    elif not micro_batch:
        raise ScheduleError(f"{_shown(whole)}: the micro-batch is missing, write for example {stage}{token}0")
    if cls is None:
        return token
    return make_instruction(cls, stage=int(stage), micro_batch=MicroBatch(0, int(micro_batch or 0)), peer=worker)


def from_old_notation(actions: Actions) -> Actions:
    """Convert each I without a W to B, in a rank's actions of a file with BW.

    torch then wrote FULL_BACKWARD as "BW" and BACKWARD as "B", the whole backward or its half, followed by a W.
    """
    weights = {(action.stage, action.micro_batch) for action in actions if isinstance(action, BackwardWeight)}
    return [
        Backward(action.stage, action.micro_batch)
        if isinstance(action, BackwardInput) and (action.stage, action.micro_batch) not in weights
        else action
        for action in actions
    ]


def schedule_of(ranks: Sequence[Actions]) -> tuple[Schedule, list[str]]:
    """Return (schedule, warnings) of the actions of all ranks; ScheduleError if they imply no shape."""
    programs = [[action for action in actions if not isinstance(action, str)] for actions in ranks]
    dropped = Counter(sorted(action for actions in ranks for action in actions if isinstance(action, str)))
    shape, placement = inferred(programs)
    home = homes(placement)
    reduces = any(isinstance(instruction, ReduceGradients) for program in programs for instruction in program)
    full: dict[Worker, Program] = {}
    for rank, program in enumerate(programs):
        worker = Worker(0, rank)
        full[worker] = [
            replace(action, peer=implied_peer(action, worker, home)) if isinstance(action, Transfer) else action
            for action in program
        ] + [OptimizerStep(stage) for stage in sorted(placement[rank], reverse=True) if reduces]
    if not dropped:
        return Schedule.build(shape, full, placement=placement), []
    counts = " and ".join(f"{count} {action}" for action, count in dropped.items())
    warning = f"dropped {counts}: recycle's workers hold whole parameters"
    return Schedule.build(shape, full, placement=placement, metadata={"dropped": dict(dropped)}), [warning]


def inferred(programs: Sequence[Program]) -> tuple[Shape, Placement]:
    """Infer shape and placement from the programs (see the module). Raises ScheduleError without any forward."""
    forwards: dict[int, set[int]] = {}
    counts: dict[int, Counter[int]] = {}
    for rank, program in enumerate(programs):
        for compute in computes(program):
            counts.setdefault(compute.stage, Counter())[rank] += 1
            if isinstance(compute, Forward):
                forwards.setdefault(compute.stage, set()).add(compute.micro_batch.index)
    if not forwards:
        raise ScheduleError("no forward in any row: stages and micro-batches follow from the forwards")
    sizes = Counter(len(micro_batches) for micro_batches in forwards.values())
    m = max(sizes, key=lambda size: (sizes[size], size))
    counted = [stage for stage, micro_batches in sorted(forwards.items()) if 2 * len(micro_batches) >= m]
    ranks = len(programs)
    if len(counted) % ranks:
        raise ScheduleError(
            f"{len(counted)} stage(s) on {ranks} rows: every rank needs the same number of stages, S = P * V"
            f" (stages that forward at least half of {m} micro-batches: {', '.join(map(str, counted))})"
        )
    shape = Shape(1, ranks, m, len(counted) // ranks)
    stages: list[list[int]] = [[] for _ in programs]
    for stage, count in sorted(counts.items()):
        if stage < shape.stages:
            stages[max(count, key=lambda rank: (count[rank], -rank))].append(stage)
    return shape, tuple(map(tuple, stages))


def homes(placement: Placement) -> dict[int, Worker]:
    """Return the worker of each stage."""
    return {stage: Worker(0, rank) for rank, stages in enumerate(placement) for stage in stages}


def implied_peer(transfer: Transfer, worker: Worker, home: dict[int, Worker]) -> Worker:
    """Return the worker at the other end of a transfer; the worker itself if the placement has none."""
    return home.get(transfer.stage + OTHER_END[type(transfer)], worker)


_log = logging.getLogger(__name__)

_FORMAT = OrderOnly("a torch CSV", "each row is a live rank")
_MOST_CHARACTERS, _MOST_RANKS = 2**26, 2**16
_LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")


def recognises(content: bytes) -> bool:
    """Return whether the first cell of a file with this beginning is an action."""
    first = re.split(r"[,\r\n]", content[:4096].decode("utf-8", "replace").strip(" \t\r\n,"), maxsplit=1)[0].strip()
    return looks_like_action(first)


def loads(text: str | bytes, name: str = "schedule", most: int = MOST_INSTRUCTIONS) -> Schedule:
    """Parse a CSV; `name` begins every error message. Unusual but clear content is logged as a warning.

    Raises:
        ScheduleError: a cell is not an action (names row and cell, both from 1), or the rows imply no shape.
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
    """Return the file's text and log omissions; ScheduleError if the format cannot represent the schedule."""
    c, shape = schedule.columns, schedule.shape
    away = away_from(c, c.worker // shape.ranks)
    _refuse_any(schedule, away, "it runs a re-routed micro-batch of another pipeline")
    _FORMAT.require_one_pipeline(schedule)
    is_known = is_kind(c.kind, (*TORCH_KINDS, OverlappedPair, OptimizerStep))
    _refuse_any(schedule, ~is_known, "torch has no such action")
    reduces = np.flatnonzero(c.kind == ReduceGradients.kind).tolist()
    if reduces and shape.ranks > 1 and not is_kind(c.kind, Transfer).any():
        reduce = schedule.instruction(reduces[0])
        raise _FORMAT.refusal(f"{reduce} without any transfer", "torch adds both or neither: write both, or neither")
    placement = tuple(tuple(sorted(set(stages))) for stages in schedule.placement)
    cells = (
        [_cell(instruction) for instruction in schedule.program(worker) if not isinstance(instruction, OptimizerStep)]
        for worker in shape.workers()
    )
    text = "".join(",".join(row) + "\r\n" for row in cells)
    try:
        reread, _ = schedule_of(_parse(_rows(text, MOST_INSTRUCTIONS, []), [], False))
    except ScheduleError as error:
        raise _FORMAT.refusal(f"{schedule!r}", str(error)) from None
    if (reread.shape, reread.placement) != (shape, placement):
        raise _FORMAT.refusal(
            f"{shape} with the stages {_listed(placement)}",
            f"its rows would be read as {reread.shape} with the stages {_listed(reread.placement)}",
        )
    _FORMAT.require_programs(schedule, reread, "the rows imply")
    _FORMAT.warn(schedule)
    return text


def _rows(text: str, most: int, warnings: list[str]) -> list[list[str]]:
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
    require_few(sum(1 for row in rows for cell in row if cell) - 1, "", most)  # counts separators, as above
    blank = 0
    while rows and rows[-1] in ([], [""]):
        rows.pop()
        blank += 1
    if not rows:
        raise ScheduleError("the file is empty: expected one row per rank, for example 0F0,0F1,0B0,0B1")
    if blank:
        warnings.append(f"ignored {blank} blank line(s) at the end, which torch counts as ranks")
    return [[] if row == [""] else row for row in rows]


def _parse(rows: list[list[str]], warnings: list[str], is_old: bool) -> list[Actions]:
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
            is_compute = isinstance(action, Compute | OverlappedPair) and not isinstance(action, WaitSend)
            if not (communication or is_compute):
                communication = f"{text} in {_place(rank, number)}"
            ranks[-1].append(action)
    if empty and communication:
        raise ScheduleError(
            f"{empty}: is empty, which only compute-only files allow, and this file has {communication}:"
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


def _refuse_any(schedule: Schedule, is_refused: Flags, reason: str) -> None:
    for row in np.flatnonzero(is_refused)[:1].tolist():
        worker, position = schedule.position(row)
        raise _FORMAT.refusal(f"{schedule.instruction(row)} on worker {worker} (position {position})", reason)


def _cell(instruction: Instruction) -> str:
    if isinstance(instruction, OverlappedPair):
        return f"({_cell(instruction.forward)};{_cell(instruction.backward)})OVERLAP_F_B"
    if isinstance(instruction, Compute | Transfer):
        return f"{instruction.stage}{instruction.token}{instruction.micro_batch.index}"
    return str(instruction)
