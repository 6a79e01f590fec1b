"""Functions that a job names as "package.module:function": of the model, the data and the loss."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recycle.errors import JobError, first_line

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def require_name(text: str, key: str) -> None:
    """Raise JobError unless `text` has the form of a function's name; imports nothing."""
    if _NAME.fullmatch(text) is None:
        raise JobError(f'{key}: "{text}" is not the name of a function; write "package.module:function"')


def function_named(text: str, key: str, folders: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the function that a job names.

    Args:
        key: the job's key, such as "[model] provider", for messages.
        folders: searched before Python's path, and added to it.

    Raises:
        JobError: the module cannot be imported, or lacks the function.
    """
    require_name(text, key)
    module_name, _, attribute = text.partition(":")
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise JobError(f"{key}: {module_name} imports {error.name}, which is not installed") from None
        where = " ".join((*folders, "or on Python's path"))
        raise JobError(f'{key}: module "{error.name}" is not in {where}') from None
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise JobError(f"{key}: {module_name} cannot be imported ({reason})") from None
    for name in attribute.split("."):
        if not hasattr(target, name):
            offered = [name for name, value in vars(target).items() if inspect.isfunction(value) and name[0] != "_"]
            has = f"; it has {', '.join(sorted(offered)[:8])}" if offered else ""
            raise JobError(f'{key}: {module_name} has no "{attribute}"{has}')
        target = getattr(target, name)
    if not callable(target):
        raise JobError(f"{key}: {text} is of type {type(target).__name__}, not a function")
    return target  # type: ignore[no-any-return]


def name_of(function: Callable[..., Any], key: str) -> tuple[str, str]:
    """Return ("package.module:function", the folder of its module), by which other processes import a function.

    Raises:
        JobError: other processes cannot import it, because it is not defined at the top level of a module's file.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    qualified = getattr(function, "__qualname__", "<")
    file = getattr(module, "__file__", None)
    if module is None or file is None or "<" in qualified or _attribute(module, qualified) is not function:
        raise JobError(
            f"{key}: {function!r} cannot be imported by worker processes; define it at the top of a module's file, or"
            ' run in this process with transport = "local"'
        )
    name = module.__name__
    if name == "__main__":
        name = module.__spec__.name if module.__spec__ is not None else Path(file).stem
    path = Path(file).resolve()
    depth = name.count(".") + (path.name == "__init__.py")
    return f"{name}:{qualified}", str(path.parents[depth])


def _attribute(value: Any, qualified: str) -> Any:
    for name in qualified.split("."):
        value = getattr(value, name, None)
    return value
