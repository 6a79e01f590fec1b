"""Imports go one way: from the command line down to the words that all share, with no circle of files anywhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from recycle.cli.app import COMMANDS
from tests import ROOT

HEAVY = ("torch", "mip", "dash", "numba", "plotly", "megatron")
TORCH = {"torch", "megatron"}
ACTING = TORCH | {"socket", "time", "os", "pathlib", "threading", "subprocess", "selectors", "asyncio", "random"}
"""Modules by which a leader would have a clock, files, connections, threads or processes."""
ROOT_MODULES = tuple(f"recycle.{name}" for name in ("errors", "files", "child", "threads"))
LAYERS = dict.fromkeys(ROOT_MODULES, ROOT_MODULES)
"""What each part may import besides itself; a part is the longest name here that a module's name begins with."""
LAYERS["recycle.tokens"] = LAYERS["recycle.job"] = ROOT_MODULES
LAYERS["recycle.ir"] = ("recycle.job", *ROOT_MODULES)
LAYERS["recycle.plans"] = LAYERS["recycle.runs"] = ("recycle.ir", *LAYERS["recycle.ir"])
LAYERS["recycle.solve"] = ("recycle.plans", "recycle.runs", *LAYERS["recycle.plans"])
LAYERS["viz"] = LAYERS["recycle.solve"]
LAYERS["recycle.systems"] = ("recycle.solve", *LAYERS["recycle.solve"])
EXEC = (
    *("data", "gpus", "device", "transport", "leader", "model", "emulation", "checkpoint"),
    *("hooks", "faults", "worker"),
    *("processes", "agent", "planning", "launch", "profile"),
)
"""The parts of recycle.exec in order, folders and modules: each may import those before it."""
SAID = ("protocol", "members", "checksums", "links", "ports")
"""What processes say to each other, and how it travels; `links` and `ports` are not for the leader."""
for place, folder in enumerate(EXEC):
    LAYERS[f"recycle.exec.{folder}"] = (
        *(f"recycle.exec.{name}" for name in SAID),
        *("recycle.tokens", *LAYERS["recycle.solve"]),
        *(f"recycle.exec.{before}" for before in EXEC[:place]),
    )
LAYERS["recycle.exec.model.build"] = LAYERS["recycle.exec.checkpoint"]
"""It builds stages of a model and emulated ones."""
LAYERS["recycle.exec.hooks"] += ("recycle.exec.worker",)
"""Hooks and the loop that they attach to know each other, file by file in no circle."""
PURE = tuple(f"recycle.exec.{name}" for name in SAID[:-2])
LAYERS["recycle.exec.leader"] = (*PURE, *LAYERS["recycle.solve"])
LAYERS["recycle.exec.etcd"] = LAYERS["recycle.ir"]
LAYERS["recycle.exec.links"] = LAYERS["recycle.exec.ports"] = ROOT_MODULES
LAYERS["recycle.exec.election"] = (
    "recycle.exec.etcd",
    "recycle.exec.protocol",
    "recycle.exec.leader",
    *LAYERS["recycle.ir"],
)
LAYERS["recycle.exec.launch"] += ("recycle.exec.election", "recycle.exec.etcd")
LAYERS["recycle.exec.checksums"] = LAYERS["recycle.exec.protocol"] = ()
LAYERS["recycle.exec.members"] = LAYERS["recycle.ir"]
LAYERS["recycle.exec"] = LAYERS["recycle.exec.worker.__main__"] = ("recycle.exec.launch",)
"""The public name of the executor, and what torchrun starts, stand above its folders."""
LAYERS["recycle.hugging_face"] = ("recycle.exec", *LAYERS["recycle.ir"])
LAYERS["recycle.megatron"] = ("recycle.exec", *LAYERS["recycle.solve"])
LAYERS["recycle.megatron_versions"] = ROOT_MODULES
for part in ("exec.transport", "exec.model", "exec.model.build", "exec.processes", "megatron"):
    LAYERS[f"recycle.{part}"] += ("recycle.megatron_versions",)
