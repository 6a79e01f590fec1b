"""An application on a port of its own, for tests in a browser."""

from __future__ import annotations

import threading
from pathlib import Path

from dash import Dash

from viz.app import build_app, serve
from viz.sources import load_source


def served(*paths: Path, app: Dash | None = None) -> str:
    """The address of an application that shows `paths`, or of `app`, served until the tests end."""
    ready, addresses = threading.Event(), []

    def on_ready(address: str) -> None:
        addresses.append(address)
        ready.set()

    app = app or build_app([load_source(path) for path in paths])
    threading.Thread(target=serve, args=(app, 0, on_ready), daemon=True).start()
    assert ready.wait(30)
    return addresses[0]
