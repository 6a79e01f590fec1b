"""Compiles functions that megatron-core marks for torch.compile at their first call instead of at import.

torch.compile as a decorator imports the compiler (1.3 s of processor time) even if no decorated function is called.
Without a GPU nothing is compiled: every worker would wait for a C++ compiler, longer than a worker may hang.

Limits: has no effect on modules that are already imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import FunctionType
from typing import Any

_PACKAGE = "megatron."


class _Finder(MetaPathFinder):
    """Finds nothing, but learns that the import of megatron-core begins: this package must not import torch itself."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.startswith(_PACKAGE):
            _defer_compilation()


def defer() -> None:
    """Make megatron-core compile at first calls, unless already imported. May be called repeatedly."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@functools.cache
def _defer_compilation() -> None:
    import torch

    compiler: Any = torch.compile

    @functools.wraps(compiler)
    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not (isinstance(model, FunctionType) and model.__module__.startswith(_PACKAGE)):
            return compiler(model, **options)
        return _at_first_call(functools.partial(compiler, model, **options), model)

    torch.compile = compile_later


def _at_first_call(compiler: Callable[[], Any], function: FunctionType) -> Any:
    import torch

    @functools.cache
    def compiled() -> Any:
        return compiler() if torch.cuda.is_available() else function

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled()(*arguments, **named)

    return call
