"""The command line's group: a command is a file here, named as the command and its function, and a line in `COMMANDS`.

A hyphen in a command's name is an underscore in those of its file and function.

A command's file is imported when the command is called. `recycle --help` imports none of them: the line of help of each
is read from its source.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import wraps
from importlib import import_module, metadata, resources
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from recycle.errors import JobError, PlanError

COMMANDS = (
    "schedule",
    "check",
    "simulate",
    "convert",
    "plan",
    "train",
    "agent",
    "drain",
    "report",
    "tokenize",
    "import-hf",
    "export-hf",
    "import-megatron",
    "export-megatron",
    "profile",
    "compare",
    "view",
)
"""In the order of `recycle --help`."""
ImportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE", help="Import a module that registers schedule families or kinds of instruction."
    ),
]


class LazyGroup(TyperGroup):
    """Imports a command when it is called; until then it knows its name and its line of help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": {name: TyperCommand(name) for name in COMMANDS}})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that carries the line of help; None for a name that is no command."""
        return TyperCommand(cmd_name, help=_help_line(cmd_name)) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` call, and what is left of them; only here its file is imported."""
        name, _, left = super().resolve_command(ctx, args)
        return name, command_of(str(name)), left


def command_of(name: str) -> Any:
    """The command `name`, whose file this imports."""
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    function = name.replace("-", "_")
    single.command(name)(_with_imports(getattr(import_module(f"recycle.cli.{function}"), function)))
    return get_command(single)


def _with_imports(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the option `--import`.

    Its errors about a key of the job ("[section] key: ...") begin with the job file that it was given.
    """

    @wraps(command)
    def named(*, modules: list[str] | None = None, **arguments: Any) -> None:
        from recycle.ir.plugins import load_plugins

        load_plugins(modules or ())
        try:
            command(**arguments)
        except (JobError, PlanError) as error:
            given = (value for value in arguments.values() if isinstance(value, Path) and value.suffix == ".toml")
            job = next(given, None)
            if job is None or not str(error).startswith("["):
                raise
            raise type(error)(f"{job}: {error}") from None

    own = signature(command, eval_str=True)
    added = Parameter("modules", Parameter.KEYWORD_ONLY, default=None, annotation=ImportOption)
    named.__signature__ = own.replace(parameters=[*own.parameters.values(), added])  # type: ignore[attr-defined]
    named.__annotations__ = {name: parameter.annotation for name, parameter in own.parameters.items()} | {
        "modules": ImportOption
    }
    return named


def _help_line(name: str) -> str:
    function = name.replace("-", "_")
    source = resources.files("recycle.cli").joinpath(f"{function}.py").read_text(encoding="utf-8")
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function)
    return (ast.get_docstring(next(functions)) or "").split("\n\n")[0]


app = typer.Typer(
    name="recycle",
    help="Train large models straight through failures: build, check, time, plan, run and view pipeline schedules.",
    cls=LazyGroup,
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
    """What `recycle` itself does, without a command."""
    if version:
        print(f"recycle {metadata.version('recycle-pipeline')}")
        raise typer.Exit
