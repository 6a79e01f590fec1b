"""What a browser would get of Dash components: plain JSON, its texts, its graphs."""

from __future__ import annotations

import json
from typing import Any

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
        return [found for part in component for found in of_type(part, kind)]
    if not isinstance(component, dict) or "props" not in component:
        return []
    here = [component["props"]] if component["type"] == kind else []
    return here + of_type(component["props"].get("children"), kind)


def canvases(component: Any) -> list[dict[str, Any]]:
    """The properties of all timelines on a canvas."""
    return [view for view in of_type(component, "Div") if view.get("className") == "lanes-view"]


def graphs(component: Any) -> list[dict[str, Any]]:
    return of_type(component, "Graph")
