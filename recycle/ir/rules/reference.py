"""Writes docs/reference/codes.md: exit codes, error classes and the codes of findings.

python -m recycle.ir.rules.reference docs/reference/codes.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from recycle.files import write_whole
from recycle.ir.rules import all_rules

_INTRODUCTION = """# Codes

Exit codes of the commands, classes of errors and warnings in Python, and codes of the findings of `recycle check`.
This page is written by `python -m recycle.ir.rules.reference docs/reference/codes.md`.

## Exit codes

| code | meaning |
|---|---|
| 0 | the command succeeded; `recycle check` found no errors |
| 1 | `recycle check` found errors, with `--strict` also warnings; or a run could not start or continue |
| 2 | bad arguments, an unreadable file, or a refused job or schedule. A line on standard error names the cause |
| 75 | reserved for Megatron scripts under a session: a stage has lost all its hosts; load the newest checkpoint |
| 130 | interrupted by Ctrl-C |
| 143 | `recycle train` or `recycle agent` ended after SIGTERM or SIGHUP, with a checkpoint to resume from |

## Errors and warnings in Python

All errors derive from `recycle.RecycleError`. A message names what is wrong, the place, and what to do.

| class | raised for |
|---|---|
| `JobError` | a job file, shape or profile that cannot be used |
| `ScheduleError` | a schedule that cannot be parsed, read or run |
| `PlanError` | live workers for which no plan exists or can be made |
| `TraceError` | a failure trace that cannot be used |
| `RunError` | a run that cannot start or continue |
| `ScheduleWarning` | a schedule that is not a complete iteration, or whose kinds bring no gain |

## Findings

`recycle check` reports each violation of a rule as a finding: the code of the rule, its severity, the worker, the
position in the worker's program from 0, the instruction, a message and a hint. Errors make a schedule invalid. Of
each rule the first 1,000 findings are listed and the others counted. `recycle check --explain CODE` prints the text
below.

| code | severity | meaning and remedy |
|---|---|---|
"""


def reference_page() -> str:
    """Return the text of docs/reference/codes.md."""
    rows = [f"| `{rule.code}` | {rule.severity} | {' '.join(rule.documentation.split())} |" for rule in all_rules()]
    return _INTRODUCTION + "\n".join(rows) + "\n"


if __name__ == "__main__":
    write_whole(Path(sys.argv[1]), reference_page())
