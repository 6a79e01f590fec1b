"""Schedules, plans and runs in a notebook.

`schedule.show()` and `plan.show()` draw lanes as SVG, without dash and plotly; their `.page()` and `show_run` embed
pages of the viewer in a frame.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from recycle.ir.schedule import Schedule
from recycle.job.profile import Profile
from viz.export import export, html
from viz.figures.svg import SVG_LIMIT, svg
from viz.run_files import load_run
from viz.sources import ScheduleFile, schedule_source


class NotebookPage:
    """Self-contained exported page in a frame: 0.1 MB, some bytes per operation, 5 MB for figures."""

    def __init__(self, content: str, height: int) -> None:
        self.content, self.height = content, height

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self.height}px;border:1px solid #C3C8CF"
        return f'<iframe srcdoc="{escape(self.content)}" style="{style}" title="Timeline"></iframe>'

    def __repr__(self) -> str:
        return f"<Page of {len(self.content) / 1e6:.1f} MB: a notebook shows it>"


class Picture:
    """The lanes of a schedule: an SVG in notebooks; elsewhere `repr` summarizes it."""

    def __init__(self, schedule: Schedule, profile: Profile | None = None, title: str = "") -> None:
        self.source: ScheduleFile = schedule_source(Path(title or "schedule"), schedule, profile)

    @property
    def svg(self) -> str:
        """Return the picture as SVG; "" if it has too many operations."""
        return svg(self.source.panels()) if len(self.source.lanes) <= SVG_LIMIT else ""

    def page(self, height: int = 640) -> NotebookPage:
        """Return the viewer's canvas in a frame of the notebook, to zoom, hover and search. Needs the `viz` extra."""
        return NotebookPage(html([self.source]), height)

    def save(self, path: str | Path) -> None:
        """Write the picture to `path` atomically; the suffix selects the format, as in `viz.export.export`."""
        export(path, [self.source])

    def _repr_svg_(self) -> str | None:
        return self.svg or None

    def __repr__(self) -> str:
        source = self.source
        problem = ", deadlocks" if source.timeline is None else ""
        errors = source.findings.number("error")
        wrong = f", {errors} error(s) found by check" if errors else ""
        large = "" if len(source.lanes) <= SVG_LIMIT else "; too many operations for a picture, use recycle view"
        return f"<Picture of {source.schedule!r}: {len(source.lanes)} operations{problem}{wrong}{large}>"


def show(schedule: Schedule, profile: Profile | None = None, title: str = "") -> Picture:
    """Draw the lanes of a schedule, timed by `profile` (None: 1 for each of F, I and W)."""
    return Picture(schedule, profile, title)


def show_run(directory: str | Path, height: int = 800) -> NotebookPage:
    """Show a run in a frame of the notebook: loss, workers, plans, events, and lanes of notable steps.

    Needs the `viz` extra. Raises RecycleError if the directory does not hold a run.
    """
    return NotebookPage(html([load_run(Path(directory))]), height)
