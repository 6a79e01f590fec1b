"""Parameters of functions as text, and whether calls and overriding methods fit them."""

from __future__ import annotations

import ast
from typing import NamedTuple

UNKNOWN = "(…)"
"""Parameters of what is not a function or a class in Python."""


class Call(NamedTuple):
    """The arguments of a call; `is_open` if some come from a sequence or a mapping."""

    positional: int
    named: tuple[str, ...]
    is_open: bool


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef, skip: int = 0) -> str:
    """Parameters as text, without types: "(a, b=, *, c=, **)"."""
    arguments = function.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    required = len(positional) - len(arguments.defaults)
    words = [name if place < required else f"{name}=" for place, name in enumerate(positional)][skip:]
    if arguments.vararg is not None or arguments.kwonlyargs:
        words.append("*args" if arguments.vararg is not None else "*")
    words += [
        each.arg if default is None else f"{each.arg}="
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return f"({', '.join([*words, *(['**'] if arguments.kwarg is not None else [])])})"


def fault_of(call: Call, parameters: str) -> str | None:
    """What is wrong with a call of a function with these parameters; None if it fits."""
    if parameters == UNKNOWN:
        return None
    words = [word for word in parameters[1:-1].split(", ") if word]
    star = next((place for place, word in enumerate(words) if word[0] == "*"), len(words))
    positional, names = words[:star], [word.rstrip("=") for word in words if word[0] != "*"]
    if "**" not in words and (unknown := set(call.named) - set(names)):
        return f"has no parameter {', '.join(sorted(unknown))}"
    if call.is_open:
        return None
    if call.positional > len(positional) and "*args" not in words:
        return f"takes {len(positional)} positional arguments"
    given = {*names[: call.positional], *call.named}
    missing = [word for word in words if word[0] != "*" and word[-1] != "=" and word not in given]
    return f"needs {', '.join(missing)}" if missing else None


def fault_of_override(parameters: str, base: str) -> str | None:
    """What is wrong with a method that overrides one with the parameters `base`; None if it can take its place."""
    if base == UNKNOWN or "**" in parameters:
        return None
    own, wanted = ([word.rstrip("=") for word in text[1:-1].split(", ") if word] for text in (parameters, base))
    positional = own.index("*") if "*" in own else len(own)
    lacking = [name for place, name in enumerate(wanted) if name[0] != "*" and name not in own and place >= positional]
    return f"does not take {', '.join(lacking)}" if lacking else None


def decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    bare = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return {
        each.id if isinstance(each, ast.Name) else each.attr
        for each in bare
        if isinstance(each, ast.Name | ast.Attribute)
    }


def skipped(method: ast.FunctionDef) -> int:
    """How many parameters of a method a call leaves out."""
    return 0 if "staticmethod" in decorators(method) else 1
