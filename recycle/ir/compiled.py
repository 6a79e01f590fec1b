"""Loops that run as they are on small inputs, and compiled by numba on large ones.

A kernel is a function over arrays, numbers and named tuples of these. Importing numba and loading a compiled kernel
takes about a second, so a small input runs in plain Python, over lists, which plain Python indexes several times
faster than arrays. Both give the same result to the last bit. numba keeps compiled code on disk beside the source and
looks at the kernel's own file alone to see whether it has changed: a kernel and the functions that it calls stand in
one file, and after a change of a named tuple that a kernel takes, the kernel's file has to be saved again as well.
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
"""Operations from which loading a compiled kernel costs less than running it in plain Python; and how many times more
where it would have to be compiled first."""

Function = TypeVar("Function", bound=Callable[..., Any])
_helpers: list[Callable[..., Any]] = []
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def called_by_kernels(function: Function) -> Function:
    """Mark a function that kernels call, so that numba compiles it with them."""
    _helpers.append(function)
    return function


def load(*kernels: Callable[..., Any]) -> None:
    """Compile these kernels, for a caller who is about to run them very often; `run` uses the compiled ones then."""
    import numba
    from numba.extending import register_jitable

    while _helpers:
        register_jitable(_helpers.pop())
    for kernel in kernels:
        if kernel not in _compiled:
            _forget_unreadable(kernel)
            _compiled[kernel] = numba.njit(cache=True, nogil=True)(kernel)


def _forget_unreadable(kernel: Callable[..., Any]) -> None:
    """Remove an index that names what is no longer there, such as a named tuple that has another name now.

    numba reads an index before it compares the times of the source, and ends with AttributeError.
    """
    for index in _indices(kernel):
        try:
            with index.open("rb") as file:
                pickle.load(file)
                pickle.loads(file.read())
        except Exception:  # a pickle that cannot be read may raise anything
            with contextlib.suppress(OSError):
                index.unlink()


def is_loaded(*kernels: Callable[..., Any]) -> bool:
    """Whether `run` runs all these kernels compiled."""
    return all(kernel in _compiled for kernel in kernels)


def is_cached(*kernels: Callable[..., Any]) -> bool:
    """Whether compiled code of all these kernels lies beside their sources, so that loading it takes about a second.

    It is told by the time of numba's index, without importing numba, so a source that was only touched counts as
    changed until `touch_cache`.
    """
    for kernel in kernels:
        changed = Path(kernel.__code__.co_filename).stat().st_mtime
        if not any(index.stat().st_mtime >= changed for index in _indices(kernel)):
            return False
    return True


def touch_cache(*kernels: Callable[..., Any]) -> None:
    """Say that the code beside the sources of these kernels, all loaded and called, is that of the sources."""
    for kernel in kernels:
        for index in _indices(kernel):
            index.touch()


def cache_folder(kernel: Callable[..., Any]) -> Path:
    """Where numba keeps compiled code of a kernel: beside its source, or in a folder of NUMBA_CACHE_DIR."""
    beside = Path(kernel.__code__.co_filename).absolute().parent
    given = os.environ.get("NUMBA_CACHE_DIR")
    if not given:
        return beside / "__pycache__"
    return Path(given) / f"{beside.name}_{hashlib.sha1(str(beside).encode()).hexdigest()}"


def _indices(kernel: Callable[..., Any]) -> Iterator[Path]:
    source = Path(kernel.__code__.co_filename)
    return cache_folder(kernel).glob(f"{source.stem}.{kernel.__name__}-*.nbi")


def run(kernel: Callable[..., Any], operations: int, *arguments: Any) -> tuple[Any, ...]:
    """Run a kernel, compiled if it is loaded or the input is large.

    Args:
        operations: about how many steps the kernel will take, for this decision.
        arguments: of the kernel; arrays, numbers, and named tuples of these.

    Returns:
        (what the kernel returned, its arguments after the run): outputs are lists where it ran in plain Python.
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
