"""Schedules as text: programs, and the native schedule file (docs/reference/file-format.md).

Canonical programs, as `render` writes them, are parsed in a few passes over the whole text. Other programs are parsed
one instruction at a time, which accepts the full notation and locates errors.

    {"format": "recycle-schedule", "version": 1, "shape": {...}, "optimizer": "staggered", "failed": ["1.2"],
     "placement": null, "ties": [], "metadata": {...}, "programs": {"0.0": "0F0.0 0F0.1 ...", ...}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, Literal

import msgspec
import numpy as np

from recycle.errors import ScheduleError
from recycle.files import entries
from recycle.ir.columns import MOST_INSTRUCTIONS, Columns, Ints, columns_of, require_few
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
from recycle.ir.kinds import reads_kinds
from recycle.job.shape import Shape, Worker


def render(shape: Shape, columns: Columns) -> Iterator[str]:
    """Yield the program text of each worker, by worker index."""
    return map(" ".join, _words_by_worker(shape, columns))


def words(shape: Shape, columns: Columns) -> list[str]:
    """Return the text of the instruction in each row."""
    return list(chain.from_iterable(_words_by_worker(shape, columns)))


def _words_by_worker(shape: Shape, columns: Columns) -> Iterator[list[str]]:
    peers = [f"@{worker}" for worker in shape.workers()]
    tokens = [cls.token for cls in KIND_CLASSES]
    f, b = Forward.token, Backward.token
    for begin, end in pairwise(columns.offsets.tolist()):
        lists = [getattr(columns, name)[begin:end].tolist() for name in Columns.FIELDS]
        texts = []
        for kind, stage, pipeline, index, peer, stage2, pipeline2, index2, bucket in zip(*lists, strict=True):
            if stage2 >= 0:
                texts.append(f"({stage}{f}{pipeline}.{index};{stage2}{b}{pipeline2}.{index2})")
            elif bucket >= 0:
                micro_batch = f"{pipeline}.{index}" if pipeline >= 0 else ""
                texts.append(f"{stage}{tokens[kind]}{micro_batch}/{bucket}")
            elif pipeline < 0:
                texts.append(f"{stage}{tokens[kind]}")
            elif peer < 0:
                texts.append(f"{stage}{tokens[kind]}{pipeline}.{index}")
            else:
                texts.append(f"{stage}{tokens[kind]}{pipeline}.{index}{peers[peer]}")
        yield texts


def parse(shape: Shape, programs: Mapping[Worker, str]) -> Columns:
    """Parse programs into columns. Raises ScheduleError with worker and position of an invalid instruction or peer."""
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
    number = rf"[0-9]{{1,{DIGITS}}}+"
    pair = rf"{number}\.{number}"

    def any_of(base: type[Instruction]) -> str:
        classes = (
            cls for cls in KIND_CLASSES if issubclass(cls, base) and issubclass(cls, Part) == issubclass(base, Part)
        )
        # Longest token first: a possessive pattern does not backtrack.
        return "|".join(sorted((cls.token for cls in classes), key=len, reverse=True))

    parts = f"(?:{any_of(ComputePart)}){pair}/{number}|(?:{any_of(StagePart)})/{number}"
    plain = f"{number}(?:(?:{any_of(Compute)}){pair}|(?:{any_of(Transfer)}){pair}@{pair}|{any_of(StageWide)}|{parts})"
    overlapped = rf"\({number}{Forward.token}{pair};{number}{Backward.token}{pair}\)"
    return re.compile(f"(?:(?:{plain}|{overlapped})(?: (?!$)|$))*+")


_OF_MICRO_BATCH = ("stage", "pipeline", "index")
_OPERANDS: tuple[tuple[type[Instruction], tuple[str, ...]], ...] = (
    (ComputePart, (*_OF_MICRO_BATCH, "bucket")),
    (Compute, _OF_MICRO_BATCH),
    (Transfer, (*_OF_MICRO_BATCH, "peer", "rank")),
    (StagePart, ("stage", "bucket")),
    (StageWide, ("stage",)),
    (OverlappedPair, (*_OF_MICRO_BATCH, "stage2", "pipeline2", "index2")),
)
"""The numbers of an instruction in written order, by the first matching base class."""
_NOT_TOKENS = b"0123456789.@()/"
_ONLY_NUMBERS = bytes(byte if chr(byte) in "0123456789" else ord(" ") for byte in range(256))


@reads_kinds
def _notation() -> tuple[dict[bytes, int], Ints]:
    kinds = {cls.token.encode(): number for number, cls in enumerate(KIND_CLASSES)}
    kinds[f"{Forward.token};{Backward.token}".encode()] = OverlappedPair.kind
    bases = [base for base, _ in _OPERANDS]
    places = [next(place for place, base in enumerate(bases) if issubclass(cls, base)) for cls in KIND_CLASSES]
    return kinds, np.array(places, dtype=np.int32)


def _parse_canonical(shape: Shape, texts: list[str]) -> Columns | None:
    """Parse programs that match `_canonical`; None if a peer lies outside the shape.

    Without numbers, the text is a list of tokens; without tokens, a list of numbers that each kind's operands consume.
    """
    kinds, places = _notation()
    programs = [text.encode("ascii") for text in texts]
    tokens = [program.translate(None, _NOT_TOKENS).split() for program in programs]
    kind = np.fromiter(map(kinds.__getitem__, chain.from_iterable(tokens)), dtype=np.uint8)
    offsets = np.cumsum([0, *map(len, tokens)])
    del tokens
    text = b" ".join(programs).translate(_ONLY_NUMBERS)
    numbers = np.fromstring(text, dtype=np.int32, sep=" ") if len(kind) else np.empty(0, dtype=np.int32)
    operands = places[kind]
    sizes = np.array([len(names) for _, names in _OPERANDS])[operands]
    first = np.cumsum(sizes) - sizes

    columns: dict[str, Ints] = {}
    for place, (_, names) in enumerate(_OPERANDS):
        rows = np.flatnonzero(operands == place)
        for offset, name in enumerate(names if len(rows) else ()):
            column = columns.setdefault(name, np.full(len(kind), -1, dtype=np.int32))
            column[rows] = numbers[first[rows] + offset]
    if "peer" in columns:
        pipeline, rank = columns["peer"], columns.pop("rank")
        if (pipeline >= shape.pipelines).any() or (rank >= shape.ranks).any():
            return None
        columns["peer"] = np.where(pipeline < 0, -1, pipeline * shape.ranks + rank)
    return Columns.from_arrays(offsets, kind=kind, **columns)


FORMAT, VERSION = "recycle-schedule", 1
_SHORTEST = len("0F0 ")
"""Minimum characters of an instruction, including the following blank."""
_MOST_HEAD_BYTES = 2**25
"""Maximum bytes of everything but the programs. In memory, small values take many times their text."""


class NativeFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The content of a file: `shape` with the fields of `Shape`, workers as text."""

    format: str = FORMAT
    version: int = VERSION
    shape: dict[str, int | list[int]]
    optimizer: Literal["staggered", "barrier"] = "staggered"
    failed: list[str] = []
    placement: dict[str, list[int]] | None = None
    ties: list[list[int]] = []
    buckets: int = 1
    gathers: bool = False
    forward_only: bool = False
    metadata: dict[str, Any] = {}
    programs: dict[str, str]


