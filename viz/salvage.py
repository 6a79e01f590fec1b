"""A native schedule file of which some instructions cannot be read, without them.

Its frame must be whole: JSON with a shape. What is left out is listed, one line each, so that the rest can be drawn
without looking as if it were all. Positions in what is left count without what is left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from recycle.errors import RecycleError
from recycle.ir import native
from recycle.ir.instruction import Transfer, parse_instruction
from recycle.ir.schedule import Schedule
from recycle.shape import Shape, Worker

MOST_LEFT_OUT = 1000
"""Beyond that it is no schedule with mistakes but something else."""


def salvage(content: bytes, name: str) -> tuple[Schedule, list[str]] | None:
    """(what can be read of the schedule, what was left out: a line each); None when that is not all that is wrong."""
    if not native.recognises(content):
        return None
    try:
        file: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        shape, programs = Shape(**file["shape"]), file["programs"]
        left_out: list[str] = []
        kept = {}
        for worker, text in programs.items():
            try:
                shape.require(Worker.parse(worker), "programs")
            except RecycleError as error:
                left_out.append(str(error))
                continue
            kept[worker] = " ".join(_readable(shape, worker, text, left_out))
        return Schedule.loads(msgspec.json.encode({**file, "programs": kept}), name), left_out
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
            if len(left_out) > MOST_LEFT_OUT:
                raise
    return words
