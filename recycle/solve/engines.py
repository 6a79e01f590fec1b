"""Engines that planning does without where they are not installed: which are missing, and what that costs."""

from __future__ import annotations

from importlib.util import find_spec

_LOST = {
    "highspy": ("lower bounds are weaker, so that gaps look larger, and small plans are not proven", "mip[highs]"),
    "mip": ("small plans are not proven optimal", "mip[highs]"),
    "numba": ("searches on large plans are a hundred times slower", "numba"),
}


def has(module: str) -> bool:
    """Whether an engine is installed; it is not imported."""
    return find_spec(module) is not None


def missing() -> list[str]:
    """For each engine that is not installed a line that says so, what is lost, and the remedy."""
    return [
        f"{module} is not installed: {lost}; pip install '{package}'"
        for module, (lost, package) in _LOST.items()
        if not has(module)
    ]
