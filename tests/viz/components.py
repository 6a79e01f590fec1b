"""What a browser gets: components of Dash as plain JSON, their texts and graphs; and `lanes.bin` read back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from viz.lane_cache import LaneCache, TimedLanes
from viz.pages.page import Mode


def plain(component: Any) -> Any:
    """A Dash component, or all that a mode adds to the workbench, as the JSON that the browser gets."""
    from plotly.utils import PlotlyJSONEncoder

    if isinstance(component, Mode):
        component = [component.controls, component.lanes, *component.panels.values()]
    return json.loads(json.dumps(component, cls=PlotlyJSONEncoder))


def words(component: Any) -> list[str]:
    """All texts of a component, in order."""
    if isinstance(component, str):
        return [component]
    if isinstance(component, list):
        return [text for part in component for text in words(part)]
    if isinstance(component, dict) and "props" in component:
        return words(component["props"].get("children"))
    return []


def of_type(component: Any, kind: str) -> list[dict[str, Any]]:
    """The properties of all components of one type inside."""
    if isinstance(component, list):
        return [match for part in component for match in of_type(part, kind)]
    if not isinstance(component, dict) or "props" not in component:
        return []
    own = [component["props"]] if component["type"] == kind else []
    return own + of_type(component["props"].get("children"), kind)


def canvases(component: Any) -> list[dict[str, Any]]:
    """The properties of all timelines on a canvas."""
    return [view for view in of_type(component, "Div") if view.get("className") == "lanes-view"]


def drawn(cache: LaneCache, component: Any) -> list[TimedLanes]:
    """What stands behind the addresses of the timelines of a component."""
    entries = (cache.get(view["data-address"]) for view in canvases(plain(component)))
    return [entry for entry in entries if entry is not None]


def graphs(component: Any) -> list[dict[str, Any]]:
    return of_type(component, "Graph")


def answered(response: Any) -> tuple[dict[str, Any], list[bytes]]:
    """The JSON of an answer, and the lanes after it."""
    content, blocks = response.data, []
    while content:
        length = int.from_bytes(content[:4], "little")
        blocks.append(content[4 : 4 + length])
        content = content[4 + length + -length % 4 :]
    return json.loads(blocks[0]), blocks[1:]


HEADER = np.dtype([("magic", "S4"), ("lanes", "<u4"), ("operations", "<u4"), ("described", "<u4"), ("origin", "<f8")])


def decode(content: bytes) -> dict[str, Any]:
    """`origin`, `offsets`, each column and the `description`; every byte belongs to one of them."""
    (head,) = np.frombuffer(content, HEADER, 1)
    assert head["magic"] == b"RLN2"
    end = len(content) - int(head["described"])
    description = json.loads(content[end:])
    read: dict[str, Any] = {"origin": float(head["origin"]), "description": description}
    columns = {"offsets": ("<u4", int(head["lanes"]) + 1)}
    columns |= {name: (f"<{kind}", int(head["operations"])) for name, kind in description["columns"].items()}
    place = HEADER.itemsize
    for name, (kind, length) in columns.items():
        read[name] = np.frombuffer(content, kind, length, place)
        place += -(-read[name].nbytes // 4) * 4
    assert place == end
    return read
