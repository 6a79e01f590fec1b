"""Plugins: entry points of installed packages, and modules named by the user.

Modules named by `recycle COMMAND --import MODULE` or `RECYCLE_IMPORT` register their definitions on import. Commands
call `load_plugins` before they parse their arguments; processes that they start inherit the variable.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Collection, Sequence
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
    """Import `modules` and the modules of the environment variable, and register installed families and kinds.

    Modules are searched in the current directory, then on Python's path. Loaded modules are not loaded again.

    Raises:
        JobError: a module or an entry point cannot be imported, or has the wrong type for its group.
    """
    named = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    named += [name for name in modules if name not in named]
    if named:
        os.environ[VARIABLE] = ",".join(named)
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.insert(0, os.getcwd())
    for name in named:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            place = f"--import {name}" if name in modules else VARIABLE
            raise JobError(f"{place}: {import_failure(error, name)}") from None
    for entry in entry_points(KINDS_GROUP):
        if entry not in _loaded:
            _require_kind(entry, load_entry_point(entry))
            _loaded.add(entry)
    for entry in entry_points(FAMILIES_GROUP):
        if entry not in _loaded:
            _register_family(entry)
            _loaded.add(entry)


def entry_points(group: str, taken: Collection[str] = ()) -> list[metadata.EntryPoint]:
    """Return the entry points of a group, sorted by name, not imported. Raises JobError if a name is in `taken`."""
    entries = sorted(metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value))
    for entry in entries:
        if entry.name in taken:
            raise JobError(refusal_of(entry, f"recycle itself uses the name {entry.name}"))
    return entries


def load_entry_point(entry: metadata.EntryPoint) -> Any:
    """Import the object of an entry point. Raises JobError if the import fails."""
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise JobError(refusal_of(entry, import_failure(error, entry.module))) from None


def _require_kind(entry: metadata.EntryPoint, value: Any) -> None:
    from recycle.ir.kinds import KIND_CLASSES

    if isinstance(value, type) and value not in KIND_CLASSES:
        raise JobError(refusal_of(entry, f"{entry.value} is not a registered kind of instruction"))


def _register_family(entry: metadata.EntryPoint) -> None:
    from recycle.ir.families import register

    family = load_entry_point(entry)
    try:
        register(entry.name)(family)
    except (TypeError, ValueError) as error:
        raise JobError(refusal_of(entry, str(error))) from None


def refusal_of(entry: metadata.EntryPoint, reason: str) -> str:
    """Return the message for an entry point that cannot be used."""
    package = f" of the package {entry.dist.name}" if entry.dist is not None else ""
    remedy = "repair or uninstall that package" if entry.dist is not None else "repair it"
    return f"entry point {entry.group}: {entry.name}{package}: {reason}; {remedy}"


def import_failure(error: BaseException, module: str) -> str:
    """Return the message for a failed import, with the place of the error."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}."):
        return f'module "{error.name}" was not found in {os.getcwd()} or on Python\'s path'
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" at {error.filename}:{error.lineno}"
    return f"{module} cannot be imported ({type(error).__name__}: {error}{place})"
