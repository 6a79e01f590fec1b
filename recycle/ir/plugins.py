"""What is defined outside the package: entry points of installed packages, and modules that are named.

A package states entry points in the groups of `GROUPS`. A module that `recycle COMMAND --import MODULE` or the
environment variable `RECYCLE_IMPORT` names registers what it defines when it is imported. Commands call `load_plugins`
before they read their arguments, and so do the processes that commands start, which inherit the variable.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from recycle.errors import JobError

FAMILIES_GROUP = "recycle.families"
KINDS_GROUP = "recycle.kinds"
TRANSPORTS_GROUP = "recycle.transports"
SYSTEMS_GROUP = "recycle.systems"
GROUPS = (FAMILIES_GROUP, KINDS_GROUP, TRANSPORTS_GROUP, SYSTEMS_GROUP)
VARIABLE = "RECYCLE_IMPORT"
"""Environment variable with modules to import, separated by commas."""
_loaded: set[metadata.EntryPoint] = set()


def load_plugins(modules: Sequence[str] = ()) -> None:
    """Import `modules` and those of the environment variable; register all families and kinds of installed packages.

    Modules are looked for in the current directory, then on Python's path. Whatever is loaded already is left alone.

    Raises:
        JobError: a module or an entry point cannot be imported, or is not what its group is for.
    """
    named = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    named += [name for name in modules if name not in named]
    if named:
        os.environ[VARIABLE] = ",".join(named)
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.insert(0, os.getcwd())
    for name in named:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise JobError(f"--import {name}: {_reason(error, name)}") from None
    for entry in entry_points(KINDS_GROUP):
        if entry not in _loaded:
            _require_kind(entry, load_entry_point(entry))
            _loaded.add(entry)
    for entry in entry_points(FAMILIES_GROUP):
        if entry not in _loaded:
            _register_family(entry)
            _loaded.add(entry)


def entry_points(group: str) -> list[metadata.EntryPoint]:
    """The entry points of a group by name, in the same order in every process; nothing is imported."""
    return sorted(metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def load_entry_point(entry: metadata.EntryPoint) -> Any:
    """What an entry point names. Raises JobError when it cannot be imported."""
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise JobError(f"{_place(entry)}: {_reason(error, entry.module)}; {_remedy(entry)}") from None


def _require_kind(entry: metadata.EntryPoint, value: Any) -> None:
    from recycle.ir.kinds import KIND_CLASSES

    if isinstance(value, type) and value not in KIND_CLASSES:
        raise JobError(f"{_place(entry)}: {entry.value} is not a registered kind of instruction; {_remedy(entry)}")


def _register_family(entry: metadata.EntryPoint) -> None:
    from recycle.ir.families import register

    family = load_entry_point(entry)
    try:
        register(entry.name)(family)
    except (TypeError, ValueError) as error:
        raise JobError(f"{_place(entry)}: {error}; {_remedy(entry)}") from None


def _place(entry: metadata.EntryPoint) -> str:
    package = f" of the package {entry.dist.name}" if entry.dist is not None else ""
    return f"entry point {entry.group}: {entry.name}{package}"


def _remedy(entry: metadata.EntryPoint) -> str:
    return "repair or uninstall that package" if entry.dist is not None else "repair it"


def _reason(error: BaseException, module: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}."):
        return f'there is no module "{error.name}" in {os.getcwd()} or on Python\'s path'
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" at {error.filename}:{error.lineno}"
    return f"{module} cannot be imported ({type(error).__name__}: {error}{place})"
