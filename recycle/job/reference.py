"""Reference of all keys of a job file, from the types and docstrings in `recycle.job.sections`.

`python -m recycle.job.reference docs/reference/job.md` writes the page; `recycle train JOB --explain` uses it too.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from recycle.files import write_whole
from recycle.job.job import Job, toml_value
from recycle.job.sections import Sections

_DESCRIBED = re.compile(r"^    (\w+)(?: \(([^)]*)\))?: ((?:.|\n {8})*)", flags=re.MULTILINE)
_LARGEST = 2**31 - 1
"""Bound of whole numbers that is not printed."""
_INTRODUCTION = """# The job file

A job is one TOML file. `[shape]` is required; every other key has a default. Paths are relative to the folder of the
file. `recycle train JOB --explain` prints all keys with their values in a job.
This page is written by `python -m recycle.job.reference docs/reference/job.md`, from the types in
`recycle/job/sections.py`.
"""


@dataclass(frozen=True)
class Key:
    """A key of a job file; `default` is TOML, "required" or "not set"."""

    name: str
    meaning: str
    unit: str
    values: str
    default: str


def section_about(section: Any) -> str:
    """Return the first line of a section's docstring without its name."""
    return inspect.cleandoc(section.__doc__).splitlines()[0].split(": ", 1)[1]


def described_names(docstring: str) -> dict[str, tuple[str, str]]:
    """Return name -> (text in parentheses, description) of the lines `name (text): description` of a docstring."""
    lines = _DESCRIBED.findall(inspect.cleandoc(docstring))
    return {name: (note, " ".join(text.split())) for name, note, text in lines}


def section_keys(section: Any) -> list[Key]:
    """Return the keys of a section, in file order. Raises KeyError for a key that the docstring does not describe."""
    meanings, keys = described_names(section.__doc__), []
    for field in msgspec.structs.fields(section):
        unit, meaning = meanings[field.name]
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        text = "required" if default is msgspec.NODEFAULT else "not set" if default is None else toml_value(default)
        values = _values(types.type_info(field.type))
        keys.append(Key(field.encode_name, meaning[0].upper() + meaning[1:], unit, values, text))
    return keys


def explain_job(job: Job) -> str:
    """Return every key with its meaning and the job's value, as TOML; default values are marked."""
    lines: list[str] = []
    for section in msgspec.structs.fields(Sections):
        values = getattr(job, section.name)
        lines.append(f"[{section.encode_name}]  # {section_about(section.type)}")
        for field, key in zip(msgspec.structs.fields(section.type), section_keys(section.type), strict=True):
            value = msgspec.to_builtins(getattr(values, field.name))
            text = f"# {key.name}" if value is None else f"{key.name} = {toml_value(value)}"
            unit = f"; {key.unit}" if key.unit else ""
            about = f"{key.meaning} Takes: {key.values}{unit}."
            lines += textwrap.wrap(about, 110, initial_indent="# ", subsequent_indent="#   ", break_long_words=False)
            is_default = key.default == ("not set" if value is None else toml_value(value))
            lines.append(f"{text:<36}  # default" if is_default else text)
        lines.append("")
    return "\n".join(lines)


def reference_page() -> str:
    lines = [_INTRODUCTION]
    for section in msgspec.structs.fields(Sections):
        about = section_about(section.type)
        lines += [f"## [{section.encode_name}]", "", f"{about[0].upper()}{about[1:]}", ""]
        lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
        for key in section_keys(section.type):
            default = key.default if key.default in ("required", "not set") else f"`{key.default}`"
            values = f"{key.values} ({key.unit})" if key.unit else key.values
            cells = (f"`{key.name}`", values, default, key.meaning)
            lines.append("| " + " | ".join(_link_pages(cell.replace("|", "\\|")) for cell in cells) + " |")
        lines.append("")
    return "\n".join(_link_pages(line) if line.endswith(").") else line for line in lines)


def _link_pages(text: str) -> str:
    return re.sub(r"docs/([a-z]+/)([a-z0-9-]+\.md)(?!\])", r"[\2](../\1\2)", text)


def _values(kind: Any) -> str:
    match kind:
        case types.Metadata():
            return _values(kind.type)
        case types.UnionType():
            return " or ".join(_values(each) for each in kind.types if not isinstance(each, types.NoneType))
        case types.LiteralType():
            return " or ".join(json.dumps(value) for value in kind.values)
        case types.BoolType():
            return "true or false"
        case types.IntType() | types.FloatType():
            word = "whole number" if isinstance(kind, types.IntType) else "number"
            return " ".join(filter(None, (word, _bounds(kind))))
        case types.StrType():
            return "text"
        case types.ListType():
            return f"list (each: {_values(kind.item_type)})"
        case types.TupleType():
            return f"list of {len(kind.item_types)} (each: {_values(kind.item_types[0])})"
        case types.DictType() | types.StructType():
            return "table"
    raise TypeError(f"a key of a job file has a type that is not described here: {kind}")


def _bounds(kind: Any) -> str:
    bounds = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
    return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None and bound != _LARGEST)


if __name__ == "__main__":
    write_whole(Path(sys.argv[1]), reference_page())
