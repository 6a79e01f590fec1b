"""What megatron-core marks for torch.compile is compiled at its first call, not looked at when it is imported.

megatron-core decorates its fused functions with `megatron.core.jit.jit_fuser`, which is torch.compile. That imports
the compiler, 800 modules in 1.3 s of the processor, whether or not any of the functions is ever called; the layers that
workers compute with here call none of them on a CPU. `defer` has whoever imports megatron-core afterwards get a
decorator that asks torch.compile at the function's first call.

Limits: megatron-core that is imported already stays as it is.
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
    """Finds `megatron.core.jit` where Python does, and changes its decorator once it is there."""

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
    """A decorator that decorates when the function is first called."""

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
    """Have megatron-core compile at first calls, if it has not been imported yet; once is enough."""
    if not any(isinstance(finder, _Deferring) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Deferring())
