"""The headline of a timeline as components for the bar of the application."""

from __future__ import annotations

from typing import Any

from dash import html

from viz.headline import headline
from viz.lane_cache import CachedLanes


def figures(shown: CachedLanes) -> list[Any]:
    """The headline of cached lanes."""
    return [html.Span([f"{one.name} ", html.Strong(one.value)], title=one.meaning) for one in headline(shown)]
