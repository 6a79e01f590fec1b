"""The `recycle` command: parses arguments, calls the library and prints. `app` maps commands to files.

Exit codes: 0 done; 1 errors found by `check`, or a run that could not continue; 2 bad input; 75 a
user's script has lost a stage; 130 Ctrl-C; 143 SIGTERM or SIGHUP.
Errors are one line on standard error, without a traceback. Characters missing in the terminal's encoding are escaped.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings

from recycle.errors import RecycleError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to standard output; `recycle.files` reports errors of files."""


def main(arguments: list[str] | None = None) -> None:
    # Packages warn about missing optional packages; the warnings would hide recycle's own lines.
    warnings.filterwarnings("ignore", module=r"(.*/)?(megatron|torch)[./]")  # a path where Python compiles the module
    warnings.formatwarning = lambda text, kind, *_, **__: f"recycle: {text} [{getattr(kind, 'code', 'deprecated')}]\n"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            from recycle.cli.app import app

            app(arguments, prog_name="recycle")
        finally:
            sys.stdout.flush()
    except RecycleError as error:
        _end(f"{error} [{error.code}]", error.exit_code)
    except KeyboardInterrupt:  # during imports
        _end("", 130)
    except BrokenPipeError:
        _end("", 1)
    except OSError as error:
        where = error.filename or ("standard output" if error.errno in _FULL else "this machine")
        _end(f"{os.fsdecode(where)}: {error.strerror} [file-error]", 1 if error.filename is None else 2)
    except UnicodeEncodeError as error:  # a file system path that is not UTF-8 was used as text
        _end(f"{ascii(error.object)[:200]} is not UTF-8 text; use another name [file-error]", 2)


def _end(message: str, code: int) -> None:
    if message:
        print(f"recycle: {' '.join(message.split())}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # or Python would write again at exit, and report the error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(code) from None
