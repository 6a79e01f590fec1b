"""Edits of an order on its lanes: an instruction moves in its worker's program, and the result is checked and timed.

Each edit gives another schedule, so the browser undoes one by showing the lanes before it: see
`assets/modules/edit.js`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from dash import Dash
from flask import Response, abort, request

from recycle.ir.event_graph import load_compiled
from recycle.ir.instruction import AsyncInstruction, StageWide, is_kind
from recycle.ir.schedule import Schedule
from viz.lane_cache import BoundedCache, LaneCache, TimelineContext, lanes_address
from viz.pages.lanes_view import answer
from viz.scenario import COMPILED_ROWS
from viz.sources import schedule_source

MAX_KEPT = 64
"""Maximum edited schedules that are kept, to save or edit them again."""


def move(schedule: Schedule, worker: int, place: int, to: int) -> Schedule:
    """Return the schedule with instruction `place` of a worker at place `to` of its program, transfers not counted.

    Transfers, reduces and steps are left out: they are implied. Raises IndexError without such an instruction.
    """
    c = schedule.columns
    rows = np.flatnonzero(~is_kind(c.kind, AsyncInstruction))
    first, end = np.searchsorted(c.worker[rows], [worker, worker + 1]).tolist()
    moved = rows[first:end][place]
    rows = np.insert(np.delete(rows, first + place), min(first + to, end - 1), moved)
    rows = rows[~is_kind(c.kind[rows], StageWide)]
    return replace(schedule, columns=c.take(rows), buckets=1, gathers=False, metadata={})


def register(app: Dash, cache: LaneCache) -> None:
    edits: BoundedCache[str, tuple[Schedule, TimelineContext]] = BoundedCache(MAX_KEPT)

    def edit() -> Response:
        match request.get_json(silent=True):
            case {"address": str(address), "worker": int(worker), "place": int(place), "to": int(to)}:
                entry = cache.get(address)
            case _:
                abort(400)
        if entry is None or entry.context is None or entry.context.executed:
            known = edits.get(address) or abort(404)
        else:
            known = entry.context.timeline.schedule, entry.context
        schedule, context = known
        if len(context.timeline.start) >= COMPILED_ROWS:
            load_compiled()
        try:
            schedule = move(schedule, worker, place, to)
        except IndexError:
            abort(404)
        file = schedule_source(Path("edited"), schedule, context.timeline.profile, limits=context.limits)
        lanes = file.timed
        if file.timeline is not None:
            lanes = replace(lanes, context=replace(context, timeline=file.timeline, plan=None))
        address = lanes_address(cache.put(lanes))
        edits.put(address, (schedule, context))
        first = next(iter(file.findings), None)
        message = f"{first.severity}: {first.message}" if first else "valid"
        return answer({"addresses": [address], "message": message}, [cache.get(address)])

    def saved(digest: str) -> Response:
        known = edits.get(f"lanes/{digest}.bin") or abort(404)
        headers = {"Content-Disposition": "attachment; filename=edited.json"}
        return Response(known[0].dumps(), mimetype="application/json", headers=headers)

    app.server.add_url_rule("/edit", "edit", edit, methods=["POST"])
    app.server.add_url_rule("/edited/<digest>.json", "edited", saved)
