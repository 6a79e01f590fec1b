"""Pictures that need no server: one HTML file that holds everything it shows, or an SVG.

The HTML carries plotly.js inside and refers to no address; SVG and PNG are written without a browser or plotly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from recycle.errors import RecycleError
from recycle.files import write_whole
from viz.figures.palette import PAINTS
from viz.figures.raster import Window, encode_png, raster, stacked
from viz.figures.svg import Panel, svg
from viz.run import Run
from viz.sources import ScheduleFile

if TYPE_CHECKING:
    import plotly.graph_objects as go

Source = Run | ScheduleFile
SVG_LIMIT = 20_000
"""Operations beyond which an SVG is refused: viewers choke on it, and the lines would be thinner than a pixel."""
PNG_WIDTH, PNG_LANE, PNG_HEIGHT = 1600, 24, 1200
"""Pixels of a timeline's width and of a lane, and the height from which lanes become thinner."""


def export(path: str | Path, sources: Sequence[Source]) -> None:
    """Write `sources` to `path`; its suffix, `.html`, `.svg` or `.png`, says how.

    Raises:
        RecycleError: another suffix, nothing to draw, too much for an SVG, or the file cannot be written.
    """
    path = Path(path)
    write = _WRITERS.get(path.suffix.lower())
    if write is None:
        raise RecycleError(f"{path}: export knows {', '.join(_WRITERS)}, not {path.suffix or 'a name without suffix'}")
    write(path, sources)


def panels(source: Source) -> list[Panel]:
    """The timelines worth showing of a source: of a run, planned and executed, before, during and after the failure."""
    if isinstance(source, ScheduleFile):
        return [Panel(source.name, source.lanes)] if len(source.lanes) else []
    shown = []
    for moment in source.moments:
        for what, lanes in (("planned", source.planned_lanes), ("executed", source.executed_lanes)):
            table = lanes(moment.step)
            if table is not None and len(table):
                shown.append(Panel(f"{moment.title.capitalize()}, step {moment.step}: {what}", table))
    return shown


def _to_draw(path: str | Path, sources: Sequence[Source]) -> list[Panel]:
    """The timelines of `sources`. Raises RecycleError when there is none."""
    shown = [panel for source in sources for panel in panels(source)]
    if not shown:
        raise RecycleError(
            f"{path}: nothing to draw: {', '.join(source.name for source in sources)} ran no iteration yet"
        )
    return shown


def write_svg(path: str | Path, sources: Sequence[Source]) -> None:
    """Write the timelines of `sources` under each other. Raises RecycleError when there is nothing, or too much."""
    shown = _to_draw(path, sources)
    operations = sum(len(panel.table) for panel in shown)
    if operations > SVG_LIMIT:
        raise RecycleError(
            f"{path}: {operations} operations are too many for an SVG (at most {SVG_LIMIT}); export .png or .html"
        )
    write_whole(path, svg(_one_axis(shown)))


