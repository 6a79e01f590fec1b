"""Names of megatron-core and torch that recycle uses, and a table of them by version, made from wheels.

    python -m tests.library_names megatron_core-0.19.2-*.whl torch-2.15.0-*.whl …

reads the sources of these versions (wheels, or folders such as site-packages) and writes `table.json`: each
name in use with its parameters, for the newest version in full and for older ones as far as they differ from the next
newer; null where a version has no such name. Versions that are not given keep what the table says of them. Nothing is
imported: the sources are parsed.

Covered are imported names and their attributes, attributes of variables annotated with an imported class, methods that
classes override, calls of these, and `IN_STRINGS`. Not covered are attributes of other variables, and what torch makes
at run time (`torch.ops`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.library_names.parameters import UNKNOWN, fault_of, fault_of_override
from tests.library_names.sources import Source
from tests.library_names.uses import DYNAMIC, PACKAGES, Uses, source_files, used

TABLE = Path(__file__).with_suffix(".json")
NOT_IN_TABLE = "is not in the table; see tests/library_names/table.py"


def full_table() -> dict[str, dict[str, dict[str, str | None]]]:
    """Distribution -> version, newest first -> name -> parameters (None: no such name)."""
    full: dict[str, dict[str, dict[str, str | None]]] = {}
    for distribution, versions in (json.loads(TABLE.read_text()) if TABLE.exists() else {}).items():
        names: dict[str, str | None] = {}
        full[distribution] = {}
        for version, changes in versions.items():
            names = names | changes
            full[distribution][version] = names
    return full


def described(source: Source, package: str, uses: Uses) -> dict[str, str | None]:
    """What sources say of the names in use of a package."""
    text = " ".join(path.read_text() for path in source_files())
    words = frozenset(re.findall(r"\w+", text))
    names = {*uses.names, *uses.calls, *uses.overrides}
    own = sorted(name for name in names if name.split(".")[0] == package and not name.startswith(DYNAMIC))
    found = {name: _shortened(source.describe(name), words) for name in own}
    # A method that no base in these sources has overrides nothing.
    return {name: value for name, value in found.items() if name in uses.names or value not in (None, UNKNOWN)}


def write_table(paths: Sequence[Path]) -> None:
    """Write the table of the names in use, with what these sources say of their versions."""
    uses, full = used(), full_table()
    torch = Source(installed("torch"))
    for path in paths:
        source = Source(path, torch)
        for package, distribution in PACKAGES.items():
            if distribution in source.versions:
                full.setdefault(distribution, {})[source.versions[distribution]] = described(source, package, uses)
    names = {*uses.names, *uses.calls, *uses.overrides}
    table: dict[str, dict[str, dict[str, str | None]]] = {}
    for distribution, versions in sorted(full.items()):
        newer: dict[str, str | None] = {}
        known = {name for entries in versions.values() for name, value in entries.items() if value is not None}
        kept = sorted(known & names)
        table[distribution] = {}
        for version in sorted(versions, key=lambda text: [int(part) for part in text.split(".")], reverse=True):
            entries = {name: versions[version].get(name) for name in kept}
            table[distribution][version] = {k: v for k, v in entries.items() if k not in newer or newer[k] != v}
            newer = entries
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def installed(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed; its classes are bases of megatron-core's")
    return Path(spec.origin).parents[package.count(".") + 1]


def _shortened(parameters: str | None, words: frozenset[str]) -> str | None:
    """Parameters without those of large configurations that recycle does not name."""
    if parameters is None or parameters.count("=,") < 25:
        return parameters
    return f"({', '.join(word for word in parameters[1:-1].split(', ') if word.rstrip('=') in words)})"


def faults(uses: Uses, table: Mapping[str, Mapping[str, Mapping[str, str | None]]]) -> dict[str, list[str]]:
    """Uses that do not fit all versions: name -> "place: version: what is wrong"."""
    found: dict[str, list[str]] = {}
    for distribution, versions in table.items():
        package = next(package for package, name in PACKAGES.items() if name == distribution)
        for version, names in versions.items():
            where = f"{distribution} {version}"
            for name, places in uses.names.items():
                if name.split(".")[0] == package and not name.startswith(DYNAMIC) and names.get(name) is None:
                    why = "has no such name" if name in names else NOT_IN_TABLE
                    found.setdefault(name, []).append(f"{places[0]}: {where} {why}")
            for name, calls in uses.calls.items():
                for call, place in calls:
                    if names.get(name) and (fault := fault_of(call, names[name] or "")):
                        found.setdefault(name, []).append(f"{place}: {where} {fault}")
            for name, methods in uses.overrides.items():
                if name.endswith(".__init__"):
                    continue  # only the library calls the others
                for parameters, place in methods:
                    if name in names and names[name] is None:
                        found.setdefault(name, []).append(f"{place}: {where} has no such method")
                    elif name in names and (fault := fault_of_override(parameters, names[name] or "")):
                        found.setdefault(name, []).append(f"{place}: the override {fault}, as {where} passes")
    return found
