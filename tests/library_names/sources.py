"""Sources of a version of a library: which names it has, with which parameters."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.library_names.parameters import UNKNOWN, decorators, parameters_of, skipped
from tests.library_names.uses import PACKAGES


class Source:
    """The sources of a library, in a wheel or a folder.

    Args:
        bases: sources that have the bases of classes which are not in these.

    Attributes:
        versions: version by distribution.
    """

    def __init__(self, path: Path, bases: Source | None = None) -> None:
        self._others = bases
        self._folder = None if path.is_file() else path
        self._archive = zipfile.ZipFile(path) if path.is_file() else None
        entries = self._archive.namelist() if self._archive else [entry.name for entry in path.iterdir()]
        self._entries = frozenset(entries)
        self._own = {entry.split("/")[0] for entry in entries}
        found = [re.match(r"(megatron_core|torch)-([^-/]+)\.dist-info", entry) for entry in entries]
        self.versions = {match[1].replace("_", "-"): match[2].split("+")[0] for match in found if match}
        self._trees: dict[str, ast.Module | None] = {}

    def describe(self, name: str) -> str | None:
        """Parameters of a name, `UNKNOWN` if it has none in Python, None if there is no such name."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            if self._tree(".".join(parts[:length])) is not None:
                return self._in_module(".".join(parts[:length]), parts[length:], frozenset())
        return None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            base = module.replace(".", "/")
            candidates = (f"{base}.py", f"{base}/__init__.py", f"{base}.pyi", f"{base}/__init__.pyi")
            text = next((found for path in candidates if (found := self._read(path)) is not None), None)
            self._trees[module] = None if text is None else ast.parse(text)
            if text is None and self._others is not None and module.split(".")[0] not in self._own:
                self._trees[module] = self._others._tree(module)
        return self._trees[module]

    def _read(self, path: str) -> str | None:
        if self._others is not None and path.split("/")[0] not in self._own:
            return self._others._read(path)
        if self._archive is not None:
            return self._archive.read(path).decode() if path in self._entries else None
        assert self._folder is not None
        file = self._folder / path
        return file.read_text() if file.is_file() else None

    def _in_module(self, module: str, names: Sequence[str], seen: frozenset[tuple[str, str]]) -> str | None:
        if not names:
            return UNKNOWN
        if (module, names[0]) in seen:
            return None
        seen |= {(module, names[0])}
        tree = self._tree(module)
        assert tree is not None
        for node in reversed([*_statements(tree.body)]):
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == names[0]:
                        return self._in_other(origin, [alias.name, *names[1:]], seen)
            elif names[0] in _defined(node):
                return self._in_statement(module, node, names[1:])
        if self._tree(f"{module}.{names[0]}") is not None:
            return self._in_module(f"{module}.{names[0]}", names[1:], seen)
        stars = [
            self._origin(module, n)
            for n in _statements(tree.body)
            if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"
        ]
        stars += ["torch._C._VariableFunctions", "torch._C"] if module == "torch" else []
        for origin in stars:
            if self._tree(origin) is not None and (found := self._in_module(origin, names, seen)) is not None:
                return found
        return None

    def _in_other(self, module: str, names: Sequence[str], seen: frozenset[tuple[str, str]]) -> str | None:
        if module.split(".")[0] not in PACKAGES or self._tree(module) is None:
            return UNKNOWN  # of another library, or written in another language
        return self._in_module(module, names, seen)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = module.replace(".", "/")
        is_package = self._read(f"{path}/__init__.py") is not None or self._read(f"{path}/__init__.pyi") is not None
        parents = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def _in_statement(self, module: str, node: ast.stmt, names: Sequence[str]) -> str | None:
        if isinstance(node, ast.FunctionDef):
            return UNKNOWN if names or _is_overload(node) else parameters_of(node)
        if isinstance(node, ast.ClassDef):
            return self._in_class(module, node, names)
        return UNKNOWN

    def _in_class(self, module: str, node: ast.ClassDef, names: Sequence[str]) -> str | None:
        if not names:
            return self._constructor(module, node)
        for _owner, holder in self._bases(module, node):
            if holder is None:
                return UNKNOWN  # a base that is in neither library may have it
            for statement in _statements(holder.body):
                if names[0] in _defined(statement):
                    if not isinstance(statement, ast.FunctionDef) or decorators(statement) & {"property", "overload"}:
                        return UNKNOWN
                    return parameters_of(statement, skip=skipped(statement))
            if names[0] in _instance_attributes(holder):
                return UNKNOWN
            if holder is node and any("__getattr__" in _defined(each) for each in node.body):
                return UNKNOWN
        return UNKNOWN if names[0] == "__init__" else None

    def _constructor(self, module: str, node: ast.ClassDef) -> str:
        fields: list[str] = []
        for _owner, holder in self._bases(module, node):
            if holder is None:
                return UNKNOWN
            for statement in holder.body:
                if isinstance(statement, ast.FunctionDef) and statement.name in ("__init__", "__new__"):
                    return UNKNOWN if _is_overload(statement) else parameters_of(statement, skip=1)
            if "dataclass" in decorators(holder):
                fields += [
                    f"{name}=" for each in holder.body if isinstance(each, ast.AnnAssign) for name in _defined(each)
                ]
        return f"({', '.join(dict.fromkeys(fields))})" if fields else UNKNOWN

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef | None]]:
        """The class and its bases, nearest first; None for one that is not in these sources."""
        yield module, node
        for base in node.bases:
            name = ast.unparse(base)
            if name in ("object", "ABC", "Protocol") or name.startswith(("Generic", "Protocol[")):
                continue
            found = self._class(module, name.split("."), frozenset())
            if found is None:
                yield name, None
            else:
                yield from self._bases(*found)

    def _class(
        self, module: str, names: Sequence[str], seen: frozenset[tuple[str, str]]
    ) -> tuple[str, ast.ClassDef] | None:
        tree = self._tree(module) if module.split(".")[0] in PACKAGES else None
        if tree is None or (module, names[0]) in seen:
            return None
        seen |= {(module, names[0])}
        for node in reversed([*_statements(tree.body)]):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == names[0]:
                        origin = self._origin(module, node)
                        return self._class(origin, [alias.name, *names[1:]], seen)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname == names[0] and len(names) > 1:
                        return self._class(alias.name, names[1:], seen)
                    if alias.name.split(".")[0] == names[0]:
                        return self._class(".".join(names[:-1]), names[-1:], seen)
            elif isinstance(node, ast.ClassDef) and node.name == names[0]:
                return module, node
        if self._tree(f"{module}.{names[0]}") is not None and len(names) > 1:
            return self._class(f"{module}.{names[0]}", names[1:], seen)
        return None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, with those inside of conditions and `try`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                for inner in getattr(node, part, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _is_overload(node: ast.FunctionDef) -> bool:
    return "overload" in decorators(node)


@cache
def _instance_attributes(node: ast.ClassDef) -> frozenset[str]:
    return frozenset(
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    )
