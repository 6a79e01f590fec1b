"""Colors of the viewer: Okabe and Ito's color-blind safe set, and inks that are readable on it.

Every ink has at least 4.5 : 1 contrast on its fill (tested). No meaning rests on color alone.
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
    """An entry of the legend.

    Attributes:
        fill, ink: colors of the box and of its text.
        hatch: color of the stripes that mark re-routed work; it does not reduce the ink's contrast.
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
MUCH_EARLIER = Paint("much-earlier", "Much earlier", "#542788", "#FFFFFF", "#3D1C63")
EARLIER = Paint("earlier", "Earlier", "#A99BD0", INK, "#CFC7E6")
UNCHANGED = Paint("unchanged", "The same", "#D3D7DB", INK, "#E9EBED")
LATER = Paint("later", "Later", "#CDB08A", INK, "#E3D3BD")
MUCH_LATER = Paint("much-later", "Much later", "#6E3B12", "#FFFFFF", "#4E290C")
NO_PARTNER = Paint("no-partner", "Only here", "#F0E442", INK, "#F8F2A8")
SHADES = (MUCH_EARLIER, EARLIER, UNCHANGED, LATER, MUCH_LATER, NO_PARTNER)
"""Shades for how much later an operation is than in another timeline, from purple to brown, unlike all kinds of work.

`assets/modules/derived.js` numbers them in this order.
"""
PAINTS = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OPTIMIZER, REDUNDANT, COMMUNICATION)


_SHARES = (0.0, 0.2, 0.38, 0.56)
"""Share of white in the colors of a worker's chunks, from the first to the last."""


def _whiter(colour: str, share: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def _shaded(paint: Paint, shade: int) -> Paint:
    fill = _whiter(paint.fill, _SHARES[shade])
    return Paint(f"{paint.key}-{shade}", paint.name, fill, "#000000", _whiter(fill, 0.45))


CHUNK_PAINTS = (PAINTS, *(tuple(_shaded(paint, shade) for paint in PAINTS) for shade in range(1, len(_SHARES))))
"""Paints of a chunk by its shade, each in the order of `PAINTS`; later chunks are lighter."""


def shade_of(chunk: int, chunks: int) -> int:
    """Return a chunk's index in `CHUNK_PAINTS`, from the darkest for the first; more than four chunks share shades."""
    return 0 if chunks < 2 else round(min(chunk, chunks - 1) * (len(CHUNK_PAINTS) - 1) / (chunks - 1))


def paint_named(name: str) -> Paint:
    """Return the paint with key `name`, or the paint of reduces and steps if unknown."""
    return next((paint for paint in PAINTS if paint.key == name), OPTIMIZER)


def frame(height: int, top: int, bottom: int) -> dict[str, Any]:
    """Return the common layout of figures on pages: margins, font, and a transparent background.

    Args:
        height, top, bottom: pixels of the figure, above its axes, and below.
    """
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": top, "b": bottom},
        "showlegend": False,
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 12, "color": INK},
    }
