"""Runs a user's script in a worker's process, with its place in the job in the environment.

A script or module for this Python runs in the forked process, which has imported torch and megatron-core already. Any
other command replaces the process.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from recycle.exec.gpus import own_index
from recycle.exec.worker.specification import SESSION, WorkerSpecification
from recycle.job import Job
from recycle.job.shape import Worker


def run_command(text: str) -> None:
    """Run the command of a worker's JSON specification."""
    specification = msgspec.json.decode(text, type=WorkerSpecification)
    run, worker = specification.run, Worker.parse(specification.worker)
    job, place = Job.from_toml(run.job), specification.local_index
    shape, size = job.shape, job.grid.tensor_parallel
    if run.gpus:
        from recycle.exec.transport.plugin import transport_named  # has torch

        place = own_index(run.gpus, transport_named(run.transport).gpus(), place)
    os.environ |= {
        SESSION: text,
        "RANK": str((worker.rank * shape.pipelines + worker.pipeline) * size + specification.tensor_rank),
        "WORLD_SIZE": str(shape.worker_count * size),
        "LOCAL_RANK": str(place),
        **run.environment,
    }
    os.environ.pop("PYTHONWARNINGS", None)  # of the fork server
    python, *arguments = run.command
    if is_this_python(python) and arguments and (arguments[0] == "-m" or not arguments[0].startswith("-")):
        run_to_the_end(arguments)
    try:
        os.execvp(python, run.command)
    except OSError as error:
        sys.exit(f"{python}: cannot be run ({error.strerror})")


def is_this_python(command: str) -> bool:
    """Whether a command is this interpreter in this environment; `python` and `python3` are the same."""
    found, own = Path(shutil.which(command) or ""), Path(sys.executable)
    return found.absolute().parent == own.absolute().parent and found.resolve() == own.resolve()


def run_to_the_end(arguments: Sequence[str]) -> NoReturn:
    """Run a script, then end as Python does: wait for its threads, and call what it has registered with `atexit`."""
    code = 0
    try:
        run_in_this_process(arguments)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if code and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
    except BaseException as error:
        own, at = (__file__, runpy.__file__, "<frozen runpy>"), error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename in own:
            at = at.tb_next
        traceback.print_exception(type(error), error, at)
        code, sys.last_value = 1, error
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.exit(code)


def run_in_this_process(arguments: Sequence[str]) -> None:
    """Do what Python does with a script, or `-m` and a module, and their arguments."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
