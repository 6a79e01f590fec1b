"""The workbench of an application: lanes that fill the window, and a dock whose panels are about the timeline in use.

Pages with lanes are its modes (`viz.pages.page`), of which one is in sight. The dock stands at the right or below, as
wide and with the panel open that was chosen last (`assets/dock.js`). The first panels are the same in all modes: what
is selected, why it takes as long as it does, what is in view, the workers and what a search found
(`viz.pages.panels`). A mode adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dash import Dash, Input, Output, dcc, html, no_update

from viz.lane_cache import CachedLanes, LaneCache, release_memory
from viz.pages import panels, parts, scenario_panel
from viz.pages.lanes_view import answer
from viz.pages.page import TABS, Mode, Page

SELECTION, EXPLAIN, IN_VIEW, WORKERS, SCENARIO, FOUND = "selection", "explain", "view", "workers", "scenario", "found"
TITLES = {
    SELECTION: "Selection",
    EXPLAIN: "Explain",
    IN_VIEW: "In view",
    WORKERS: "Workers",
    SCENARIO: "Scenario",
    FOUND: "Found",
}
INVITATION = (
    "Press an instruction to see what it needed and what it waited for, a gap to see why the worker is idle, a worker's"
    " name to sum it up. The key ? lists all keys."
)
STORES = ("choice", "links", "linked", "asked", "window", "found")
SLOTS = ("controls", "lanes", "tabs", "panels", "rest")
"""The places that each mode has in the workbench."""


def bench(pages: Sequence[Page], mode: Mode | None) -> html.Div:
    """The workbench of an application: lanes with their dock.

    Args:
        pages: the application's pages, of which those with lanes have places here.
        mode: of the first page, where that has lanes; the others get theirs when they are opened, see `slots`.
    """
    modes = [page for page in pages if page.has_lanes]
    first = {SELECTION: parts.hint(INVITATION)}
    above = {SCENARIO: [part for page in pages for part in page.scenario()]}
    shared = [
        _panel(name, title, [*above.get(name, []), html.Div(first.get(name), id=panel_id(name))])
        for name, title in TITLES.items()
    ]
    filled = slots(mode) if mode is not None else {}
    places = {
        slot: [_place(page, slot, filled.get(slot, []) if page is pages[0] else []) for page in modes] for slot in SLOTS
    }
    return parts.div(
        "bench",
        parts.div("bench-controls", *places["controls"]),
        parts.div(
            "bench-main",
            parts.div("bench-lanes", *places["lanes"]),
            _splitter(),
            html.Aside(
                [
                    parts.div(
                        "bench-tabs",
                        *(_tab(name, title) for name, title in TITLES.items()),
                        *places["tabs"],
                        **parts.attributes(role="tablist", aria_label="Panels"),
                    ),
                    *shared,
                    *places["panels"],
                ],
                className="bench-dock",
            ),
        ),
        *places["rest"],
        *(dcc.Store(id=store_id(what)) for what in STORES),
        dcc.Store(id="mode"),
        hidden=not pages[0].has_lanes,
        **parts.attributes(data_page=pages[0].prefix),
    )


def slots(mode: Mode) -> dict[str, list[Any]]:
    """What a mode puts into its places, by `SLOTS`."""
    named = {panel_name(title): (title, content) for title, content in mode.panels.items()}
    block = {} if mode.identifier is None else {"id": mode.identifier}
    return {
        "controls": [] if mode.controls is None else [mode.controls],
        "lanes": [html.Div(mode.lanes, className="through", **block)],
        "tabs": [_tab(name, title) for name, (title, _) in named.items()],
        "panels": [_panel(name, *panel) for name, panel in named.items()],
        "rest": list(mode.rest),
    }


def slot_id(slot: str, page: Any) -> dict[str, Any]:
    """Identifier of a page's place in the workbench; of all pages with `ALL`."""
    return {"type": f"mode-{slot}", "page": page}


def panel_name(title: str) -> str:
    """How the address calls a panel."""
    return title.split()[0].lower()


def panel_id(name: str) -> str:
    """Identifier of the content of a panel that all modes have."""
    return f"panel-{name}"


def store_id(what: str) -> str:
    """Identifier of one of `STORES`."""
    return f"bench-{what}"


def _place(page: Page, slot: str, content: list[Any]) -> html.Div:
    named = parts.attributes(data_page=page.prefix, data_opened=page.opened, data_named=page.named)
    return html.Div(content, id=slot_id(slot, page.prefix), className="mode", **named)


def _splitter() -> html.Div:
    spoken = parts.attributes(role="separator", aria_label="Size of the panel: arrow keys change it")
    return html.Div(className="bench-split", tabIndex=0, **spoken)


def _tab(name: str, title: str) -> html.Button:
    tab = parts.attributes(role="tab", data_panel=name, aria_selected="false")
    return html.Button(title, className="bench-tab", **tab)


def _panel(name: str, title: str, content: Any) -> html.Section:
    panel = parts.attributes(role="tabpanel", data_panel=name, aria_label=title)
    return html.Section(content, hidden=True, className="bench-panel", tabIndex=0, **panel)


def bar() -> html.Div:
    """What the bar of the application has beside its name and modes: the figures of the timeline in use, and a place
    for the search and the buttons, which the browser makes."""
    return parts.div(
        "bar",
        html.Div(
            id="headline",
            className="headline",
            **parts.attributes(aria_live="polite", aria_label="Figures of the timeline"),
        ),
        parts.div("bar-tools"),
        dcc.Store(id="headline-of"),
    )


def register(app: Dash, cache: LaneCache) -> None:
    """Add the callbacks of all docks, and of the bar."""

    def store_input(what: str) -> Input:
        return Input(store_id(what), "data")

    def panel(name: str) -> Output:
        return Output(panel_id(name), "children")

    parts.in_browser(app, "showMode", Output("mode", "data"), Input(TABS, "value"))

    @app.callback(panel(SELECTION), Output(store_id("links"), "data"), store_input("choice"), prevent_initial_call=True)
    def show_details(choice: Any) -> Any:
        card, links = answer(cache, choice)
        return card or parts.hint(INVITATION), links

    scenario_panel.register(app, cache)
    parts.in_browser(app, "arrows", Output(store_id("linked"), "data"), store_input("links"))

    def on_panel(name: str, store: str, make: Callable[[CachedLanes | None, Any], Any]) -> None:
        @app.callback(panel(name), store_input(store), prevent_initial_call=True)
        def show(asked: Any) -> Any:
            if not isinstance(asked, dict) or asked.get("panel") != name:
                return no_update
            found = make(cache.get(asked.get("address")), asked)
            release_memory()
            return found

    on_panel(EXPLAIN, "asked", lambda shown, _: panels.explained(shown))
    on_panel(WORKERS, "asked", lambda shown, _: panels.workers(shown))
    on_panel(SCENARIO, "asked", lambda shown, _: scenario_panel.times(shown))
    on_panel(IN_VIEW, "window", lambda shown, asked: panels.in_view(shown, asked.get("window")))
    on_panel(FOUND, "found", panels.hits)

    @app.callback(Output("headline", "children"), Input("headline-of", "data"), prevent_initial_call=True)
    def show_headline(address: Any) -> Any:
        shown = cache.get(address)
        return parts.headline_figures(shown) if shown is not None else []
