"""Uses of library names in Python files, which are parsed and not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.library_names.parameters import Call, parameters_of, skipped

ROOT = Path(__file__).parents[2]
PACKAGES = {"megatron": "megatron-core", "torch": "torch"}
"""Import name -> distribution."""
LAYERS = "megatron.core.tensor_parallel.layers"
IN_STRINGS = (
    f"{LAYERS}.ColumnParallelLinear._forward_impl",
    f"{LAYERS}.RowParallelLinear._forward_impl",
    "megatron.core.distributed.DistributedDataParallel._make_backward_post_hook",
    "megatron.core.transformer.moe.router.TopKRouter._apply_expert_bias",
    "megatron.core.transformer.moe.router.TopKRouter._maintain_float32_expert_bias",
    "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
    "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
)
"""Names that recycle uses by `getattr` and `setattr`."""
DYNAMIC = ("torch.ops.", "torch.version.")


@dataclass
class Uses:
    """Uses of library names in source files.

    Attributes:
        names: name -> the places, as "file:line".
        calls: name -> the calls, with their places.
        overrides: name of a base's method -> the parameters of a method that may override it, with the place.
    """

    names: dict[str, list[str]] = field(default_factory=dict)
    calls: dict[str, list[tuple[Call, str]]] = field(default_factory=dict)
    overrides: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


class _Visitor(ast.NodeVisitor):
    """Collects uses in one file."""

    def __init__(self, path: str, uses: Uses) -> None:
        self._path, self._uses = path, uses
        self._scopes: list[dict[str, str]] = [{}]  # local name -> library name; "" for another thing
        self._instances: set[str] = set()
        self._bases: list[str | None] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in PACKAGES:
                self._note(alias.name, node)
                local = alias.asname or alias.name.split(".")[0]
                self._scopes[-1][local] = alias.name if alias.asname else local

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] in PACKAGES and not node.level:
            for alias in node.names:
                self._scopes[-1][alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self._note(f"{node.module}.{alias.name}", node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *([node.returns] if node.returns else [])):
            self.visit(part)
        self._scopes.append({})
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self._annotate(argument.arg, argument.annotation)
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [name for base in node.bases if (name := self._resolve(base))]
        self._bases.append(bases[0] if bases else None)
        if bases:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    place = f"{self._path}:{method.lineno}"
                    parameters = parameters_of(method, skip=skipped(method))
                    self._uses.overrides.setdefault(f"{bases[0]}.{method.name}", []).append((parameters, place))
        self.generic_visit(node)
        self._bases.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        name = self._resolve(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._scopes[-1][target.id] = name or ""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            name = self._resolve(node.value) if node.value is not None else None
            if name:
                self._scopes[-1][node.target.id] = name
            else:
                self._annotate(node.target.id, node.annotation)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._resolve(node)
        if name:
            self._note(name, node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._resolve(node.func)
        if name and not (isinstance(node.func, ast.Name) and node.func.id in self._instances):
            if not isinstance(node.func, ast.Attribute | ast.Name):
                self._note(name, node)
            is_open = any(isinstance(each, ast.Starred) for each in node.args)
            named = tuple(each.arg for each in node.keywords if each.arg is not None)
            call = Call(len(node.args), named, is_open or len(named) < len(node.keywords))
            self._uses.calls.setdefault(name, []).append((call, f"{self._path}:{node.lineno}"))
        self.generic_visit(node)

    def _annotate(self, local: str, annotation: ast.expr | None) -> None:
        name = self._resolve(annotation) if annotation is not None else None
        self._scopes[-1][local] = name or ""
        if name:
            self._instances.add(local)

    def _resolve(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self._scopes) if node.id in scope), None) or None
        if not isinstance(node, ast.Attribute):
            return None
        inner = node.value
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super":
            base = self._bases[-1] if self._bases else None
        else:
            base = self._resolve(inner)
        return f"{base}.{node.attr}" if base else None

    def _note(self, name: str, node: ast.AST) -> None:
        self._uses.names.setdefault(name, []).append(f"{self._path}:{getattr(node, 'lineno', 0)}")


def uses_in(paths: Iterable[Path]) -> Uses:
    """The uses of library names in Python files."""
    uses = Uses()
    for path in paths:
        _Visitor(str(path.relative_to(ROOT)), uses).visit(ast.parse(path.read_text()))
    for name in IN_STRINGS:
        uses.names.setdefault(name, []).append("tests/library_names.py")
    return uses


def used() -> Uses:
    """The uses in recycle and the examples."""
    return uses_in(source_files())


def source_files() -> list[Path]:
    return sorted((*(ROOT / "recycle").rglob("*.py"), *(ROOT / "examples").rglob("*.py")))