def encode(file: NativeFile, programs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the file's text in parts, with these (worker, text) programs; ScheduleError if metadata is not JSON."""
    head = {key: value for key, value in msgspec.structs.asdict(file).items() if key != "programs"}
    if file.buckets == 1:
        del head["buckets"]  # keeps the file readable for versions without buckets
    for flag in ("gathers", "forward_only"):
        if not head[flag]:
            del head[flag]
    try:
        lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}," for key, value in head.items()]
    except (TypeError, ValueError, RecursionError) as error:
        raise ScheduleError(f"metadata: only finite JSON values can be written ({error})") from None
    yield "{\n" + "\n".join(lines) + '\n  "programs": {\n'
    between = ""
    for worker, text in programs:
        yield f"{between}    {json.dumps(worker)}: {json.dumps(text)}"
        between = ",\n"
    yield "\n  }\n}\n"


def decode(text: str | bytes, most: int = MOST_INSTRUCTIONS) -> NativeFile:
    """Decode a file without parsing its programs. Raises ScheduleError, also for more than `most` instructions."""
    try:
        head = entries(text, ScheduleError)
        version = _value(head, "version")
        if _value(head, "format") != FORMAT:
            raise ScheduleError(f'is not a schedule: "format" must be "{FORMAT}"')
        if version != VERSION:
            raise ScheduleError(f"version {version!r} is not known; this recycle reads version {VERSION}")
        _refuse_ambiguous_or_bloated(head)
        file = msgspec.json.decode(text, type=NativeFile)
    except msgspec.ValidationError as error:
        raise ScheduleError(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ScheduleError(f"not valid JSON: {error}") from None
    unknown = set(file.shape) - set(Shape.__slots__)
    if unknown:
        raise ScheduleError(f"shape: unknown key {sorted(unknown)[0]!r}; known are {', '.join(Shape.__slots__)}")
    missing = {"pipelines", "ranks", "micro_batches"} - set(file.shape)
    if missing:
        raise ScheduleError(f"shape: {sorted(missing)[0]} is missing")
    if sum(map(len, file.programs.values())) > _SHORTEST * most:
        words = sum(1 for text in file.programs.values() for _ in re.finditer(r"\S+", text))
        require_few(words, "programs: ", most)
    return file


def _value(head: dict[str, msgspec.Raw], name: str) -> Any:
    try:
        return msgspec.json.decode(head.get(name, b"null"))
    except msgspec.ValidationError as error:
        raise ScheduleError(f"{name}: {error}") from None


def _refuse_ambiguous_or_bloated(head: dict[str, msgspec.Raw]) -> None:
    sizes = {name: len(memoryview(value)) for name, value in head.items() if name != "programs"}
    if sum(sizes.values()) > _MOST_HEAD_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise ScheduleError(
            f"{largest}: {sizes[largest]} bytes; all content except the programs may take {_MOST_HEAD_BYTES} bytes"
        )
    for name, value in head.items():
        if memoryview(value)[:1].tobytes() == b"{":
            entries(value, ScheduleError, f"{name}: ")


def recognises(content: bytes) -> bool:
    """Return whether a file with this beginning is a native schedule file."""
    return f'"{FORMAT}"'.encode() in content[:4096]
