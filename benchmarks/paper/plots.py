"""The pictures of docs/measurements/comparison.md, as SVG: goodput, throughput over time above the nodes alive, lost
time.

Deterministic text, so that a picture changes only when a figure does. `recycle view` draws the same of any comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from recycle.files import write_whole
from recycle.systems.cluster import CAUSES
from recycle.systems.comparison import Comparison
from viz.figures.charts import COLOURS
from viz.figures.palette import FAILURE, FONT, GRID, INK, MUTED, PAPER

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 900, 170, 60, 56, 28, 18
POINTS = 360
"""Parts of the time whose mean throughput is drawn."""


def write_plots(one: Comparison, title: str, folder: Path) -> dict[str, str]:
    """Write the pictures of a comparison; name of the file -> what it shows."""
    plots = {
        "comparison-goodput.svg": (f"Goodput, {title}", _goodput(one)),
        "comparison-rates.svg": (f"Throughput, and nodes alive below, {title}", _rates(one)),
        "comparison-lost.svg": (f"Share of the time that was lost, by cause, {title}", _lost(one)),
    }
    for name, (spoken, (height, parts)) in plots.items():
        write_whole(folder / name, _svg(spoken, height, parts))
    return {name: spoken for name, (spoken, _) in plots.items()}


Plot = tuple[int, list[str]]


def _svg(title: str, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="{escape(FONT)}"'
        f' font-size="12" fill="{INK}" role="img"><title>{escape(title)}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>{_text(16, 22, title, size=14)}'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12, fill: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>'
    )


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" fill="{fill}"/>'


def _line(x0: float, y0: float, x1: float, y1: float, stroke: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{stroke}"{dashed}/>'


def _goodput(one: Comparison) -> Plot:
    most = max(*(o.goodput for o in one.outcomes), *(r.samples_per_second * one.live for r in one.references)) * 1.05
    across, height = (WIDTH - LEFT - RIGHT) / most, TOP + ROW * len(one.outcomes)
    parts = []
    for place, outcome in enumerate(one.outcomes):
        y = TOP + ROW * place
        said = f"{outcome.goodput:.4g} samples/s" if outcome.misfit is None else "does not fit"
        parts.append(_text(LEFT - 8, y + 13, outcome.system, "end"))
        parts.append(_rect(LEFT, y, across * outcome.goodput, BAR, COLOURS[0]))
        inside = outcome.misfit is None
        x = LEFT + across * outcome.goodput - 6 if inside else LEFT + 6
        parts.append(_text(x, y + 13, said, "end" if inside else "start", fill=PAPER if inside else INK))
    for place, reference in enumerate(one.references):
        x = LEFT + across * reference.samples_per_second * one.live
        parts.append(_line(x, TOP - 4, x, height, FAILURE, "" if place == 0 else "5 3"))
        word = f"{'solid' if place == 0 else 'dashed'}: fault-scaled {reference.name}"
        parts.append(_text(WIDTH - RIGHT, TOP - 22 + 14 * place, word, "end", 11, MUTED))
    return height + 12, parts


def _rates(one: Comparison) -> Plot:
    shown = [outcome for outcome in one.outcomes if outcome.misfit is None]
    most, high, low = max(outcome.fault_free for outcome in shown) * 1.05, 260, 60
    across, hours, top = (WIDTH - 80 - RIGHT) / POINTS, one.trace.end / 3600, TOP + 20
    parts = [_text(76, top + 4, f"{most:.3g}", "end", 11, MUTED), _text(76, top + high, "0", "end", 11, MUTED)]
    parts += [_line(80, y, WIDTH - RIGHT, y, GRID) for y in (top, top + high / 2, top + high, top + high + 20 + low)]
    x = 80.0
    for place, outcome in enumerate(shown):
        colour, dash = COLOURS[place % len(COLOURS)], ("", "6 3", "2 2", "8 3 2 3", "10 4", "4 4")[place % 6]
        points = " ".join(
            f"{80 + across * (at + 0.5):.1f},{top + high * (1 - rate / most):.1f}"
            for at, rate in enumerate(outcome.rates(POINTS))
        )
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"{dashed}/>')
        parts.append(_line(x, TOP - 8, x + 24, TOP - 8, colour, dash))
        parts.append(_text(x + 28, TOP - 4, outcome.system, size=11))
        x += 44 + 6.2 * len(outcome.system)
    under = top + high + 20
    alive = " ".join(
        f"{80 + across * (at + 0.5):.1f},{under + low * (1 - share):.1f}"
        for at, share in enumerate(one.trace.shares_alive(POINTS))
    )
    parts.append(f'<polyline points="{alive}" fill="none" stroke="{MUTED}" stroke-width="1.6"/>')
    parts.append(_text(76, under + 4, str(one.trace.nodes), "end", 11, MUTED))
    parts.append(_text(76, under + low, "0", "end", 11, MUTED))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = 80 + (WIDTH - 80 - RIGHT) * share
        parts.append(_text(at, under + low + 18, f"{hours * share:.4g} h", "middle", 11, MUTED))
    return int(under + low + 30), parts


def _lost(one: Comparison) -> Plot:
    shown = [outcome for outcome in one.outcomes if outcome.misfit is None]
    causes = [cause for cause in CAUSES if any(o.lost[cause] > 5e-4 * o.seconds for o in shown)]
    most = max(sum(max(0.0, o.lost[cause]) for cause in causes) / o.seconds for o in shown) * 1.15
    across, top = (WIDTH - LEFT - RIGHT) / most, TOP + 8
    parts, x = [], float(LEFT)
    for place, cause in enumerate(causes):
        parts += [_rect(x, TOP - 18, 12, 12, COLOURS[place % len(COLOURS)]), _text(x + 16, TOP - 8, cause, size=11)]
        x += 34 + 6.4 * len(cause)
    for row, outcome in enumerate(shown):
        y, at = top + ROW * row, float(LEFT)
        parts.append(_text(LEFT - 8, y + 13, outcome.system, "end"))
        for place, share in _shares(outcome.lost, causes, outcome.seconds):
            parts.append(_rect(at, y, across * share, BAR, COLOURS[place % len(COLOURS)]))
            at += across * share
        parts.append(_text(at + 6, y + 13, f"{(at - LEFT) / across:.2%}", size=11))
    return top + ROW * len(shown) + 8, parts


def _shares(lost: dict[str, float], causes: list[str], seconds: float) -> Iterator[tuple[int, float]]:
    return ((place, max(0.0, lost[cause]) / seconds) for place, cause in enumerate(causes))
