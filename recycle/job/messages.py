"""msgspec's words about a job file, as the section and key of the file, with what the key takes."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

import msgspec

from recycle.job.sections import Sections


def place(message: str, job: type[Sections]) -> str:
    """msgspec's "... - at `$.shape.ranks`" as "[shape] ranks: ...", with the words that the key takes, if it does."""
    match = re.fullmatch(r"(.*) - at `\$\.?([^`]*)`", message, flags=re.DOTALL)
    if match is None:
        return _about_keys(message, job, "") or message
    section, _, key = match[2].partition(".")
    where = f"[{section}]" + (f" {key}" if key else "") if section else "top level"
    if not key and (said := _about_keys(match[1], job, section)) is not None:
        return said
    return f"{where}: {match[1][0].lower()}{match[1][1:]}{_remedy(job, section, key)}"


def _about_keys(message: str, job: type[Sections], section: str) -> str | None:
    """What is said of a key that is missing or unknown, with the remedy; None when msgspec's words are not of keys."""
    match = re.fullmatch(r"Object (missing required|contains unknown) field `([^`]*)`", message)
    if match is None:
        return None
    key, known = match[2], _keys(job, section)
    named = f"[{section}] {key}" if section else f"[{key}]"
    if match[1] == "missing required":
        example = "; write for example pipelines = 3, ranks = 4, micro_batches = 6 below [shape]"
        return f"{named}: is missing" + (example if "shape" in (key, section) else "")
    close = difflib.get_close_matches(key, known, 1)
    what = "key" if section else "section"
    hint = f'did you mean "{close[0]}"?' if close else f"known are {', '.join(known)}"
    return f"{named}: there is no such {what}; {hint}"


def _keys(job: type[Sections], section: str) -> list[str]:
    """The keys of a section of the job file; its sections for ""."""
    found: Any = msgspec.inspect.type_info(job)
    if section:
        found = next(each.type for each in found.fields if each.encode_name == section)
    return [each.encode_name for each in getattr(found, "fields", ())]


def _remedy(job: type[Sections], section: str, key: str) -> str:
    """The words that a key takes, and whether a number does as well: "; write "all" or "off", or a number"."""
    found: Any = msgspec.inspect.type_info(job)
    for name in (section, key):
        fields = {each.encode_name: each.type for each in getattr(found, "fields", ())}
        found = fields.get(name)
    types = getattr(found, "types", (found,))
    words = [json.dumps(word) for kind in types for word in getattr(kind, "values", ())]
    if not words:
        return ""
    numbers = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
    return f"; write {' or '.join(words)}" + (", or a number" if any(isinstance(k, numbers) for k in types) else "")