def write_png(path: str | Path, sources: Sequence[Source]) -> None:
    """Write the timelines of `sources` under each other as pixels: any number of operations, no text.

    Raises:
        RecycleError: there is nothing to draw, or the file cannot be written.
    """
    shown = _one_axis(_to_draw(path, sources))
    pictures = []
    for panel in shown:
        lanes = panel.table.lanes
        window = Window(0.0, panel.span or 1.0, 0.0, lanes)
        height = min(PNG_LANE * lanes, max(PNG_HEIGHT, lanes // 4))
        pictures.append(raster(panel.table, PNG_WIDTH, height, window))
    write_whole(path, encode_png(stacked(pictures)))


def _one_axis(shown: list[Panel]) -> list[Panel]:
    """The panels with one length of time axis per unit, so that longer looks longer."""
    longest: dict[str, float] = {}
    for panel in shown:
        longest[panel.table.unit] = max(longest.get(panel.table.unit, 0.0), panel.table.span)
    return [Panel(panel.title, panel.table, longest[panel.table.unit] or None) for panel in shown]


def write_html(path: str | Path, sources: Sequence[Source]) -> None:
    """Write one page with the figures, tables and timelines of `sources`; about 5 MB, most of it plotly.js."""
    sections: list[str] = []
    page = _Page()
    for source in sources:
        sections += _run(page, source) if isinstance(source, Run) else _schedule(page, source)
    title = escape(sources[0].name if len(sources) == 1 else "recycle")
    style = (files("viz") / "assets" / "style.css").read_text(encoding="utf-8")
    write_whole(
        path,
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title} · recycle</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head><body>\n'
        f'<header class="top"><span class="mark">recycle</span><h1>{title}</h1></header>\n<main>\n'
        + "\n".join(sections)
        + "\n</main></body></html>\n",
    )


class _Page:
    """Turns figures into HTML; the first one brings plotly.js along."""

    def __init__(self) -> None:
        self.figures = 0

    def figure(self, figure: go.Figure) -> str:
        from viz.figures.timeline import CONFIG

        self.figures += 1
        text: str = figure.to_html(
            full_html=False,
            include_plotlyjs=self.figures == 1,
            include_mathjax=False,
            config=CONFIG,
            div_id=f"figure-{self.figures}",
        )
        return text

    def timelines(self, shown: Sequence[Panel]) -> str:
        from viz.figures.timeline import note, timeline_figure

        parts = []
        for panel in _one_axis(list(shown)):
            figure = timeline_figure(panel.table, span=panel.span)
            parts.append(f'<div class="lanes"><h3>{escape(panel.title)}</h3>{self.figure(figure)}</div>')
            left_out = note(panel.table)
            parts.append(f'<p class="hint">{escape(left_out)}</p>' if left_out else "")
        return _card("Timelines", "".join(parts) + _legend()) if shown else ""


def _run(page: _Page, run: Run) -> list[str]:
    from viz.figures.curves import curves_figure
    from viz.pages.run_page import PHASE_HEAD, PLANS_CAPTION, RunPage, events_table

    answers = RunPage(run)
    rows = answers.phase_rows()
    chips = "".join(f"<span>{escape(word)}</span>" for word in answers.facts())
    sections = [_heading(run.name), f'<p class="chips">{chips}</p>']
    if run.metrics:
        sections.append(
            _card("Loss and live workers", page.figure(curves_figure(run.metrics, run.events, run.workers)))
        )
    if rows:
        sections.append(_card("Plans in use", _table(PHASE_HEAD, rows), PLANS_CAPTION))
    shown = page.timelines(panels(run))
    sections.append(shown or '<div class="empty"><p>No iteration ran yet.</p></div>')
    if run.events:
        sections.append(_card("Events", _table(*events_table(run.events))))
    return [_problems(run.problems), *sections]


def _schedule(page: _Page, file: ScheduleFile) -> list[str]:
    from viz.pages.schedule_page import FIGURES_CAPTION, FINDINGS_HEAD, SchedulePage

    answers = SchedulePage([file])
    sections = [_heading(file.name), _problems([file.problem] if file.problem else [])]
    shown = page.timelines(panels(file))
    sections.append(shown or f'<div class="empty"><p>{escape(file.name)} holds no instruction.</p></div>')
    sections.append(_card("Figures", _table(*answers.figures()), FIGURES_CAPTION))
    if file.findings:
        sections.append(_card("Findings", _table(FINDINGS_HEAD, answers.finding_rows(file))))
    return sections


def _heading(name: str) -> str:
    return f'<h2 class="source">{escape(name)}</h2>'


def _card(title: str, content: str, caption: str = "") -> str:
    below = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return f'<section class="card"><header><h2>{escape(title)}</h2>{below}</header>{content}</section>'


def _problems(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section class="problems"><h2>Problems</h2><ul>{items}</ul></section>' if lines else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str | float | int | None]]) -> str:
    from viz.pages.parts import show

    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{escape(show(row[0]))}</th>{''.join(f'<td>{escape(show(cell))}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="facts"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _legend() -> str:
    entries = [(paint.key, paint.name) for paint in PAINTS]
    entries += [("rerouted", "Re-routed, with its home: F1.0"), ("failed", "Failed worker")]
    items = "".join(f'<li><span class="swatch {key}"></span>{escape(name)}</li>' for key, name in entries)
    return f'<ul class="legend">{items}</ul>'


_WRITERS: dict[str, Callable[[Path, Sequence[Source]], None]] = {
    ".html": write_html,
    ".svg": write_svg,
    ".png": write_png,
}
