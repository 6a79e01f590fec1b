"""Writes docs/reference/codes.md: exit codes, codes of messages and of findings.

python -m recycle.ir.rules.reference docs/reference/codes.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from recycle.errors import CODES
from recycle.files import write_whole
from recycle.ir.rules import all_rules

_INTRODUCTION = """# Codes

Exit codes of the commands, codes of their messages, and codes of the findings of `recycle check`.
This page is written by `python -m recycle.ir.rules.reference docs/reference/codes.md`.

## Exit codes

| code | meaning |
|---|---|
| 0 | the command succeeded; `recycle check` found no errors |
| 1 | `recycle check` found errors, with `--strict` also warnings; or a run could not start or continue |
| 2 | bad arguments, an unreadable file, or a refused job or schedule. A line on standard error names the cause |
| 75 | `recycle agent` with your own script: a stage has lost all its hosts; start again, from the newest checkpoint |
| 130 | interrupted by Ctrl-C |
| 143 | `recycle train` or `recycle agent` ended after SIGTERM or SIGHUP, with a checkpoint to resume from |

## Messages

A command that refuses its input, or a run that ends, prints one line: what is wrong, the place, what to do, and in
brackets the code of the kind of error. In Python the code is the attribute `code` of the exception; all exceptions
derive from `recycle.RecycleError`. Codes do not change between versions, texts do. What happens in a run has
[kinds of events](events.md) in place of codes.

| code | raised as | meaning and remedy |
|---|---|---|
{messages}

## Findings

`recycle check` reports each violation of a rule as a finding: the code of the rule, its severity, the worker, the
position in the worker's program from 0, the instruction, a message and a hint. Errors make a schedule invalid. Of
each rule the first 1,000 findings are listed and the others counted. `recycle check --explain CODE` prints the text
below.

| code | severity | meaning and remedy |
|---|---|---|
"""


_RAISED_AS = {
    "file-error": "`OSError`",
    "job-error": "`JobError`",
    "schedule-error": "`ScheduleError`",
    "plan-error": "`PlanError`",
    "trace-error": "`TraceError`",
    "run-error": "`RunError`",
    "stage-lost": "`RunError`",
    "states-differ": "`RunError`",
    "role-lost": "`RunError`",
    "lease-ended": "`RunError`",
    "schedule-warning": "`ScheduleWarning`",
    "version-warning": "`VersionWarning`",
    "deprecated": "`FutureWarning`",
}
"""Code -> the public class of its exceptions, where it is not `RecycleError`."""


def reference_page() -> str:
    """Return the text of docs/reference/codes.md."""
    messages = [f"| `{code}` | {_RAISED_AS.get(code, '`RecycleError`')} | {text} |" for code, text in CODES.items()]
    rows = [f"| `{rule.code}` | {rule.severity} | {' '.join(rule.documentation.split())} |" for rule in all_rules()]
    return _INTRODUCTION.replace("{messages}", "\n".join(messages)) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    write_whole(Path(sys.argv[1]), reference_page())
