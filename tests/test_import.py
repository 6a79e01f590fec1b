"""Imports: light at the top, and in one direction between the packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "mip", "dash", "numba", "plotly", "megatron")

# What a part of the tree may import of the others, besides the words that all share.
SHARED = {
    "recycle",
    "recycle.errors",
    "recycle.endpoints",
    "recycle.nodes",
    "recycle.shape",
    "recycle.files",
    "recycle.json_objects",
}
ALLOWED = {
    "recycle/ir": {"recycle.ir", "recycle.job", "recycle.profile"},
    "recycle/solve": {"recycle.solve", "recycle.plans", "recycle.ir", "recycle.job", "recycle.profile"},
    "recycle/exec": {"recycle.exec", "recycle.plans", "recycle.ir", "recycle.job", "recycle.sections",
                     "recycle.profile"},
    "recycle/systems": {"recycle.systems", "recycle.solve", "recycle.plans", "recycle.ir", "recycle.job",
                        "recycle.sections", "recycle.profile", "recycle.layers", "recycle.analytic"},
    "viz": {"viz", "recycle.plans", "recycle.ir", "recycle.job", "recycle.profile"},
}  # fmt: skip
TORCHLESS = ("recycle/ir", "recycle/solve", "recycle/systems", "viz")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.strip()


@pytest.mark.parametrize("statement", ["import recycle", "import recycle.cli.app, recycle.ir.formats"])
def test_the_top_loads_nothing_heavy(statement: str) -> None:
    assert run(f"{statement}; import sys; print([m for m in {HEAVY!r} if m in sys.modules])") == "[]"


def test_building_checking_and_timing_a_small_schedule_loads_nothing_heavy() -> None:
    code = (
        "import sys; from recycle import *; from recycle.ir.families import gpipe; s = lower(gpipe(Shape(2, 4, 8)));"
        f"assert check(s) == []; simulate(s); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert run(code) == "[]"


def imports(file: Path) -> set[str]:
    """Modules that a file imports anywhere, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("part", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(part: str) -> None:
    wrong = []
    for file in sorted((ROOT / part).rglob("*.py")):
        ours = {m for m in imports(file) if m.split(".")[0] in ("recycle", "viz")}
        top = {m for m in ours if m.startswith("recycle.") and m.count(".") == 1 and m.split(".")[1][0].isupper()}
        others = {m for m in ours - top if not within(m, ALLOWED[part] | SHARED - {"recycle"})}
        wrong += [f"{file.relative_to(ROOT)}: {module}" for module in sorted(others)]
    assert wrong == []


@pytest.mark.parametrize("part", TORCHLESS)
def test_planning_and_viewing_need_no_torch(part: str) -> None:
    files = sorted((ROOT / part).rglob("*.py"))
    assert [file for file in files if within_any(imports(file), {"torch", "megatron"})] == []


def within_any(modules: set[str], packages: set[str]) -> bool:
    return any(within(module, packages) for module in modules)


def test_the_job_and_the_profile_stand_below_everything() -> None:
    prices = {"recycle.profile", "recycle.layers", "recycle.analytic", "recycle.sections"}
    for name in ("job", "sections", "profile", "layers", "shape", "errors", "files"):
        ours = {m for m in imports(ROOT / "recycle" / f"{name}.py") if m.startswith("recycle.")}
        assert not {m for m in ours if not within(m, SHARED - {"recycle"} | prices)}
