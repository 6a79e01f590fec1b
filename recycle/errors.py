"""The exception family of recycle. A message says what, where (file, worker, position, key) and what to do.

The command line prints the message and its code on one line and exits with 2, for a `RunError` with 1; a traceback
means a bug. Messages may quote hostile files, so they are reduced to one printable line of bounded length.
"""

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 4000
"""Characters of a message; the middle of a longer one is omitted."""


CODES = {
    "input-error": (
        "An argument, an address or a file of another kind than those below cannot be used. Change it as the message "
        "says."
    ),
    "file-error": (
        "The operating system refused a file or the standard output: no permission, no space, or a name that is not "
        "UTF-8. Mend the cause, or give another path."
    ),
    "job-error": (
        "A job file, a shape, a profile, training data or a model cannot be used. The message names file and key: "
        "change the value there. `recycle train JOB --explain` prints every key with its meaning."
    ),
    "schedule-error": (
        "A schedule cannot be parsed, read or run. The message names file, worker and position. `recycle check FILE` "
        "lists all violated rules."
    ),
    "plan-error": (
        "No plan exists, or none can be made, for the requested live workers. Plan for more failures with `recycle "
        "plan --failures N`, or name other workers."
    ),
    "trace-error": "A failure trace cannot be used. The message names file and line.",
    "checkpoint-error": (
        "A checkpoint is incomplete or corrupt. Resume from an earlier one; `recycle train --resume` finds the newest "
        "that is whole."
    ),
    "run-error": "A training run cannot start or continue. The message names the worker or the stage.",
    "stage-lost": (
        "No live worker holds a stage any more, and the run could not return to a checkpoint by itself. If there is "
        "a complete checkpoint, the message has the command that continues from it."
    ),
    "states-differ": (
        "Workers that must hold equal numbers hold different ones, and repeating did not help. The message names the "
        "difference, and the suspected worker if there is one. Take that machine out, then resume."
    ),
    "transport-error": (
        "A transfer or a sum failed: a peer is gone, or it did not answer in time. In a run this starts a new "
        "generation; the message is printed only if the run cannot continue."
    ),
    "role-lost": "Another agent has become leader, so this one wrote nothing. It is not an error of the run.",
    "lease-ended": "etcd ended the lease of this agent, so it wrote nothing. Check that etcd answers.",
    "schedule-warning": (
        "A schedule is not a complete iteration, or its kinds bring no gain: figures describe only what it holds."
    ),
    "version-warning": "A dependency has a version with which recycle was not tested.",
    "deprecated": "A name or key has a new one, which the message gives. The old one still works.",
}
"""Code of a printed message -> its meaning and remedy; `recycle check --explain CODE` prints them."""


class RecycleError(Exception):
    """Base of every error that recycle raises on purpose.

    Attributes:
        code: stable name of the kind of error, printed after the message; listed in docs/reference/codes.md.
        exit_code: of a command that ends with the error.
    """

    code = "input-error"
    exit_code = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(_one_line(str(message)))


class JobError(RecycleError):
    """A job file, a shape or a profile that cannot be used; names the file and the key."""

    code = "job-error"


class ScheduleError(RecycleError):
    """A schedule that cannot be parsed, read or run; names the file, worker and position."""

    code = "schedule-error"


class ScheduleWarning(UserWarning):
    """A schedule whose figures do not describe a whole iteration."""

    code = "schedule-warning"


class VersionWarning(UserWarning):
    """An installed version of a dependency that was not tested."""

    code = "version-warning"


class PlanError(RecycleError):
    """The requested live set has no plan, and none can be made."""

    code = "plan-error"


class TraceError(RecycleError):
    """A failure trace that cannot be used; names the file and the line."""

    code = "trace-error"


class RunError(RecycleError):
    """A training run that cannot start or cannot continue; names the worker or the stage."""

    code = "run-error"
    exit_code = 1


@contextmanager
def errors_as(refusal: type[RecycleError], where: str = "") -> Iterator[None]:
    """Raise every error of recycle in the body as `refusal`, its message prefixed with `where`."""
    try:
        yield
    except RecycleError as error:
        raise refusal(f"{where}: {error}" if where else error) from None


def first_line(error: BaseException) -> str:
    """Return one line with the reason of another library's error, without quoted tracebacks.

    For an error with several processes' failures (`torch.distributed.checkpoint`), return the first failure's reason.
    """
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        cause = next(iter(failures.values()))
        error = cause[0] if isinstance(cause, tuple) else cause
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _one_line(text: str) -> str:
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
