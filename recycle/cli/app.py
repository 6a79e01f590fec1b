"""The Typer application: every command module registers itself here, in the order of `recycle --help`."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from recycle.cli import agent, check, compare, convert, plan, profile, schedule, simulate, train, view

app = typer.Typer(
    name="recycle",
    help="Train large models straight through failures: build, check, time, plan, run and view pipeline schedules.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"recycle {metadata.version('recycle-pipeline')}")
        raise typer.Exit


for module in (schedule, check, simulate, convert, plan, train, agent, profile, compare, view):
    module.register(app)
