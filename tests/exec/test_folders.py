"""Dependencies of recycle.exec go one way: a folder imports only from itself and those before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import recycle.exec

ROOT = Path(recycle.exec.__file__).parent
ORDER = (
    *("data", "model", "transport", "membership", "faults", "checkpoint", "worker", "processes", "planning"),
    *("launch", "profile"),
)
STARTS = {"worker/__main__.py": {"launch"}}
"""What torchrun starts is named after what it becomes."""


def imported(path: Path) -> set[str]:
    """Folders of recycle.exec that a file imports from, wherever in it."""
    modules = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {module.split(".")[2] for module in modules if module.startswith("recycle.exec.")}


def test_every_folder_has_its_place() -> None:
    assert sorted(ORDER) == sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imports_from_those_before_it_only(folder: str) -> None:
    before = set(ORDER[: ORDER.index(folder) + 1])
    for path in (ROOT / folder).glob("*.py"):
        name = str(path.relative_to(ROOT))
        assert imported(path) <= before | STARTS.get(name, set()), name
