"""The Dash application: pages as tabs, served on loopback only.

The browser loads everything from this process: plotly.js from the installed plotly, styles from `assets/`. The viewer
has no password and can plan and read schedules, so `protect` keeps other web pages out: they could point their name at
127.0.0.1 (DNS rebinding), post to this server, or embed it in a frame.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.exceptions import DependencyException
from flask import Response, request

from recycle.errors import RecycleError
from viz.export import MODULES, import_map
from viz.pages import bench, editing, lanes_view, open_pages
from viz.pages.page import OPENED, TABS, Page, Workspace, keep_in_address, opener
from viz.sources import Source, SystemComparison
from viz.what_if import WhatIf

HOST, DEFAULT_PORT = "127.0.0.1", 8050


def build_app(
    sources: Sequence[Source],
    what_if: WhatIf | None = None,
    *,
    comparisons: Mapping[str, SystemComparison] | None = None,
    is_example: bool = False,
    allowed_hosts: Collection[str] = (),
    run_folders: Sequence[Path] = (),
) -> Dash:
    """Build the application that shows `sources`; with `what_if` also plans for any dead workers.

    Args:
        comparisons: comparisons of resilience systems, by name.
        is_example: whether the sources are examples; a first page then explains what can be shown.
        allowed_hosts: host names besides loopback, see `protect`.
    """
    workspace = Workspace.from_sources(
        sources, what_if=what_if, comparisons=comparisons or {}, is_example=is_example, run_folders=run_folders
    )
    pages = open_pages(workspace)
    modules = {
        file.name: f"./assets/modules/{file.name}?m={file.stat().st_mtime_ns}" for file in sorted(MODULES.glob("*.js"))
    }
    app = Dash(
        "viz",
        index_string=_index(pages[0], modules),
        title=f"{pages[0].title} · recycle",
        update_title="",
        assets_folder=str(MODULES.parent),
        assets_path_ignore=["modules"],  # these import each other
        suppress_callback_exceptions=True,  # pages of closed tabs have no components yet
    )
    protect(app, allowed_hosts, [import_map(modules)])
    # Browsers cache assets forever: each address carries the time of the last change.
    app.server.config["SEND_FILE_MAX_AGE_DEFAULT"] = 31_536_000
    # Dash calls a callable layout on every visit, so a live run appears in its current state.
    app.layout = lambda: _layout(pages, workspace)
    lanes_view.register(app, workspace.cache)
    bench.register(app, workspace.cache)
    editing.register(app, workspace.cache)
    keep_in_address(app, TABS, State(TABS, "children"))
    _register_opening(app, pages)
    for page in pages:
        page.register(app)
    return app


_GRAPHS = "_dash-component-suites/plotly/package_data/plotly.min.js", "_dash-component-suites/dash/dcc/async-graph.js"
"""Scripts that Dash requests only for the first graph."""
_ASKED = "_dash-layout", "_dash-dependencies"
"""Addresses that Dash requests after all scripts ran."""


def _index(page: Page, modules: Mapping[str, str]) -> str:
    fetched = [*page.preloaded_lanes(), *(f"/{answer}" for answer in _ASKED)]
    head = f'<script type="importmap">{import_map(modules)}</script>'
    head += "".join(f'<link rel="modulepreload" fetchpriority="low" href="{address}">' for address in modules.values())
    head += f'<script type="module" async fetchpriority="low" src="{modules["main.js"]}"></script>'
    head += "".join(f'<link rel="preload" as="fetch" crossorigin href="{address}">' for address in fetched)
    head += "".join(f'<link rel="prefetch" href="/{script}">' for script in _GRAPHS)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head>{%metas%}'
        f"<title>{{%title%}}</title>{head}{{%favicon%}}{{%css%}}</head>"
        "<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body></html>"
    )


def _layout(pages: Sequence[Page], workspace: Workspace) -> html.Div:
    tabs = [dcc.Tab(label=page.title, value=page.prefix) for page in pages]
    content = [dcc.Tabs(tabs, value=pages[0].prefix, id=TABS), *bench.bench(pages, workspace.given)]
    opened = dcc.Store(id=OPENED, data=[pages[0].prefix])
    top = html.Header(html.H1("recycle"), className="top")
    return html.Div([top, html.Main(content), opened], className="application")


def _register_opening(app: Dash, pages: Sequence[Page]) -> None:
    places = [Output(bench.slot_id(slot, ALL), "children") for slot in bench.SLOTS]

    @app.callback(
        *places, Output(OPENED, "data"), Input(TABS, "value"), State(OPENED, "data"), prevent_initial_call=True
    )
    def fill_page(prefix: str, opened: list[str]) -> tuple[Any, ...]:
        page = next(page for page in pages if page.prefix == prefix)
        filled = {} if prefix in opened else bench.slots(page)
        contents = [
            [filled.get(slot, no_update) if each is page else no_update for each in pages] for slot in bench.SLOTS
        ]
        return *contents, [*opened, prefix] if filled else no_update

    @app.callback(
        Output(TABS, "value", allow_duplicate=True), Input(opener(ALL), "n_clicks"), prevent_initial_call=True
    )
    def open_page(clicks: list[int]) -> Any:
        return ctx.triggered_id["page"] if ctx.triggered_id is not None and any(clicks) else no_update


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

_POLICY = {
    "default-src": "'self'",
    "style-src": "'self' 'unsafe-inline'",  # Plotly and Dash set styles of single elements
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "worker-src": "'self' blob:",
    "object-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}


def protect(app: Dash, allowed: Collection[str], scripts: Collection[str]) -> None:
    """Restrict requests, and what browsers may load.

    Requests under other host names, and posts from other pages, get 403. Unknown Dash scripts get 404, unknown
    callbacks 400.

    Args:
        allowed: host names or addresses besides loopback, without port, because a tunnel or proxy may have another
            port.
        scripts: texts of script elements in the page besides Dash's.
    """
    hashes = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    names = LOOPBACK | {name.lower() for name in allowed}

    def refuse() -> Response | None:
        host = _name(f"//{request.host}")
        if host not in names:
            return _refused(f"{host!r} is not a name of this viewer; allow it with: recycle view --allow-host NAME")
        origin = request.headers.get("Origin")
        if request.method != "GET" and origin is not None and urlsplit(origin).netloc.lower() != request.host.lower():
            return _refused(f"requests from {origin!r} are refused")
        if request.path == "/_dash-update-component" and request.method == "POST":
            body = request.get_json(silent=True)
            output = body.get("output") if isinstance(body, dict) else None
            if not isinstance(output, str) or output not in app.callback_map:
                return _refused("this viewer has no such callback; reload the page", 400)
        return None

    def add_headers(response: Response) -> Response:
        sources = ["'self'", *app.csp_hashes(), *(f"'sha256-{digest}'" for digest in hashes)]
        policy = {**_POLICY, "script-src": " ".join(sources)}
        response.headers["Content-Security-Policy"] = "; ".join(
            f"{directive} {allowed}" for directive, allowed in policy.items()
        )
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    app.server.before_request(refuse)
    # Without a handler Flask reports Dash's exception as a bug with a traceback.
    app.server.register_error_handler(DependencyException, lambda _: _refused("no such file", 404))
    app.server.after_request(add_headers)


def _name(address: str) -> str:
    try:
        return (urlsplit(address).hostname or "").lower()
    except ValueError:
        return ""


def _refused(reason: str, status: int = 403) -> Response:
    return Response(f"recycle: {reason}\n", status, mimetype="text/plain")


def serve(app: Dash, port: int = DEFAULT_PORT, on_ready: Callable[[str], None] = print) -> None:
    """Serve on loopback until Ctrl-C.

    Args:
        port: 0 takes any free port.
        on_ready: called with the address once the page can be opened.

    Raises RecycleError if the port is in use or not permitted.
    """
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    for path in ("/", "/_dash-layout"):
        app.server.test_client().get(path)  # Dash prepares these answers at the first request
    gc.freeze()  # collections skip what stays
    with _listen(port) as listener:
        bound = listener.getsockname()[1]
        server = make_server(HOST, bound, app.server, threaded=True, fd=listener.fileno())
        with closing(server.socket), suppress(KeyboardInterrupt):
            on_ready(f"http://{HOST}:{bound}")
            server.serve_forever()


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port), backlog=64)
    except OverflowError:
        raise RecycleError(f"port {port} cannot be used (must be 0 to 65535)") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} is in use: give another with --port, or --port 0 for any free one"
            raise RecycleError(message) from None
        raise RecycleError(f"port {port} cannot be used ({os.strerror(error.errno or 0)})") from None
