"""Search for operations of a timeline: a query is terms, all of which must hold, and is matched by columns.

    query = { [ "-" ] term }               "-" negates
    term  = field ":" value { "," value }  any of the values
          | field op number                op is < <= > >= =
          | word                           a part of the instruction's text
    field: kind mb stage worker pipeline is; with numbers: stage pipeline dur start end

`kind:W mb:1.3 stage:2 dur>1.2`; `mb:3` is micro-batch 3 of any pipeline, `worker:1.*` any rank, `stage:2..5` a range.
Times are those of the axis (`time_unit`), and alike when they differ by less than a millionth of the timeline.
`assets/lanes_search.js` speaks the same language in the browser; a test holds the two equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.errors import RecycleError
from recycle.ir.instruction import (
    KIND_CLASSES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Instruction,
    OverlappedPair,
    ReduceGradients,
    Transfer,
    is_kind,
)
from recycle.ir.redundant_forward import RedundantForward
from viz.figures.time_axis import time_unit
from viz.lanes import NO_MICRO_BATCH, NO_PIPELINE, Flag, LaneTable

Mask = npt.NDArray[np.bool_]
Query = Callable[[LaneTable], Mask]
_LONGEST, _MOST_TERMS, _MOST_TEXTS, _NEAR = 1000, 40, 20_000, 1e-6
_TERM = re.compile(r"(-?)([a-z]+)(:|<=|>=|<|>|=)(\S*)")
_RANGE = re.compile(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")
_PAIR = re.compile(r"([0-9]{1,9}|\*)\.([0-9]{1,9}|\*)")


class SearchError(RecycleError):
    """A query that cannot be understood; names the term and what is known."""


def parse(text: str) -> Query:
    """The query that `text` says: table -> which operations match; an empty one matches nothing.

    Raises:
        SearchError: a term cannot be understood.
    """
    if len(text) > _LONGEST:
        raise SearchError(f"search: {len(text)} characters; at most {_LONGEST}")
    words = text.split()
    if len(words) > _MOST_TERMS:
        raise SearchError(f"search: {len(words)} terms; at most {_MOST_TERMS}")
    terms = [_term(word) for word in words]

    def query(table: LaneTable) -> Mask:
        found = np.full(len(table), bool(terms), dtype=np.bool_)
        for term in terms:
            found &= term(table)
        return found

    return query


def search(table: LaneTable, text: str) -> npt.NDArray[np.int64]:
    """The operations of `table` that match, by time. Raises SearchError."""
    found = np.flatnonzero(parse(text)(table))
    return found[np.lexsort((found, table.start[found]))]


def _term(word: str) -> Query:
    match = _TERM.fullmatch(word.lower())
    if match is None:
        if any(sign in word for sign in ":<>="):
            raise SearchError(f"search: {word!r}: write field:value or field>number; fields are {_fields()}")
        negated = word.startswith("-") and len(word) > 1
        return _negated(_text(word[negated:]), negated)
    negation, field, sign, value = match.groups()
    if sign == ":":
        if field not in _VALUES:
            raise SearchError(f"search: {word!r}: {_unknown(field, sign)}")
        parts = value.split(",")
        if not all(parts):
            raise SearchError(f"search: {word!r}: a value is missing after {field}:")
        choices = [_VALUES[field](word, part) for part in parts]
        return _negated(lambda table: np.logical_or.reduce([choice(table) for choice in choices]), bool(negation))
    if field not in _NUMBERS:
        raise SearchError(f"search: {word!r}: {_unknown(field, sign)}")
    try:
        number = float(value)
    except ValueError:
        raise SearchError(f"search: {word!r}: {value or 'nothing'} is not a number") from None
    column, compare = _NUMBERS[field], _COMPARISONS[sign]

    def query(table: LaneTable) -> Mask:
        is_time = field in ("dur", "start", "end")
        bound = number / time_unit(table, table.span)[0] if is_time else number
        return np.asarray(compare(column(table), bound, _NEAR * table.span if is_time else 0.0), dtype=np.bool_)

    return _negated(query, bool(negation))


def _negated(query: Query, negated: bool) -> Query:
    return (lambda table: ~query(table)) if negated else query


def _unknown(field: str, sign: str) -> str:
    other = _NUMBERS if sign == ":" else _VALUES
    if field in other:
        return f"{field} is compared as {field}>1" if sign == ":" else f"{field} takes values as {field}:…"
    return f"{field} is no field; known are {_fields()}"


def _fields() -> str:
    return ", ".join(dict.fromkeys([*_VALUES, *_NUMBERS]))


def _kind(word: str, value: str) -> Query:
    kinds = _KINDS.get(value)
    if kinds is None:
        raise SearchError(f"search: {word!r}: {value} is no kind; known are {', '.join(_KINDS)}")
    return lambda table: is_kind(table.kind, kinds)


def _micro_batch(word: str, value: str) -> Query:
    if (alone := _RANGE.fullmatch(value)) is not None:
        low, high = int(alone[1]), int(alone[2] or alone[1])
        return lambda t: (t.micro_batch != NO_MICRO_BATCH) & (t.micro_batch >= low) & (t.micro_batch <= high)
    pair = _PAIR.fullmatch(value)
    if pair is None:
        raise SearchError(f"search: {word!r}: {value} is no micro-batch; write mb:1.3, mb:3, mb:1.* or mb:2..5")
    return lambda t: _either(t.pipeline, pair[1]) & _either(t.micro_batch, pair[2]) & (t.micro_batch != NO_MICRO_BATCH)


def _either(column: npt.NDArray[Any], number: str) -> Mask:
    return np.ones(len(column), np.bool_) if number == "*" else np.asarray(column == int(number), dtype=np.bool_)


def _worker(word: str, value: str) -> Query:
    pair = _PAIR.fullmatch(value)
    if pair is None:
        raise SearchError(f"search: {word!r}: {value} is no worker; write worker:1.2, worker:1.* or worker:*.2")

    def query(table: LaneTable) -> Mask:
        lanes = np.array(
            [pair[1] in ("*", str(w.pipeline)) and pair[2] in ("*", str(w.rank)) for w in table.workers], np.bool_
        )
        return np.asarray(lanes[table.lane], dtype=np.bool_)

    return query


def _number(column: Callable[[LaneTable], npt.NDArray[Any]], example: str) -> Callable[[str, str], Query]:
    def of(word: str, value: str) -> Query:
        match = _RANGE.fullmatch(value)
        if match is None:
            raise SearchError(f"search: {word!r}: {value} is no number; write {example}:2 or {example}:2..5")
        low, high = int(match[1]), int(match[2] or match[1])
        return lambda table: (column(table) >= low) & (column(table) <= high)

    return of


def _is(word: str, value: str) -> Query:
    flag = _FLAGS.get(value)
    if flag is None:
        raise SearchError(f"search: {word!r}: {value} is no mark; known are {', '.join(_FLAGS)}")
    return lambda table: table.has(flag)


def _text(part: str) -> Query:
    """Operations whose instruction holds `part`; the names are made one by one, so only of a table of some size."""
    wanted = part.lower()

    def query(table: LaneTable) -> Mask:
        if len(table) > _MOST_TEXTS:
            raise SearchError(
                f"search: {part!r}: plain words are looked for among at most {_MOST_TEXTS:,} operations, here are"
                f" {len(table):,}: write kind:F mb:1.3 stage:2"
            )
        return np.array([wanted in str(table.instruction(i)).lower() for i in range(len(table))], dtype=np.bool_)

    return query


def _pipeline(table: LaneTable) -> npt.NDArray[Any]:
    return np.where(table.pipeline == NO_PIPELINE, -1, table.pipeline.astype(np.int64))


_KINDS: dict[str, tuple[type[Instruction], ...]] = {
    **{cls.token.lower(): (cls,) for cls in KIND_CLASSES if cls is not OverlappedPair},
    "pair": (OverlappedPair,),
    "backward": (Backward, BackwardInput, BackwardWeight),
    "comm": (Transfer,),
    "reduce": (ReduceGradients,),
    "redundant": (RedundantForward,),
}
_FLAGS = {"rerouted": Flag.REROUTED, "critical": Flag.CRITICAL, "violation": Flag.VIOLATION}
_VALUES: dict[str, Callable[[str, str], Query]] = {
    "kind": _kind,
    "mb": _micro_batch,
    "stage": _number(lambda table: table.stage, "stage"),
    "worker": _worker,
    "pipeline": _number(_pipeline, "pipeline"),
    "is": _is,
}
_NUMBERS: dict[str, Callable[[LaneTable], npt.NDArray[Any]]] = {
    "stage": lambda table: table.stage,
    "pipeline": _pipeline,
    "dur": lambda table: table.end - table.start,
    "start": lambda table: table.start,
    "end": lambda table: table.end,
}
_COMPARISONS: dict[str, Callable[[Any, float, float], Any]] = {
    "<": lambda value, bound, near: value < bound - near,
    "<=": lambda value, bound, near: value <= bound + near,
    ">": lambda value, bound, near: value > bound + near,
    ">=": lambda value, bound, near: value >= bound - near,
    "=": lambda value, bound, near: np.abs(value - bound) <= near,
}
