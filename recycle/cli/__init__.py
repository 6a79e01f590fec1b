"""The `recycle` command: parse, call, print. One file per command; no logic here.

Exit codes: 0 done; 1 errors found by `check`, or a run that could not go on; 2 bad input; 130 Ctrl-C. An error is one
line on standard error, never a traceback.
"""

from __future__ import annotations

import sys

from recycle.errors import RecycleError, RunError


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    from recycle.cli.app import app

    try:
        app(arguments, prog_name="recycle")
    except RecycleError as error:
        print(f"recycle: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RunError) else 2) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
