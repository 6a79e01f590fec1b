"""How others reach a run that goes on: `store` in its run directory names the store that its membership is on.

The launcher has the directory locked as long as it runs, so a file that a killed one left is told from one that counts.
Of a run with agents the store itself knows the identity that the directory holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from recycle.errors import JobError, RunError
from recycle.exec.membership.schema import CoordinatorKey, RunKey
from recycle.exec.membership.store import Store
from recycle.exec.membership.stores import open_store
from recycle.files import read_whole, write_whole
from recycle.job import Job

CONTACT = "store"
LOCK = ".lock"
"""Files of a run directory."""


class Contact(msgspec.Struct, frozen=True):
    """Where the store is, and the name of the run in it."""

    url: str
    run: str


def leave_contact(directory: Path, url: str, run: str) -> None:
    """Say in the run directory where the store is."""
    write_whole(directory / CONTACT, msgspec.json.encode(Contact(url, run)).decode() + "\n")


def remove_contact(directory: Path) -> None:
    """The run has ended."""
    with contextlib.suppress(OSError):
        (directory / CONTACT).unlink()


def resume_command(directory: Path) -> str:
    """The command that resumes the run: `recycle agent` if agents trained it, else `recycle train`."""
    return f"recycle {'agent' if (directory / 'run').is_file() else 'train'} JOB --resume --run {directory}"


def reach(directory: Path) -> tuple[Job, Store]:
    """The job and the store of the run in a directory.

    Raises:
        JobError: there is no run, or it has ended.
        RunError: the store does not answer.
    """
    if not (directory / "job.toml").is_file():
        raise JobError(f"{directory}: there is no run here; give the directory that was given to --run")
    if not (directory / CONTACT).is_file() or not is_going_on(directory):
        raise JobError(f"{directory}: this run has ended; {resume_command(directory)} goes on with it")
    try:
        contact = msgspec.json.decode(read_whole(directory / CONTACT, JobError), type=Contact)
    except msgspec.MsgspecError as error:
        raise JobError(f"{directory / CONTACT}: {error}") from None
    job = Job.of_run(directory)
    store = open_store(contact.url, contact.run, job.membership)
    with_agents = directory / "run"
    if with_agents.is_file():
        info = store.read(RunKey())
        if info is None or info.identity != read_whole(with_agents, JobError).decode().strip():
            raise JobError(f"{directory}: this run has ended; its store no longer has it")
        if store.read(CoordinatorKey()) is None:
            raise RunError(
                f"{directory}: no agent coordinates this run now; start its agents, or try again in a moment"
            )
    return job, store


def is_going_on(directory: Path) -> bool:
    """Whether a launcher has the directory; always true of a run with agents, which do not lock it."""
    if (directory / "run").is_file():
        return (directory / CONTACT).is_file()
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:  # another user's; its store refuses, and says so
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def require_unused(directory: Path) -> None:
    """Raise JobError when another launcher has the directory."""
    if not (directory / "run").is_file() and is_going_on(directory):
        raise in_use(directory)


def in_use(directory: Path) -> JobError:
    """The error of a directory that another launcher or an agent has locked."""
    return JobError(f"{directory}: is in use by another `recycle train` or by agents; choose another --run directory")