LAYERS["recycle.cli"] = LAYERS["recycle"] = ("recycle", "viz")
TORCHLESS = (
    "recycle.job",
    "recycle.tokens",
    "recycle.ir",
    "recycle.plans",
    "recycle.runs.logs",
    "recycle.runs.report",
    "recycle.runs.read_report",
    "recycle.runs.exporter",
    "recycle.solve",
    "recycle.systems",
    "recycle.cli",
    "viz",
    *(f"recycle.exec.{name}" for name in ("protocol", "members", "links", "ports", "etcd", "election")),
    *(f"recycle.exec.{folder}" for folder in ("leader", "agent", "planning", "processes")),
)


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(file): file for top in ("recycle", "viz") for file in sorted((ROOT / top).rglob("*.py"))}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imported(node: ast.AST, for_types: bool) -> Iterator[str]:
    """All that is imported below `node`, in functions and by `import_module` too; what only types need, if asked."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not for_types:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "relative imports are not used here"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
            yield from (str(name.value) for name in child.args if isinstance(name, ast.Constant))
        yield from imported(child, for_types)


@cache
def imports(module: str, for_types=True) -> frozenset[str]:
    return frozenset(imported(ast.parse(FILES[module].read_text()), for_types))


def own_imports(module: str, for_types=True) -> set[str]:
    """The files of recycle and viz that `module` imports, with the packages that are loaded on the way to them."""
    files = set()
    for name in imports(module, for_types):
        while name and name not in FILES:  # a class or function: its file
            name = name.rpartition(".")[0]
        while "." in name and not within(module, name):
            files.add(name)
            name = name.rpartition(".")[0]
    return files


def part_of(module: str) -> str:
    return max((part for part in LAYERS if within(module, part)), key=len)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.strip()


@pytest.mark.process
@pytest.mark.parametrize(
    "statement",
    [
        "import recycle",
        "import recycle.ir.formats",
        "import recycle.exec.leader.leader",
        "import recycle.exec.launch.agent, recycle.exec.launch.launcher, recycle.exec.launch.run_address",
        # One after another, since an import takes a second, and loaded modules stay for all that follow.
        "import " + ", ".join(f"recycle.cli.{file}" for file in COMMANDS.values()),
    ],
)
def test_the_top_loads_nothing_heavy(statement):
    assert run(f"{statement}; import sys; print([m for m in {HEAVY!r} if m in sys.modules])") == "[]"


@pytest.mark.parametrize("package", ["recycle", "recycle.exec"])
def test_all_public_names_can_be_imported(package):
    module = import_module(package)
    assert [name for name in module.__all__ if getattr(module, name).__name__ != name] == []


@pytest.mark.process
def test_the_list_of_commands_imports_none_of_them():
    shown = run("import sys; from recycle.cli.app import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
                "print(sorted(m for m in sys.modules if m.startswith('recycle.cli.')))")  # fmt: skip
    assert all(f" {name} " in shown for name in COMMANDS)
    assert shown.endswith("['recycle.cli.app', 'recycle.cli.terminal']")


@pytest.mark.process
def test_building_checking_and_timing_a_small_schedule_loads_nothing_heavy():
    code = (
        "import sys; from recycle import *; from recycle.ir.families import gpipe; s = lower(gpipe(Shape(2, 4, 8)));"
        f"assert check(s) == []; simulate(s); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_imports_have_no_cycle():
    try:
        TopologicalSorter({module: own_imports(module, for_types=False) for module in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_ir_imports_have_no_cycle_even_for_types():
    ir = {module for module in FILES if within(module, "recycle.ir")}
    try:
        TopologicalSorter({module: own_imports(module) & ir for module in ir}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("part", LAYERS)
def test_a_part_imports_only_what_its_layer_may(part):
    allowed = (part, *LAYERS[part])
    files = [module for module in FILES if part_of(module) == part]
    assert files
    wrong = [f"{module} imports {name}" for module in files for name in sorted(own_imports(module))
             if not any(within(name, other) for other in allowed)]  # fmt: skip
    assert wrong == []


def acts(module: str) -> set[str]:
    """What a module imports or calls by which it would do or read something outside of itself."""
    tree = ast.parse(FILES[module].read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {name.split(".")[0] for name in imports(module)} & ACTING | calls & {
        "open",
        "input",
        "print",
        "exec",
        "eval",
    }


@pytest.mark.parametrize("room", ["recycle.exec.leader", "recycle.exec.protocol"])
def test_leader_and_protocol_only_compute(room):
    modules = [module for module in FILES if within(module, room)]
    assert modules
    assert {module: acts(module) for module in modules if acts(module)} == {}


def test_every_folder_of_the_executor_has_its_place():
    assert {path.parent.name for path in (ROOT / "recycle/exec").glob("*/__init__.py")} <= set(EXEC)


@pytest.mark.parametrize("part", TORCHLESS)
def test_parts_without_torch(part):
    using = {
        module for module in FILES if within(module, part) for name in imports(module) if name.split(".")[0] in TORCH
    }
    assert using == set()
