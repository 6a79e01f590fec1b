"""What a page of the viewer is, and what the pages of one application have in common.

A page is a subclass of `Page` in a file of its own and a line in `viz.pages`; the application and the HTML
export know pages by this class only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dash import Dash, Input, Output, State, dcc, html

from viz.lane_cache import LaneCache
from viz.pages import parts
from viz.run import Run
from viz.run_files import REFRESH_SECONDS, LiveRun
from viz.sources import ScheduleFile, SystemComparison
from viz.what_if import WhatIf


@dataclass(frozen=True)
class Mode:
    """The content of a page with lanes.

    Attributes:
        lanes: timelines and whatever stands between them; while there are none, those of the mode before stay.
        panels: title -> content of the panels that the page adds. In the address they are called by their first word.
        controls: what stands above the lanes, stores and intervals.
        identifier: of the block of lanes, which callbacks fill.
    """

    lanes: Any
    panels: Mapping[str, Any]
    controls: Sequence[Any] = ()
    identifier: Any = None


TABS = "pages"
"""Identifier of the tabs; a page opens another by setting their value to its prefix."""
OPENED = "opened"
"""Identifier of the store of the pages that were opened so far."""


@dataclass
class Workspace:
    """What one application shows, shared by its pages.

    Attributes:
        files: schedule files, in the order in which they were named.
        runs: run directories, read again while they are live.
        what_if: plans for any dead workers; None without a job or library.
        comparisons: of resilience systems, by name.
        is_example: nobody asked for these sources.
        run_folders: folders of runs, to be listed.
        cache: the lanes that the browser fetches.
        pages: the pages that were opened for all this.
    """

    files: Sequence[ScheduleFile] = ()
    runs: Sequence[LiveRun] = ()
    what_if: WhatIf | None = None
    comparisons: Mapping[str, SystemComparison] = field(default_factory=dict)
    is_example: bool = False
    run_folders: Sequence[Path] = ()
    cache: LaneCache = field(default_factory=LaneCache)
    pages: list[Page] = field(default_factory=list)

    @classmethod
    def of(cls, sources: Sequence[Run | ScheduleFile], **rest: Any) -> Workspace:
        """The workspace of some sources; `rest` are other attributes."""
        files = [source for source in sources if isinstance(source, ScheduleFile)]
        runs = [LiveRun(source) for source in sources if isinstance(source, Run)]
        return cls(files, runs, **rest)

    def sources(self) -> list[Run | ScheduleFile]:
        """All files and runs as they are now; a live run is another object once it was read again."""
        return [*self.files, *(live.run for live in self.runs)]


class Page(Protocol):
    """One tab of the application.

    Attributes:
        prefix: tells the page and the identifiers of its components from those of others.
        invitation: what one finds on the page, for the list on the first page; "" leaves it out.
        has_lanes: its layout is a mode of the workbench.
        opened: panel of the workbench that is open where the page is opened for the first time.
        named: panel that answers a press on a worker's name.
        cache: the lanes that the browser fetches.
    """

    prefix: str
    invitation: str = ""
    has_lanes: bool = False
    opened: str = "selection"
    named: str = "selection"
    cache: LaneCache

    def __init__(self, cache: LaneCache | None = None) -> None:
        self.cache = cache or LaneCache()

    @classmethod
    @abstractmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        """The pages of this class that the application shows for a workspace, none where there is nothing for it."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What the tab says."""

    @abstractmethod
    def layout(self) -> html.Div | Mode:
        """The page's components, a mode where it `has_lanes`; called again whenever a browser opens the page."""

    def register(self, app: Dash) -> None:
        """Add the page's callbacks and routes; a page without any leaves this out."""

    def refresh(self) -> None:
        """Read again what may have changed; called before `layout`."""

    def scenario(self) -> Sequence[Any]:
        """What the page adds to the panel in which failures and times are entered, whichever page is open."""
        return ()

    def preloaded_lanes(self) -> Sequence[str]:
        """Addresses of the lanes that the browser should fetch before anything else where this page comes first."""
        return ()

    @property
    def begins_with_graph(self) -> bool:
        """Whether the page needs plotly.js as soon as it is opened; lanes do without."""
        return False

    def exported(self) -> Sequence[Any]:
        """The page's content without controls, for a file that needs no server; nothing if left out."""
        return ()

    def name(self, part: str) -> str:
        """Identifier of one of the page's components."""
        return f"{self.prefix}-{part}"

    def output(self, part: str, what: str = "children", *, again: bool = False) -> Output:
        """What a callback sets of one of the page's components; `again` where another callback does too."""
        return Output(self.name(part), what, allow_duplicate=again)

    def input(self, part: str, what: str) -> Input:
        """What a callback of the page is called for."""
        return Input(self.name(part), what)

    def state(self, part: str, what: str) -> State:
        """What a callback of the page is told too."""
        return State(self.name(part), what)


class PageOfRun(Page):
    """A page of one run directory, which is read again while its run goes on.

    Attributes:
        kind: what the prefix begins with; behind it stands the place of the run.
    """

    kind: str

    def __init__(self, live: LiveRun, prefix: str = "", cache: LaneCache | None = None) -> None:
        super().__init__(cache)
        self.live, self.prefix = live, prefix or self.kind

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        return [cls(live, f"{cls.kind}{place}", workspace.cache) for place, live in enumerate(workspace.runs)]

    @property
    def run(self) -> Run:
        """The run as it was read last."""
        return self.live.run

    def refresh(self) -> None:
        self.live.refresh()

    def ticks(self) -> dcc.Interval:
        return dcc.Interval(id=self.name("tick"), interval=int(REFRESH_SECONDS * 1000), disabled=not self.run.live)


def opener(page: Any) -> dict[str, Any]:
    """Identifier of a button that opens the page with that prefix; of all with `ALL`."""
    return {"type": "open", "page": page}


def keep_in_address(app: Dash, identifier: str, *choices: State) -> None:
    """Keep a control's `value` in the page's address, so that a link opens what was looked at and Back leads to the
    value before (see `assets/modules/address.js`).

    Args:
        choices: the tabs or options whose values it may have, or a list of them; an address that says another is passed
            over. `"text"` is any text; all whole numbers if left out.
    """
    parts.in_browser(
        app,
        "keepInAddress",
        Output(identifier, "value", allow_duplicate=True),
        Input(identifier, "value"),
        *choices,
        prevent_initial_call="initial_duplicate",
    )
