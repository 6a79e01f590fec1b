"""The command group: each command is a function, listed in `COMMANDS` with its file.

Hyphens in a command's name are underscores in its function's name. A call imports the function; `recycle --help`
imports none and reads the help lines from the sources.

A command's options are its parameters, described below "Args:" of its docstring as `name (FLAGS METAVAR): help`. A
parameter without default and flags is an argument. Annotations hold what else typer needs: limits, environment
variables.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import wraps
from importlib import import_module, metadata, resources
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import OptionInfo

from recycle.cli.terminal import JsonOption, Result
from recycle.errors import JobError, PlanError
from recycle.job.reference import described_names

COMMANDS = {
    **{
        "schedule": "schedule",
        "check": "schedule",
        "simulate": "simulate",
        "convert": "schedule",
        "plan": "plan",
        "verify": "verify",
    },
    **{"train": "train", "agent": "train", "drain": "runs", "report": "runs", "tokenize": "conversion"},
    **dict.fromkeys(("import-hf", "export-hf", "import-megatron", "export-megatron"), "conversion"),
    **{"profile": "profile", "compare": "compare", "advise": "advise", "view": "view"},
}
"""Command -> its file, in the order of `recycle --help`."""
ImportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE", help="Import a module that registers schedule families or kinds of instruction."
    ),
]


class LazyGroup(TyperGroup):
    """Command group that imports a command when it is called, and knows only name and help line before."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": {name: TyperCommand(name) for name in COMMANDS}})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=_help_line(cmd_name)) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, remaining = super().resolve_command(ctx, args)
        return name, command_of(str(name)), remaining


def command_of(name: str) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    function = getattr(import_module(f"recycle.cli.{COMMANDS[name]}"), name.replace("-", "_"))
    single.command(name, help=cleandoc(function.__doc__).partition("\n\nArgs:\n")[0])(_wrap_command(function))
    return get_command(single)


def _wrap_command(command: Callable[..., Result | None]) -> Callable[..., None]:
    """Add the option `--import`, and `--json` if `command` returns a `Result`.

    Errors about a key of the job ("[section] key: ...") are prefixed with the job file.
    """
    own = signature(command, eval_str=True)
    returns = own.return_annotation is Result

    @wraps(command)
    def named(*, modules: list[str] | None = None, **arguments: Any) -> None:
        from recycle.ir.plugins import load_plugins

        load_plugins(modules or ())
        as_json = returns and arguments.pop("as_json")
        try:
            result = command(**arguments)
            if result is not None:
                result.print(as_json)
        except (JobError, PlanError) as error:
            given = (value for value in arguments.values() if isinstance(value, Path) and value.suffix == ".toml")
            job = next(given, None)
            if job is None or not str(error).startswith("["):
                raise
            raise type(error)(f"{job}: {error}") from None

    about = described_names(command.__doc__ or "")
    parameters = [
        _describe_parameter(each, *about[each.name]) if each.name in about else each for each in own.parameters.values()
    ]
    added = {"as_json": (False, JsonOption)} if returns else {}
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (default, annotation) in {**added, "modules": (None, ImportOption)}.items()
    ]
    named.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    named.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return named


def _describe_parameter(parameter: Parameter, hint: str, text: str) -> Parameter:
    annotation, flags = parameter.annotation, re.findall(r"(?<!\S)-\S+", hint)
    kind, *given = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    is_option = bool(flags) or parameter.default is not Parameter.empty
    info = given[0] if given else typer.Option() if is_option else typer.Argument()
    info.help = text[0].upper() + text[1:]
    info.metavar = re.sub(r"(?<!\S)-\S+ ?", "", hint) or None
    if isinstance(info, OptionInfo):
        is_named = any(flag.startswith("--") for flag in flags)
        info.param_decls = (*flags, *(() if is_named else (f"--{parameter.name.replace('_', '-')}",)))
    return parameter.replace(annotation=Annotated[kind, info])


def _help_line(name: str) -> str:
    function = name.replace("-", "_")
    source = resources.files("recycle.cli").joinpath(f"{COMMANDS[name]}.py").read_text(encoding="utf-8")
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
    if version:
        print(f"recycle {metadata.version('recycle-pipeline')}")
        raise typer.Exit
