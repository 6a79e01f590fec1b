"""Checks a checker of pipeline schedules: python -m conformance.run [MODULE:FUNCTION] [FILE...]

The function takes a case and returns {"findings": [[rule, worker, position, instruction], ...]}, or {"makespan": ...,
"period": ...} of a valid schedule. Without one, the interpreter of this folder is checked. README.md describes cases.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from math import isclose
from pathlib import Path
from typing import Any, NoReturn

Case = dict[str, Any]
FOLDER = Path(__file__).parent
DEFAULTS: Case = {
    "placement": {}, "failed": [], "optimizer": "staggered", "buckets": 1, "forward_only": False, "implied": False,
    "channels": None, "times": {"F": 1, "I": 1, "W": 1}, "limits": None, "byte_limit": None,
}  # fmt: skip
"""The keys that a case may leave out."""


def refuse(what: str) -> NoReturn:
    """Print an error, and exit with status 2."""
    print(f"error: {what}", file=sys.stderr)
    sys.exit(2)


def read_cases(files: Iterable[Path]) -> Iterator[Case]:
    """The cases of files, with the defaults of keys that they leave out; exits with status 2 if a file has others."""
    for file in files:
        try:
            cases = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            refuse(f"{file}: {error}")
        needed = {"name", "shape", "programs", "expect"}
        for number, case in enumerate(cases if isinstance(cases, list) else [cases]):
            if not isinstance(case, dict) or needed - case.keys():
                refuse(f"{file}: case {number} needs the keys {', '.join(sorted(needed))}; see conformance/README.md")
            yield {**DEFAULTS, **case, "file": file.stem}


def agree(expected: Any, answer: Any) -> bool:
    """Whether an answer is the expected one: findings in any order, times within a relative error of 1e-9."""
    if isinstance(expected, dict):
        return isinstance(answer, dict) and all(agree(value, answer.get(key)) for key, value in expected.items())
    if isinstance(expected, list):
        return isinstance(answer, list) and sorted(map(str, expected)) == sorted(map(str, answer))
    return isinstance(answer, int | float) and isclose(expected, answer, rel_tol=1e-9, abs_tol=1e-9)


def differences(check: Callable[[Case], Any], files: Iterable[Path]) -> Iterator[str]:
    """A line for each case on which a checker gives another verdict, place or time, or raises an exception."""
    for case in read_cases(files):
        expected = case.pop("expect")
        try:
            answer = check(case)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        if not agree(expected, answer):
            yield f"{case['file']}: {case['name']}: expected {expected}, got {answer}"


def main(arguments: list[str]) -> int:
    """Print the cases that differ; the exit status is 1 if there are any."""
    named = [argument for argument in arguments if ":" in argument] or ["conformance.interpreter:check"]
    module, _, function = named[0].partition(":")
    files = [Path(argument) for argument in arguments if ":" not in argument] or sorted(FOLDER.glob("cases/*.json"))
    try:
        check = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        refuse(f"{named[0]}: {error}")
    lines = list(differences(check, files))
    print(*lines, f"{len(list(read_cases(files)))} cases, {len(lines)} differ", sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
