"""A report as it is written to the store: a row of a width that its counts give, so that alike ones are read at once.

Base64 of a head with the counts, and of the row. Both have a multiple of three bytes: the first characters of a text
tell which others have the same layout, and the texts of those, one behind the other, are the base64 of all their rows.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.exec.protocol import Computed, LinkTime, Replayed, Report

HEAD_CHARACTERS = 20
"""Of a text, that say its layout."""
_HEAD = struct.Struct("<HHHBBBBBBBxx")
HAS_CHECKSUM, HAS_REPLICATED, HAS_STATE = 1, 2, 4
"""Flags of a hosted stage."""


class RowLayout(NamedTuple):
    """What the width of a row follows from.

    Attributes:
        stages: hosted.
        computed: kinds of instructions, by stage, whose times are told.
        replayed: micro-batches of which it is told what hosts made.
        parts, replicated: numbers of the longest squared norm, and of the longest of what all tensor ranks hold.
        has_loss: whether there is a loss.
        letters: of the longest kind's name.
        has_states: whether the checksums of states are told.
        sums: numbers that are told of each of those.
        links: other processes that messages are told of.
    """

    stages: int
    computed: int
    replayed: int
    parts: int
    replicated: int
    has_loss: int
    letters: int
    has_states: int
    sums: int
    links: int


@lru_cache(maxsize=256)
def row_of(layout: RowLayout) -> np.dtype[Any]:
    """The columns of a row; norms are filled up with zeros."""
    stage = [
        ("stage", "<u4"),
        ("flags", "u1"),
        ("norms", "<f8", (layout.parts,)),
        ("replicated", "<f8", (layout.replicated,)),
        ("checksum", "<u8"),
        ("state", "<u8", (2 * layout.has_states,)),
    ]
    computed = [("stage", "<u4"), ("token", f"S{max(1, layout.letters)}"), ("count", "<u4"), ("seconds", "<f8")]
    work = [("stage", "<u4"), ("pipeline", "<u4"), ("index", "<u4"), ("is_home", "u1"), ("sums", "<u8", (layout.sums,))]
    link = [("pipeline", "<u4"), ("rank", "<u4"), ("sent", "<u4"), ("seconds", "<f4"), ("waited", "<f4")]
    fields = [("loss", "<f8"), ("stages", stage, (layout.stages,)), ("computed", computed, (layout.computed,))]
    fields += [("replayed", work, (layout.replayed,)), ("links", link, (layout.links,))]
    width = np.dtype(fields).itemsize
    return np.dtype([("head", f"V{_HEAD.size}"), *fields, ("rest", f"V{-width % 3}")])


def pack_report(report: Report) -> str:
    """The report, to be written."""
    layout = RowLayout(
        len(report.norms),
        len(report.compute),
        len(report.replayed),
        max(map(len, report.norms.values()), default=0),
        max(map(len, report.replicated.values()), default=0),
        int(report.loss is not None),
        max((len(one.token) for one in report.compute), default=0),
        int(bool(report.states)),
        max((len(one.sums) for one in report.replayed), default=0),
        len(report.links),
    )
    row = np.zeros((), row_of(layout))
    row["loss"] = 0.0 if report.loss is None else report.loss
    for place, (stage, parts) in enumerate(report.norms.items()):
        at, common = row["stages"][place], report.replicated.get(stage)
        at["stage"], at["norms"][: len(parts)] = stage, parts
        if common is not None:
            at["flags"] |= HAS_REPLICATED
            at["replicated"][: len(common)] = common
        if stage in report.checksums:
            at["flags"] |= HAS_CHECKSUM
            at["checksum"] = report.checksums[stage]
        if stage in report.states:
            at["flags"] |= HAS_STATE
            at["state"] = report.states[stage]
    for place, one in enumerate(report.compute):
        row["computed"][place] = (one.stage, one.token.encode(), one.count, one.seconds)
    for place, work in enumerate(report.replayed):
        row["replayed"][place] = (work.stage, work.pipeline, work.index, work.is_home, work.sums)
    for place, link in enumerate(report.links):
        row["links"][place] = (link.pipeline, link.rank, link.sent, link.seconds, link.waited)
    row["head"] = np.void(_HEAD.pack(*layout))
    return base64.b64encode(row.tobytes()).decode()


def unpack_rows(texts: Sequence[str]) -> npt.NDArray[np.void]:
    """A row for each text, all of one layout. Raises ValueError when one has another layout, or is no report."""
    try:
        layout = RowLayout(*_HEAD.unpack(base64.b64decode(texts[0][:HEAD_CHARACTERS], validate=True)))
        said, row = base64.b64decode("".join(texts), validate=True), row_of(layout)
    except (binascii.Error, struct.error) as error:
        raise ValueError(f"not a report: {error}") from None
    if len(said) != len(texts) * row.itemsize:
        raise ValueError("not reports of one layout")
    return np.frombuffer(said, row)


def has_loss(row: npt.NDArray[np.void] | np.void) -> bool:
    """Whether rows of this layout have a loss."""
    head = row["head"] if row.ndim == 0 else row["head"][0]
    return bool(RowLayout(*_HEAD.unpack(head.tobytes())).has_loss)


def unpack_report(text: str) -> Report:
    """What `pack_report` was given. Raises ValueError when it is not that."""
    (row,) = unpack_rows([text])
    norms, replicated, checksums = dict[int, list[float]](), dict[int, list[float]](), dict[int, int]()
    states = dict[int, tuple[int, int]]()
    for at in row["stages"]:
        stage, flags = int(at["stage"]), int(at["flags"])
        norms[stage] = without_zeros(at["norms"])
        if flags & HAS_REPLICATED:
            replicated[stage] = without_zeros(at["replicated"])
        if flags & HAS_CHECKSUM:
            checksums[stage] = int(at["checksum"])
        if flags & HAS_STATE:
            words, places = map(int, at["state"])
            states[stage] = words, places
    compute = [
        Computed(int(one["stage"]), one["token"].decode(), int(one["count"]), float(one["seconds"]))
        for one in row["computed"]
    ]
    loss = float(row["loss"]) if has_loss(row) else None
    links = [LinkTime(*(field.item() for field in link)) for link in row["links"]]
    return Report(norms, loss, compute, replicated, checksums, states, replayed_of(row["replayed"]), links)


def replayed_of(rows: npt.NDArray[np.void]) -> list[Replayed]:
    """What rows of a report say of micro-batches that were replayed."""
    return [
        Replayed(
            int(one["stage"]),
            int(one["pipeline"]),
            int(one["index"]),
            bool(one["is_home"]),
            tuple(one["sums"].tolist()),
        )
        for one in rows
    ]


def without_zeros(parts: npt.NDArray[np.float64]) -> list[float]:
    """The numbers of a sum that were given: zeros fill up."""
    return [float(part) for part in parts if part != 0.0]
