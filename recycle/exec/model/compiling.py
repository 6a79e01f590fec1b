"""Compiles functions that megatron-core marks for torch.compile at their first call instead of at import.

megatron-core decorates its fused functions with `megatron.core.jit.jit_fuser`, which is torch.compile. The decorator
imports the compiler (800 modules, 1.3 s of processor time) even if no decorated function is called. On a CPU the layers
of workers call none. After `defer`, an import of megatron-core gets a decorator that compiles at the first call.

Limits: has no effect on megatron-core if already imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_JIT = "megatron.core.jit"


class _Deferring(MetaPathFinder, Loader):
    """Import hook that replaces the decorator of `megatron.core.jit` after its import."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _JIT else None
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.jit_fuser = at_first_call(module.jit_fuser)  # type: ignore[attr-defined]


def at_first_call(decorator: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a decorator so that it is applied at the function's first call."""

    def deferred(function: Any) -> Any:
        @functools.cache
        def decorated() -> Any:
            return decorator(function)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return decorated()(*arguments, **named)

        return call

    return deferred


def defer() -> None:
    """Make megatron-core compile at first calls, unless already imported. May be called repeatedly."""
    if not any(isinstance(finder, _Deferring) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Deferring())
