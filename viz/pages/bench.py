"""The workbench: lanes that fill the window, and a dock with panels about the current timeline.

Pages with lanes are its modes (`viz.pages.page`), one visible at a time. All modes have the panels of
`viz.pages.panels` and may add their own. The browser remembers the dock's width and open panel (`assets/dock.js`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dash import Dash, Input, Output, dcc, html

from recycle.job.profile import Profile
from viz.lane_cache import LaneCache, TimedLanes, TimelineContext, release_memory
from viz.pages import panels, parts, scenario
from viz.pages.lanes_view import selection_details
from viz.pages.page import TABS, Mode, Page
from viz.scenario import PageModel

SELECTION, SCENARIO, FOUND = "selection", "scenario", "found"
PANEL_TITLES = {
    SELECTION: "Selection",
    "figures": "Figures",
    "explain": "Explain",
    "view": "In view",
    "workers": "Workers",
    SCENARIO: "Scenario",
    FOUND: "Found",
}
INVITATION = (
    "Press an instruction to see what it needed and what it waited for, a gap to see why the worker is idle, a worker's"
    " name to sum it up. The key ? lists all keys."
)
PANELS: dict[str, Callable[[TimedLanes, TimelineContext, dict[str, Any]], list[Any]]] = {
    "figures": panels.figures,
    "explain": panels.explained,
    "view": panels.in_view,
    "workers": panels.workers,
    FOUND: panels.hits,
}
"""Panel about the current timeline -> function that builds its content for a browser's request."""
STORES = ("choice", "links", "linked", *PANELS)
"""Names of the stores; that of a panel has the browser's last request for it."""
SLOTS = ("page", "controls", "lanes", "panels")
"""Places of each page in the application; a page with lanes leaves the first one empty, another page the others."""


def bench(pages: Sequence[Page], given: tuple[Profile | None, float]) -> list[html.Div]:
    """Build the workbench with lanes and dock, the pages without lanes, and the bar; the style sheet places them.

    Args:
        pages: all pages of the application; each gets its places here. Only the first is filled, see `slots`.
        given: see `Workspace.given`.
    """
    first_content = {SELECTION: parts.hint(INVITATION), FOUND: parts.hint("Type a query above, and press Enter.")}
    page_parts = {SCENARIO: scenario.form(given, [part for page in pages for part in page.scenario()])}
    shared = [
        _panel(name, title, [*page_parts.get(name, []), html.Div(first_content.get(name), id=panel_id(name))])
        for name, title in PANEL_TITLES.items()
    ]
    filled = slots(pages[0])
    page_slots = {
        slot: [_place(page, slot, filled.get(slot, []) if page is pages[0] else []) for page in pages] for slot in SLOTS
    }
    tabs = parts.div("bench-tabs", role="tablist", aria_label="Panels")
    dock = html.Aside([tabs, *shared, *page_slots["panels"]], className="bench-dock")
    splitter = parts.div(
        "bench-split", tabIndex=0, role="separator", aria_label="Size of the panel: arrow keys change it"
    )
    workbench = parts.div(
        "bench",
        parts.div("banner", hidden=True, role="status"),
        parts.div("bench-controls", *page_slots["controls"]),
        parts.div("bench-main", parts.div("bench-lanes", *page_slots["lanes"]), splitter, dock),
        *(dcc.Store(id=store_id(store)) for store in STORES),
        dcc.Store(id="mode"),
        hidden=not pages[0].has_lanes,
        data_page=pages[0].prefix,
    )
    headline = parts.div("headline", id="headline", aria_live="polite", aria_label="Figures of the timeline")
    return [workbench, parts.div("pages", *page_slots["page"]), parts.div("bar", headline, parts.div("bar-tools"))]


def slots(page: Page) -> dict[str, list[Any]]:
    """Return the current content of a page's places."""
    page.refresh()
    content = page.layout()
    if not isinstance(content, Mode):
        return {"page": [content]}
    return {
        "controls": list(content.controls),
        "lanes": [html.Div(content.lanes, className="through", id=page.name("lanes"))],
        "panels": [_panel(title.split()[0].lower(), title, panel) for title, panel in content.panels.items()],
    }


def slot_id(slot: str, page: Any) -> dict[str, Any]:
    """Return the identifier of a page's place in the workbench; with `ALL`, of all pages."""
    return {"type": f"mode-{slot}", "page": page}


def panel_id(name: str) -> str:
    return f"panel-{name}"


def store_id(store: str) -> str:
    return f"bench-{store}"


def _place(page: Page, slot: str, content: list[Any]) -> html.Div:
    panels = {"data_opened": page.first_panel, "data_named": page.worker_panel} if page.has_lanes else {}
    return parts.div("mode", *content, id=slot_id(slot, page.prefix), data_page=page.prefix, **panels)


def _panel(name: str, title: str, content: Any) -> html.Section:
    panel: Any = {"role": "tabpanel", "data-panel": name, "aria-label": title}
    return html.Section(content, hidden=True, className="bench-panel", tabIndex=0, **panel)


def register(app: Dash, cache: PageModel) -> None:
    def store_input(store: str) -> Input:
        return Input(store_id(store), "data")

    parts.in_browser(app, "showMode", Output("mode", "data"), Input(TABS, "value"))
    links = Output(store_id("links"), "data")

    @app.callback(Output(panel_id(SELECTION), "children"), links, store_input("choice"), prevent_initial_call=True)
    def show_details(choice: Any) -> Any:
        card, links = selection_details(cache, choice)
        return card or parts.hint(INVITATION), links

    scenario.register(app, cache)
    parts.in_browser(app, "arrows", Output(store_id("linked"), "data"), store_input("links"))

    for name in PANELS:
        app.callback(Output(panel_id(name), "children"), store_input(name), prevent_initial_call=True)(
            partial(panel_content, cache, name)
        )


def panel_content(cache: LaneCache, name: str, request: dict[str, Any]) -> list[Any]:
    """Build the content of a panel that the browser requests for an address's lanes."""
    if "problem" in request:
        return [parts.problems([str(request["problem"])])]
    entry = cache.get(request.get("address"))
    if entry is None:
        return [parts.hint(parts.NOT_CACHED)]
    if entry.context is None:
        hint = "Details need a schedule without a deadlock, or a traced step."
        return [parts.empty_state("There are only the lanes: no details are available.", hint)]
    content = PANELS[name](entry, entry.context, request)
    release_memory()
    return content
