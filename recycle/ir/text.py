"""Whole programs as text and back, all workers at once.

The notation is that of `recycle.ir.instruction`, one blank between instructions. Reading takes programs that are
written as `render` writes them in a few passes over the whole text; anything else goes instruction by instruction,
which also accepts what the notation leaves free (other white space, no pipeline where there is one) and finds the
place of an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.columns import Columns, columns_of
from recycle.ir.instruction import (
    DIGITS,
    KIND_CLASSES,
    Backward,
    Compute,
    ComputePart,
    Forward,
    Instruction,
    OverlappedPair,
    Part,
    StagePart,
    StageWide,
    Transfer,
    parse_instruction,
)
from recycle.ir.kinds import is_kind, reads_kinds
from recycle.shape import Shape, Worker


def render(shape: Shape, columns: Columns) -> Iterator[str]:
    """The program of each worker, by worker index; one is held at a time."""
    return map(" ".join, _words_by_worker(shape, columns))


def words(shape: Shape, columns: Columns) -> list[str]:
    """The text of the instruction in each row."""
    return list(chain.from_iterable(_words_by_worker(shape, columns)))


def _words_by_worker(shape: Shape, columns: Columns) -> Iterator[list[str]]:
    peers = [f"@{worker}" for worker in shape.workers()]
    tokens = [cls.token for cls in KIND_CLASSES]
    f, b = Forward.token, Backward.token
    for begin, end in pairwise(columns.offsets.tolist()):
        lists = [getattr(columns, name)[begin:end].tolist() for name in Columns.FIELDS]
        found = []
        for kind, stage, pipeline, index, peer, stage2, pipeline2, index2, bucket in zip(*lists, strict=True):
            if stage2 >= 0:
                found.append(f"({stage}{f}{pipeline}.{index};{stage2}{b}{pipeline2}.{index2})")
            elif bucket >= 0:
                of = f"{pipeline}.{index}" if pipeline >= 0 else ""
                found.append(f"{stage}{tokens[kind]}{of}/{bucket}")
            elif pipeline < 0:
                found.append(f"{stage}{tokens[kind]}")
            elif peer < 0:
                found.append(f"{stage}{tokens[kind]}{pipeline}.{index}")
            else:
                found.append(f"{stage}{tokens[kind]}{pipeline}.{index}{peers[peer]}")
        yield found


def parse(shape: Shape, programs: Mapping[Worker, str]) -> Columns:
    """Columns of programs; workers left out have none.

    Raises:
        ScheduleError: an instruction cannot be parsed, or its peer lies outside the shape; names worker and position.
    """
    texts = [programs.get(worker, "") for worker in shape.workers()]
    canonical = _canonical()
    if all(canonical.fullmatch(text) for text in texts):
        columns = _parse_canonical(shape, texts)
        if columns is not None:
            return columns
    parsed: dict[Worker, list[Instruction]] = {}
    for worker, text in programs.items():
        parsed[worker] = program = []
        for position, word in enumerate(text.split()):
            try:
                program.append(parse_instruction(word, shape.pipelines == 1))
            except ScheduleError as error:
                raise ScheduleError(f"worker {worker}, position {position}: {error}") from None
    return columns_of(shape, parsed)


@reads_kinds
def _canonical() -> re.Pattern[str]:
    """A program as `render` writes it. Possessive, so that a mismatch costs no second look."""
    number = rf"[0-9]{{1,{DIGITS}}}+"
    pair = rf"{number}\.{number}"

    def any_of(base: type[Instruction]) -> str:
        found = (
            cls for cls in KIND_CLASSES if issubclass(cls, base) and issubclass(cls, Part) == issubclass(base, Part)
        )
        # The longest first: a possessive pattern does not come back to try another one.
        return "|".join(sorted((cls.token for cls in found), key=len, reverse=True))

    parts = f"(?:{any_of(ComputePart)}){pair}/{number}|(?:{any_of(StagePart)})/{number}"
    plain = f"{number}(?:(?:{any_of(Compute)}){pair}|(?:{any_of(Transfer)}){pair}@{pair}|{any_of(StageWide)}|{parts})"
    overlapped = rf"\({number}{Forward.token}{pair};{number}{Backward.token}{pair}\)"
    return re.compile(f"(?:(?:{plain}|{overlapped})(?: (?!$)|$))*+")


def _parse_canonical(shape: Shape, texts: list[str]) -> Columns | None:
    """Columns of programs that match `_canonical`; None when one of them names a peer outside the shape.

    Every token becomes a negative number of its own and everything else that is no digit a blank, so that the text is
    one long list of numbers: of each instruction the stage, the kind, the micro-batch, the worker.
    """
    text = " ".join(filter(None, texts))
    for number, cls in sorted(enumerate(KIND_CLASSES), key=lambda entry: -len(entry[1].token)):
        text = text.replace(cls.token, f" {-1 - number} ")
    text = text.translate(str.maketrans(".@()/", "     "))
    numbers = np.fromstring(text, dtype=np.int64, sep=" ") if text else np.empty(0, dtype=np.int64)
    del text
    at = np.flatnonzero(numbers < 0)
    kind = (-1 - numbers[at]).astype(np.uint8)
    numbers = np.append(numbers, np.zeros(4, dtype=np.int64))  # the last instruction may have fewer than four behind it

    paired = np.flatnonzero(kind == OverlappedPair.kind)
    columns = {name: np.full(len(at), -1, dtype=np.int64) for name in Columns.FIELDS}
    columns["kind"][:], columns["stage"][:] = kind, numbers[at - 1]
    has_micro_batch = ~is_kind(kind, StageWide)
    columns["pipeline"][has_micro_batch] = numbers[at[has_micro_batch] + 1]
    columns["index"][has_micro_batch] = numbers[at[has_micro_batch] + 2]
    is_transfer = is_kind(kind, Transfer)
    for base, place in ((ComputePart, 3), (StagePart, 1)):
        is_part = is_kind(kind, base)
        columns["bucket"][is_part] = numbers[at[is_part] + place]
    pipeline, rank = numbers[at[is_transfer] + 3], numbers[at[is_transfer] + 4]
    if (pipeline >= shape.pipelines).any() or (rank >= shape.ranks).any():
        return None
    columns["peer"][is_transfer] = pipeline * shape.ranks + rank
    for name in ("stage", "pipeline", "index"):
        columns[f"{name}2"][paired - 1] = columns[name][paired + 1]
    columns["kind"][paired - 1] = OverlappedPair.kind
    keep = np.ones(len(at), dtype=np.bool_)
    keep[paired] = keep[paired + 1] = False
    sizes = [text.count(" ") + 1 if text else 0 for text in texts]
    return Columns.from_arrays(np.cumsum([0, *sizes]), **{name: column[keep] for name, column in columns.items()})
