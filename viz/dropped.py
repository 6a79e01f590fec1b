"""A schedule file that somebody dropped on the page: read from its bytes, checked and drawn as far as it can be.

Nothing of it is trusted: it is not run, not written anywhere, shown as text only, and refused before it is read when
it is larger than any schedule that the page could show, or says that it is.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import RecycleError, ScheduleError
from recycle.files import entries
from recycle.ir import formats, native
from recycle.ir.formats import chrome_trace
from recycle.ir.formats.schedule_input import ScheduleInput, unpack
from recycle.ir.instruction import Transfer, parse_instruction
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape, Worker
from viz.sources import ScheduleFile, executed_source, schedule_source

MOST_BYTES = 2**25
MOST_INSTRUCTIONS, MOST_WORKERS, MOST_CHUNKS, MOST_CELLS = 1_000_000, 8192, 2**18, 2**22
"""What is checked at once for a page; `recycle check` takes more."""
_SEPARATORS, _MOST_SEPARATORS = (b",", b" ", b"\n", b"\r"), MOST_INSTRUCTIONS * 3 // 2
"""What lies between them becomes objects while a file is read."""
_LONGEST_NAME = 120
_MOST_LEFT_OUT = 1000
"""Beyond that a file is no schedule with mistakes but something else."""


def read_dropped(contents: str, name: str) -> ScheduleFile:
    """A dropped file as the browser sends it, read, checked and timed.

    Args:
        contents: `data:…;base64,…` as `dcc.Upload` gives it.
        name: of the file, which may be anything.

    Raises:
        RecycleError: it is no schedule, or is too large.
    """
    return inspect(_content(contents, printable(name)), printable(name))


def inspect(content: bytes, name: str) -> ScheduleFile:
    """Read, check and time a file's content. Raises RecycleError when it is no schedule, or is too large."""
    unpacked = unpack(content, name)
    text = unpacked.text
    is_trace = chrome_trace.recognises(text)
    if not is_trace and sum(text.count(separator) for separator in _SEPARATORS) > _MOST_SEPARATORS:
        raise ScheduleError(
            f"{name}: has more cells, words or lines than a schedule that the page shows: use recycle check"
        )
    stated = None if is_trace else _stated_shape(text)
    if stated is not None:
        _refuse_large(stated, 0, name)
    left_out: list[str] = []
    most = min(unpacked.most, MOST_INSTRUCTIONS)
    try:
        source = formats.load_unpacked(replace(unpacked, most=most), name)
    except ScheduleError:
        saved = _salvage(text, name, most)
        if saved is None:
            raise
        schedule, left_out = saved
        source = ScheduleInput(name, schedule)
    _refuse_large(source.schedule.shape, len(source.schedule.columns), name)
    ran = executed_source(Path(name), source)
    return ran or schedule_source(Path(name), source.schedule, source.planned, left_out)


def _salvage(content: bytes, name: str, most: int) -> tuple[Schedule, list[str]] | None:
    """(what can be read of a native schedule file, what was left out: a line each); None when more than that is wrong.

    The file's frame must be whole: JSON with a shape. Positions in what is left count without what is left out.
    """
    if not native.recognises(content):
        return None
    try:
        file: dict[str, Any] = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        shape = Shape.from_json(msgspec.json.decode(file["shape"]))
        programs = msgspec.json.decode(file["programs"])
        left_out: list[str] = []
        kept = {}
        for worker, text in programs.items():
            try:
                shape.require(Worker.parse(worker), "programs")
            except RecycleError as error:
                left_out.append(str(error))
                continue
            kept[worker] = " ".join(_readable(shape, worker, text, left_out))
        return Schedule.loads(msgspec.json.encode({**file, "programs": kept}), name, most), left_out
    except (RecycleError, msgspec.MsgspecError, KeyError, TypeError, AttributeError, RecursionError, UnicodeError):
        return None


def _readable(shape: Shape, worker: str, text: str, left_out: list[str]) -> list[str]:
    words = []
    for position, word in enumerate(text.split()):
        try:
            instruction = parse_instruction(word, shape.pipelines == 1)
            if isinstance(instruction, Transfer):
                shape.require(instruction.peer, word)
            words.append(word)
        except RecycleError as error:
            left_out.append(f"worker {worker}, position {position}: {error}")
            if len(left_out) > _MOST_LEFT_OUT:
                raise
    return words


def _content(contents: str, name: str) -> bytes:
    head, _, encoded = contents.partition(",")
    if not head.startswith("data:") or "base64" not in head:
        raise ScheduleError(f"{name}: the browser sent no file")
    if len(encoded) > MOST_BYTES * 4 // 3 + 4:
        raise ScheduleError(
            f"{name}: too large for the page (at most {MOST_BYTES // 2**20} MB): use recycle check {name}"
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ScheduleError(f"{name}: the browser sent only a part of the file") from None


def _stated_shape(content: bytes) -> Shape | None:
    """The shape that a native file says it has; None where it does not say, or wrongly: reading it then tells."""
    try:
        return Shape.from_json(
            msgspec.json.decode(entries(content, ScheduleError)["shape"], type=dict[str, int | list[int]])
        )
    except (RecycleError, KeyError, TypeError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _refuse_large(shape: Shape, instructions: int, name: str) -> None:
    cells = shape.stages * max(shape.global_micro_batches, shape.worker_count)
    is_large = shape.worker_count > MOST_WORKERS or shape.stages * shape.pipelines > MOST_CHUNKS or cells > MOST_CELLS
    if is_large or instructions > MOST_INSTRUCTIONS:
        raise ScheduleError(
            f"{name}: {shape} with {instructions:,} instructions is too large for the page (at most"
            f" {MOST_INSTRUCTIONS:,} instructions, {MOST_WORKERS:,} workers, {MOST_CHUNKS:,} chunks): use recycle check"
        )


def printable(name: str) -> str:
    """The name of a file as a short line of printable text."""
    line = str(RecycleError(name.replace("\\", "/").rsplit("/", 1)[-1])) or "file"
    return line if len(line) <= _LONGEST_NAME else f"{line[: _LONGEST_NAME - 12]}…{line[-11:]}"
