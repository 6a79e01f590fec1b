"""What a page with lanes adds to the workbench: the lanes that it draws, what steers them, and its panels.

The application has one workbench (`viz.pages.bench`). A page with lanes is a mode of it: opening the page puts its
lanes in the place of those before, where the window and the selection stay as far as they are there too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mode:
    """The content of a page with lanes.

    Attributes:
        lanes: timelines and whatever stands between them; while there are none, those of the mode before stay.
        panels: title -> content of the panels that the page adds. In the address they are called by their first word.
        controls: what stands above the lanes.
        identifier: of the block of lanes, which callbacks fill.
        rest: stores and intervals.
    """

    lanes: Any
    panels: Mapping[str, Any]
    controls: Any = None
    identifier: Any = None
    rest: Sequence[Any] = ()
