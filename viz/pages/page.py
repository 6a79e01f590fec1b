"""The base class of pages, and the state that the pages of an application share.

A page is a subclass of `Page` in a file of its name and a line in `viz.pages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from dash import Dash, Input, Output, Patch, State, dcc, html

from recycle.job.profile import Profile
from viz.pages import parts
from viz.run import Run
from viz.run_files import REFRESH_SECONDS, LiveRun
from viz.scenario import PageModel
from viz.sources import ScheduleFile, Source, SystemComparison
from viz.what_if import WhatIf


@dataclass(frozen=True)
class Mode:
    """The content of a page with lanes.

    Attributes:
        lanes: timelines and content between them, in the component `lanes` of the page; while empty, the previous
            mode's lanes stay.
        panels: title -> content of the page's panels. The address names panels by the first word of the title.
        controls: content above the lanes, stores and intervals.
    """

    lanes: Any
    panels: Mapping[str, Any]
    controls: Sequence[Any] = ()


TABS = "pages"
"""Identifier of the tabs; a page opens another by setting their value to its prefix."""
OPENED = "opened"
"""Identifier of the store of opened pages."""


@dataclass
class Workspace:
    """Content of an application, shared by its pages.

    Attributes:
        runs: run directories, read again while they are live.
        what_if: plans for any dead workers; None without a job or library.
    """

    files: Sequence[ScheduleFile] = ()
    runs: Sequence[LiveRun] = ()
    what_if: WhatIf | None = None
    comparisons: Mapping[str, SystemComparison] = field(default_factory=dict)
    is_example: bool = False
    run_folders: Sequence[Path] = ()
    cache: PageModel = field(default_factory=PageModel)
    pages: list[Page] = field(default_factory=list)

    @classmethod
    def from_sources(cls, sources: Sequence[Source], **attributes: Any) -> Workspace:
        files = [source for source in sources if isinstance(source, ScheduleFile)]
        runs = [LiveRun(source) for source in sources if isinstance(source, Run)]
        return cls(files, runs, **attributes)

    def sources(self) -> list[Source]:
        return [*self.files, *(live.run for live in self.runs)]

    @property
    def given(self) -> tuple[Profile | None, float]:
        """Times that the fields of the scenario start from, if known, and the `TimelineContext.share` in them."""
        for file in self.files:
            if file.context is not None and not file.executed:
                return file.context.timeline.profile, file.context.share
        return self.what_if.profile if self.what_if else None, 1.0


class Page(ABC):
    """One tab of the application.

    Attributes:
        prefix: unique prefix of the page and of its components' identifiers.
        invitation: description for the first page; "" omits the page there.
        has_lanes: whether the layout is a mode of the workbench.
        first_panel: panel of the workbench that is open when the page is first opened.
        worker_panel: panel that answers a click on a worker's name.
    """

    prefix: str
    invitation: str = ""
    has_lanes: bool = False
    first_panel: Any = "selection"
    worker_panel: str = "selection"

    def __init__(self, workspace: Workspace, place: int = 0) -> None:
        self.workspace, self.cache, self.place = workspace, workspace.cache, place

    @classmethod
    @abstractmethod
    def count(cls, workspace: Workspace) -> int:
        """Return the number of pages of this class for a workspace; page number `place` is `cls(workspace, place)`."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Text of the tab."""

    @abstractmethod
    def layout(self) -> html.Div | Mode:
        """Return the page's components, as a mode if it `has_lanes`; called whenever a browser opens the page."""

    def register(self, app: Dash) -> None:
        """Add the page's callbacks and routes; a page without any need not override it."""
        return None

    def refresh(self) -> None:
        """Read again what may have changed; called before `layout`."""
        return None

    def scenario(self) -> Sequence[Any]:
        """Return the page's part of the panel for failures and times, which every page shows."""
        return ()

    def preloaded_lanes(self) -> Sequence[str]:
        """Return addresses of lanes that the browser fetches first if this page is the first one."""
        return ()

    def static_content(self) -> Sequence[Any]:
        """Return the page's content without controls, for a file without a server; empty by default."""
        return ()

    def name(self, part: str) -> str:
        """Return the identifier of one of the page's components."""
        return f"{self.prefix}-{part}"

    def output(self, part: str, property_name: str = "children", *, again: bool = False) -> Output:
        return Output(self.name(part), property_name, allow_duplicate=again)

    def input(self, part: str, property_name: str) -> Input:
        return Input(self.name(part), property_name)

    def state(self, part: str, property_name: str) -> State:
        return State(self.name(part), property_name)


class PageOfRun(Page):
    """A page of one run directory, which is read again while its run is live.

    Attributes:
        kind: start of the prefix, followed by the index of the run.
    """

    kind: str

    def __init__(self, workspace: Workspace, place: int = 0) -> None:
        super().__init__(workspace, place)
        self.prefix = f"{self.kind}{place}"

    @classmethod
    def count(cls, workspace: Workspace) -> int:
        return len(workspace.runs)

    @property
    def run(self) -> Run:
        return self.workspace.runs[self.place].run

    def refresh(self) -> None:
        self.workspace.runs[self.place].refresh()

    def ticks(self) -> dcc.Interval:
        return dcc.Interval(id=self.name("tick"), interval=1000 * REFRESH_SECONDS, disabled=not self.run.live)

    @abstractmethod
    def figure(self) -> go.Figure:
        """Return the plot of the run, whose axis of time or steps stays as it is when the run is read again."""

    def redrawn(self) -> Patch:
        """Return the change of the plot after a reading: all but the part of the axis that a reader has chosen."""
        figure, change = self.figure(), Patch()
        change["data"] = figure.data
        for name in figure.layout:
            if name != "xaxis":
                change["layout"][name] = figure.layout[name]
        return change

    @property
    def running(self) -> Any:
        """The `running` of callbacks for ticks: the next tick comes after the answer, or after a minute without one."""
        return [(self.output("tick", "interval"), 60_000, 1000 * REFRESH_SECONDS)]


def opener(page: Any) -> dict[str, Any]:
    """Return the identifier of a button that opens the page with that prefix; with `ALL`, of all such buttons."""
    return {"type": "open", "page": page}


def keep_in_address(app: Dash, identifier: str, *choices: State) -> None:
    """Keep a control's `value` in the page's address, for links and the Back button (see `assets/modules/address.js`).

    Args:
        choices: tabs or options with the permitted values, or lists of them; other values in an address are ignored.
            Without choices any text is permitted if the initial value is text, else all whole numbers.
    """
    parts.in_browser(
        app,
        "keepInAddress",
        Output(identifier, "value", allow_duplicate=True),
        Input(identifier, "value"),
        *choices,
        prevent_initial_call="initial_duplicate",
    )
