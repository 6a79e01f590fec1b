"""Which replays leave the period of their schedule as it is.

The schedule with the replays of all rounds is lowered and its graph is made once. What runs in one round is a part of
that: its edges between rows that stay, and the chains of workers and lanes that close over those that do not. So a
round is timed without being written out, and the whole is linear in rows times rounds, in numpy and compiled loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recycle.ir.columns import Flags, Rows
from recycle.ir.compiled import COMPILE_FROM
from recycle.ir.dependencies import Dependencies
from recycle.ir.event_graph import EventGraph, event_edges, event_graph
from recycle.ir.graph import group_edges, load_compiled
from recycle.ir.memory import TOLERANCE
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import time_graph
from recycle.ir.turns import ALWAYS, Turn
from recycle.profile import Profile

_FEW_EVENTS = 5 * COMPILE_FROM
"""Rows that are timed in all, up to which plain Python is faster than loading compiled loops."""


def that_fit(whole: Schedule, of_rows: Rows, turns: Sequence[Turn], profile: Profile) -> Flags:
    """Of each turn whether it stays where those that lengthen the period are left out; all of a round together.

    Stages are tried from the last one, whose hosts wait longest for their first input, by their first round; a round
    that turns out longer does without the first of them.

    Args:
        whole: lowered, with the replays of all turns.
        of_rows: of each of its rows the number of the only turn that it is there for, -1 for what always runs.
    """
    graph = event_graph(whole)
    stage = np.array([turn.checked.stage for turn in turns], dtype=np.int64)
    number = np.array([turn.round for turn in turns], dtype=np.int64)
    rounds = np.unique(number[number != ALWAYS]).tolist()
    if len(graph.order) * (len(rounds) + whole.shape.stages) > _FEW_EVENTS:
        load_compiled()

    def period(stays: Flags) -> float:
        kept = np.append(stays, True)[of_rows]
        return time_graph(part_of(graph, kept), profile).period

    stays: Flags = number == ALWAYS
    longest = period(stays) * (1 + TOLERANCE)

    def fit(of: int, stages: Sequence[int]) -> bool:
        turns_of = (number == of) & np.isin(stage, stages)
        return not turns_of.any() or period(turns_of | (number == ALWAYS)) <= longest

    room: list[int] = []
    for one in reversed(range(whole.shape.stages)):
        of = number[(stage == one) & (number != ALWAYS)]
        if len(of) and fit(int(of.min()), [*room, one]):
            room.append(one)
    for of in rounds:
        stages = sorted({*room} & {*stage[number == of].tolist()})
        while not fit(of, stages):
            del stages[0]
        stays |= (number == of) & np.isin(stage, stages)
    return stays


def part_of(graph: EventGraph, kept: Flags) -> EventGraph:
    """The graph of a lowered schedule without some rows, such that none that stays needs one of them.

    Args:
        kept: of each row whether it stays.
    """
    whole, within = graph.schedule, graph.dependencies
    rows, joins = np.flatnonzero(kept), within.nodes - within.rows
    number = np.full(within.nodes, -1, dtype=np.int64)
    number[rows] = np.arange(len(rows))
    number[within.rows :] = len(rows) + np.arange(joins)
    columns = whole.columns.take(rows)
    source, target = number[within.source], number[within.target]
    edges = (source >= 0) & (target >= 0)
    carried_source, carried_target = number[within.carried_source], number[within.carried_target]
    carried = (carried_source >= 0) & (carried_target >= 0)
    sends = within.sends[rows]
    part = Dependencies(
        len(rows),
        len(rows) + joins,
        source[edges],
        target[edges],
        within.cause[edges],
        carried_source[carried],
        carried_target[carried],
        within.missing,
        np.where(sends >= 0, number[sends], -1),
    )
    source, target, _ = event_edges(columns, part, graph.serialised)
    offsets, sources = group_edges(source, target, part.nodes)
    order = number[graph.order]
    return EventGraph(replace(whole, columns=columns), part, offsets, sources, order[order >= 0], graph.serialised)
