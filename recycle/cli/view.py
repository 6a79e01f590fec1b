"""`recycle view`: the timelines of runs and schedules, in a browser or in a file."""

from __future__ import annotations

import importlib.util
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from recycle.errors import RecycleError

DEFAULT_PORT = 8050


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(view)


def view(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE | RUN_DIR]...", help="Schedule files and run directories.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(help="Port on loopback; 0 takes any free one.")] = DEFAULT_PORT,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    export_to: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write a .html or .svg instead of serving.")
    ] = None,
) -> None:
    """Show runs and schedules: planned and executed timelines, losses, failures. Serves on loopback until Ctrl-C.

    Example: recycle view runs/latest --open

    Example: recycle view plan.json --export plan.svg
    """
    if not paths:
        raise RecycleError("view: give a run directory or a schedule file, for example: recycle view runs/latest")
    _require_viewer(() if export_to is not None and export_to.suffix.lower() == ".svg" else ("dash", "plotly"))
    from viz.sources import load_source

    sources = [load_source(path) for path in paths]
    if export_to is not None:
        from viz.export import export

        export(export_to, sources)
        typer.echo(f"wrote {export_to}")
        return
    from viz.app import build_app, serve

    def ready(address: str) -> None:
        typer.echo(f"{address}  (Ctrl-C ends it)")
        if open_browser:
            webbrowser.open(address)

    serve(build_app(sources), port, ready)


def _require_viewer(packages: tuple[str, ...]) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise RecycleError(
                f"view: {package} is not installed; install the viewer: pip install 'recycle-pipeline[viz]'"
            )
