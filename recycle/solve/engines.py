"""Engines that planning does without where they are not installed: which are missing, and what that costs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

Solver = Literal["HiGHS", "CBC"]

_PACKAGES = {"HiGHS": ("highspy", "highsbox"), "CBC": ("cbcbox",)}
_LOST = {
    "highspy": (
        "lower bounds are weaker, gaps look larger, and no solver improves or proves plans",
        "mip[highs]",
    ),
    "mip": ("no solver improves or proves plans", "mip[highs]"),
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


def not_installed(solver: Solver) -> str | None:
    """What is not installed of python-mip and this solver, and how to get it; None when all is there."""
    if not has("mip"):
        return f"python-mip is not installed, which {solver} is called through: pip install 'mip[highs]'"
    if not any(has(package) for package in _PACKAGES[solver]):
        return f"{solver} is not installed: pip install {_PACKAGES[solver][0]}"
    return None
