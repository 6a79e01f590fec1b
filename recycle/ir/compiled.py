"""Kernels: loops that run as plain Python on small inputs and compiled by numba on large inputs, bitwise equal.

A kernel is a function of arrays, numbers and named tuples of these. Loading numba takes about a second, so small inputs
run in plain Python on lists. numba's cache checks only the kernel's own file for changes, so a kernel and the functions
that it calls must be in one file, which must be saved again after a change of a named tuple elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

COMPILE_FROM, UNCACHED_TIMES = 50_000, 10
"""Number of operations from which loading a compiled kernel pays off, and the factor if it must be compiled first."""

Function = TypeVar("Function", bound=Callable[..., Any])
_helpers: list[Callable[..., Any]] = []
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def called_by_kernels(function: Function) -> Function:
    """Mark a function that kernels call, so that numba compiles it with them."""
    _helpers.append(function)
    return function


def load(*kernels: Callable[..., Any]) -> None:
    """Compile these kernels now, for a caller that runs them often; `run` then uses the compiled versions."""
    import numba
    from numba.extending import register_jitable

    while _helpers:
        register_jitable(_helpers.pop())
    for kernel in kernels:
        if kernel not in _compiled:
            _forget_unreadable(kernel)
            _compiled[kernel] = numba.njit(cache=True, nogil=True)(kernel)


def _forget_unreadable(kernel: Callable[..., Any]) -> None:
    """Remove cache indices that cannot be unpickled, on which numba fails before it checks the source for changes."""
    for index in _indices(kernel):
        try:
            with index.open("rb") as file:
                pickle.load(file)
                pickle.loads(file.read())
        except Exception:  # a pickle that cannot be read may raise anything
            with contextlib.suppress(OSError):
                index.unlink()


def is_loaded(*kernels: Callable[..., Any]) -> bool:
    """Return whether `run` uses compiled versions of all these kernels."""
    return all(kernel in _compiled for kernel in kernels)


def is_cached(*kernels: Callable[..., Any]) -> bool:
    """Return whether current compiled code of all these kernels is on disk, by file times, without importing numba."""
    for kernel in kernels:
        changed = Path(kernel.__code__.co_filename).stat().st_mtime
        if not any(index.stat().st_mtime >= changed for index in _indices(kernel)):
            return False
    return True


def touch_cache(*kernels: Callable[..., Any]) -> None:
    """Mark the cached code of these kernels, all loaded and called, as up to date with the sources."""
    for kernel in kernels:
        for index in _indices(kernel):
            index.touch()


def cache_folder(kernel: Callable[..., Any]) -> Path:
    """Return numba's cache folder of a kernel: next to its source, or in NUMBA_CACHE_DIR."""
    folder = Path(kernel.__code__.co_filename).absolute().parent
    configured = os.environ.get("NUMBA_CACHE_DIR")
    if not configured:
        return folder / "__pycache__"
    return Path(configured) / f"{folder.name}_{hashlib.sha1(str(folder).encode()).hexdigest()}"


def _indices(kernel: Callable[..., Any]) -> Iterator[Path]:
    source = Path(kernel.__code__.co_filename)
    return cache_folder(kernel).glob(f"{source.stem}.{kernel.__name__}-*.nbi")


def run(kernel: Callable[..., Any], operations: int, *arguments: Any) -> tuple[Any, ...]:
    """Run a kernel of about `operations` steps, compiled if it is loaded or the input is large.

    Returns (result, *arguments after the run); outputs are lists after a plain Python run.
    """
    if (
        kernel not in _compiled
        and operations >= COMPILE_FROM
        and (operations >= COMPILE_FROM * UNCACHED_TIMES or is_cached(kernel))
    ):
        load(kernel)
    if kernel in _compiled:
        return _compiled[kernel](*arguments), *arguments
    lists = [_as_lists(argument) for argument in arguments]
    return kernel(*lists), *lists


def _as_lists(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return argument.tolist()
    return type(argument)(*map(_as_lists, argument)) if isinstance(argument, tuple) else argument
