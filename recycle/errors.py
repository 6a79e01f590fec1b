"""The one exception family. A message says what, where (file, worker, position, key) and what to do.

The command line prints the message on one line and exits with 2; a traceback is a bug of ours.
"""


class RecycleError(Exception):
    """Base of every error that recycle raises on purpose."""


class JobError(RecycleError):
    """A job file, a shape or a profile that cannot be used; names the file and the key."""


class ScheduleError(RecycleError):
    """A schedule that cannot be parsed, read or run; names the file, worker and position."""


class PlanError(RecycleError):
    """No plan exists or can be made for the live set asked for."""


class RunError(RecycleError):
    """A training run that cannot start or cannot go on; names the worker or the stage."""
