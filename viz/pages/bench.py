"""The workbench that pages with lanes share: lanes that fill the window, and a dock whose panels are about the timeline
in use.

The dock stands at the right or below, as wide and with the panel open that was chosen last (`assets/dock.js`). The
first panels are the same everywhere: what is selected, why it takes as long as it does, what is in view, the workers
and what a search found (`viz.pages.panels`). A page adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dash import MATCH, Dash, Input, Output, dcc, html, no_update

from viz.free_memory import release_memory
from viz.lane_cache import CachedLanes, LaneCache
from viz.pages import panels, parts, times_panel
from viz.pages.headline_bar import figures
from viz.pages.lanes_view import answer, digest_of

SELECTION, EXPLAIN, IN_VIEW, WORKERS, TIMES, FOUND = "selection", "explain", "view", "workers", "times", "found"
TITLES = {
    SELECTION: "Selection",
    EXPLAIN: "Explain",
    IN_VIEW: "In view",
    WORKERS: "Workers",
    TIMES: "Times",
    FOUND: "Found",
}
INVITATION = (
    "Press an instruction to see what it needed and what it waited for, a gap to see why the worker is idle, a worker's"
    " name to sum it up. The key ? lists all keys."
)
STORES = ("choice", "links", "linked", "asked", "window", "found")


def bench(
    page: str,
    lanes: Any,
    own: Mapping[str, Any],
    *,
    controls: Any = None,
    opened: str = SELECTION,
    named: str = SELECTION,
    identifier: Any = None,
) -> html.Div:
    """Lanes with their dock.

    Args:
        page: prefix of the page that it is on.
        lanes: timelines and whatever stands between them.
        own: title -> content of the panels that the page adds. In the address they are called by their first word.
        controls: what stands above the lanes.
        opened: panel that is open where the one chosen last is not there.
        named: panel that answers a press on a worker's name.
        identifier: of the block of lanes.
    """
    invitation = html.P(INVITATION, className="hint")
    shared = {name: html.Div(invitation if name == SELECTION else [], id=panel_id(page, name)) for name in TITLES}
    contents = {**shared, **{panel_name(title): content for title, content in own.items()}}
    titles = {**TITLES, **{panel_name(title): title for title in own}}
    attributes: dict[str, Any] = {"data-page": page, "data-opened": opened, "data-named": named}
    block = {} if identifier is None else {"id": identifier}
    return parts.div(
        "bench",
        *([html.Div(controls, className="bench-controls")] if controls else []),
        parts.div(
            "bench-main",
            parts.div("bench-lanes", html.Div(lanes, className="through", **block)),
            _splitter(),
            _dock(titles, contents),
        ),
        *(dcc.Store(id={"type": f"bench-{what}", "page": page}) for what in STORES),
        **attributes,
    )


def panel_name(title: str) -> str:
    """How the address calls a panel."""
    return title.split()[0].lower()


def panel_id(page: str, name: str) -> dict[str, str]:
    """Identifier of the content of a panel that all pages have."""
    return {"type": "bench-panel", "panel": name, "page": page}


def _splitter() -> html.Div:
    spoken: dict[str, Any] = {"role": "separator", "aria-label": "Size of the panel: arrow keys change it"}
    return html.Div(className="bench-split", tabIndex=0, **spoken)


def _dock(titles: Mapping[str, str], contents: Mapping[str, Any]) -> html.Aside:
    tabs = []
    for name, title in titles.items():
        tab: dict[str, Any] = {"role": "tab", "data-panel": name, "aria-selected": "false"}
        tabs.append(html.Button(title, className="bench-tab", **tab))
    listed: dict[str, Any] = {"role": "tablist", "aria-label": "Panels"}
    shown = []
    for name, content in contents.items():
        panel: dict[str, Any] = {"role": "tabpanel", "data-panel": name, "aria-label": titles[name]}
        shown.append(html.Section(content, hidden=True, className="bench-panel", tabIndex=0, **panel))
    return html.Aside([html.Div(tabs, className="bench-tabs", **listed), *shown], className="bench-dock")


def bar() -> html.Div:
    """What the bar of the application has beside its name and modes: the figures of the timeline in use, and a place
    for the search and the buttons, which the browser makes."""
    live: dict[str, Any] = {"aria-live": "polite", "aria-label": "Figures of the timeline"}
    return parts.div(
        "bar",
        html.Div(id="headline", className="headline", **live),
        parts.div("bar-tools"),
        dcc.Store(id="headline-of"),
    )


def register(app: Dash, cache: LaneCache) -> None:
    """Add the callbacks of all docks, and of the bar."""

    def page_store(what: str) -> Input:
        return Input({"type": f"bench-{what}", "page": MATCH}, "data")

    def panel(name: str) -> Output:
        return Output({"type": "bench-panel", "panel": name, "page": MATCH}, "children")

    @app.callback(
        panel(SELECTION),
        Output({"type": "bench-links", "page": MATCH}, "data"),
        page_store("choice"),
        prevent_initial_call=True,
    )
    def show_details(choice: Any) -> Any:
        card, links = answer(cache, choice)
        return card or html.P(INVITATION, className="hint"), links

    times_panel.register(app, cache)
    parts.in_browser(app, "arrows", Output({"type": "bench-linked", "page": MATCH}, "data"), page_store("links"))

    def on_panel(name: str, store: str, make: Callable[[CachedLanes | None, Any], Any]) -> None:
        @app.callback(panel(name), page_store(store), prevent_initial_call=True)
        def show(asked: Any) -> Any:
            if not isinstance(asked, dict) or asked.get("panel") != name:
                return no_update
            found = make(cache.get(digest_of(str(asked.get("address")))), asked)
            release_memory()
            return found

    on_panel(EXPLAIN, "asked", lambda shown, _: panels.explained(shown))
    on_panel(WORKERS, "asked", lambda shown, _: panels.workers(shown))
    on_panel(TIMES, "asked", lambda shown, _: times_panel.times(shown))
    on_panel(IN_VIEW, "window", lambda shown, asked: panels.in_view(shown, _window(asked)))
    on_panel(FOUND, "found", panels.hits)

    @app.callback(Output("headline", "children"), Input("headline-of", "data"), prevent_initial_call=True)
    def tell(address: Any) -> Any:
        shown = cache.get(digest_of(str(address)))
        return figures(shown) if shown is not None else []


def _window(asked: dict[str, Any]) -> list[float] | None:
    window = asked.get("window")
    return window if panels.is_window(window) else None
