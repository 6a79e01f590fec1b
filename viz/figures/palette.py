"""Colours of the viewer: Okabe and Ito's set, which stays apart for colour-blind eyes, and inks to be read on it.

Every ink has at least 4.5 : 1 contrast on its fill (a test holds that), and no meaning rests on colour alone: labels
carry the kind's letter, re-routed work is hatched and bordered, a failed lane is hatched and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INK = "#111111"
MUTED = "#595959"
GRID = "#E3E6EA"
RULE = "#C3C8CF"
PAPER = "#FFFFFF"
BAND = "#F6F7F9"
FAILURE = "#D55E00"
FAILURE_BAND = "#FBE3D3"
FAILURE_HATCH = "#F0B48F"
RECOVERY = "#009E73"
CLEAR = "rgba(0,0,0,0)"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Paint:
    """One entry of the legend.

    Attributes:
        key: short name, also the class in SVG and CSS.
        name: what the legend says.
        fill, ink: colours of the box and of the text on it.
        hatch: colour of the stripes that mark re-routed work; it leaves the ink's contrast at least as it was.
    """

    key: str
    name: str
    fill: str
    ink: str
    hatch: str


FORWARD = Paint("forward", "Forward", "#0072B2", "#FFFFFF", "#00568A")
REDUNDANT = Paint("redundant", "Redundant forward", "#CC79A7", INK, "#E3B5CF")
BACKWARD_INPUT = Paint("input", "Backward, input", "#009E73", INK, "#5CC7A8")
BACKWARD_WEIGHT = Paint("weight", "Backward, weight", "#E69F00", INK, "#F6CE7A")
OPTIMIZER = Paint("optimizer", "Reduce and step", "#8C8C8C", INK, "#BFBFBF")
COMMUNICATION = Paint("communication", "Transfer", "#56B4E9", INK, "#A5D8F5")
MUCH_EARLIER = Paint("much-earlier", "Much earlier", "#0072B2", "#FFFFFF", "#00568A")
EARLIER = Paint("earlier", "Earlier", "#56B4E9", INK, "#A5D8F5")
UNCHANGED = Paint("unchanged", "The same", "#C9CED4", INK, "#E4E7EA")
LATER = Paint("later", "Later", "#E69F00", INK, "#F6CE7A")
MUCH_LATER = Paint("much-later", "Much later", "#D55E00", INK, "#EE9A5F")
NO_PARTNER = Paint("no-partner", "Only here", "#F0E442", INK, "#F8F2A8")
SHADES = (MUCH_EARLIER, EARLIER, UNCHANGED, LATER, MUCH_LATER, NO_PARTNER)
"""How much later than in another timeline, in the order in which `assets/lanes_derived.js` numbers them."""
PAINTS = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OPTIMIZER, REDUNDANT, COMMUNICATION)


def paint_named(name: str) -> Paint:
    """The paint with that key; that of reduce and step for a name that is not known."""
    return next((paint for paint in PAINTS if paint.key == name), OPTIMIZER)


def frame(height: int, top: int, bottom: int) -> dict[str, Any]:
    """Layout that the figures of pages share: margins, font, and no ground, so that the page's colours show through.

    Args:
        height, top, bottom: pixels of the figure, above and below its axes.
    """
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": top, "b": bottom},
        "showlegend": False,
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 12, "color": INK},
    }
