"""Compiles functions that megatron-core marks for torch.compile at their first call instead of at import.

torch.compile as a decorator imports the compiler (1.3 s of processor time) even if no decorated function is called.
Without a GPU nothing is compiled: every worker would wait for a C++ compiler, longer than a worker may hang.

Limits: has no effect on modules that are already imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_PACKAGE = "megatron."


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith(_PACKAGE) else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


class _DeferringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import torch

        compiler: Any = torch.compile
        if not isinstance(compiler, _AtFirstCall):
            torch.compile = _AtFirstCall(compiler)
        try:
            self._loader.exec_module(module)
        finally:
            torch.compile = compiler


class _AtFirstCall:
    """torch.compile, as function or decorator, that compiles at the compiled function's first call."""

    def __init__(self, compiler: Callable[..., Any]) -> None:
        self._compiler = compiler

    def __call__(self, model: Any = None, **options: Any) -> Any:
        import torch

        if model is None:
            return functools.partial(self, **options)

        @functools.cache
        def compiled() -> Any:
            return self._compiler(model, **options) if torch.cuda.is_available() else model

        @functools.wraps(model)
        def call(*arguments: Any, **named: Any) -> Any:
            return compiled()(*arguments, **named)

        return call


def defer() -> None:
    """Make megatron-core compile at first calls, unless already imported. May be called repeatedly."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
