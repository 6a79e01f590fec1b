"""The exception family of recycle. A message says what, where (file, worker, position, key) and what to do.

The command line prints the message on one line and exits with 2; a traceback means a bug. Messages may quote hostile
files, so they are reduced to one printable line of bounded length.
"""

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 4000
"""Characters of a message; the middle of a longer one is omitted."""


class RecycleError(Exception):
    """Base of every error that recycle raises on purpose."""

    def __init__(self, message: object = "") -> None:
        super().__init__(_one_line(str(message)))


class JobError(RecycleError):
    """A job file, a shape or a profile that cannot be used; names the file and the key."""


class ScheduleError(RecycleError):
    """A schedule that cannot be parsed, read or run; names the file, worker and position."""


class ScheduleWarning(UserWarning):
    """A schedule whose figures do not describe a whole iteration."""


class VersionWarning(UserWarning):
    """An installed version of a dependency that was not tested."""


class PlanError(RecycleError):
    """The requested live set has no plan, and none can be made."""


class TraceError(RecycleError):
    """A failure trace that cannot be used; names the file and the line."""


class RunError(RecycleError):
    """A training run that cannot start or cannot continue; names the worker or the stage."""


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
