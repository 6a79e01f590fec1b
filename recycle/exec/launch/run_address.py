"""Connects to a running run: `store` in the run directory names the leader's socket, or the etcd of the run's agents.

The launcher locks the directory while it runs, so a leftover `store` of a killed launcher is recognized.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import JobError, RunError
from recycle.exec.election import Election
from recycle.exec.links import Link, LinkClosed, connect_locally, connect_to
from recycle.exec.protocol import IS_DEAD, Drain, Drained, Refused
from recycle.files import read_whole, write_if_changed
from recycle.job import Job
from recycle.runs.logs import ADDRESS, EVENTS, LineTail

LOCK = ".lock"
KEY = "key"
"""Files of a run directory."""
LOCAL = "local"
"""URL scheme of a leader's socket on this machine."""
_KEY_BYTES = 32
KEY_SECONDS = 5.0
"""Seconds to wait for a key that another agent is writing."""


class RunAddress(msgspec.Struct, frozen=True):
    """URL of the leader's socket on this machine, or of the agents' etcd with the run's name."""

    url: str
    run: str


class NoLeader(RunError):
    """No agent leads the run now."""


def write_address(directory: Path, url: str, run: str) -> None:
    write_if_changed(directory / ADDRESS, msgspec.json.encode(RunAddress(url, run)).decode() + "\n")


def remove_address(directory: Path) -> None:
    with contextlib.suppress(OSError):
        (directory / ADDRESS).unlink()


def run_key(directory: Path) -> bytes:
    """Return the key that authenticates a run's agents, 32 bytes in a private file. Raises JobError."""
    path, deadline = directory / KEY, time.monotonic() + KEY_SECONDS
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
            finally:
                os.close(descriptor)
        while path.lstat().st_size < _KEY_BYTES and time.monotonic() < deadline:
            time.sleep(0.05)  # another agent is about to write it
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            key = os.read(descriptor, _KEY_BYTES + 1)
            is_private = os.fstat(descriptor).st_uid == os.getuid() and not os.fstat(descriptor).st_mode & 0o077
        finally:
            os.close(descriptor)
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from None
    if len(key) != _KEY_BYTES or not is_private:
        raise JobError(f"{path}: must hold {_KEY_BYTES} bytes that only this user can read; remove it")
    return key


def _has_agents(directory: Path) -> bool:
    return (directory / "run").is_file()


def resume_command(directory: Path, is_script: bool = False) -> str:
    """Return the command that resumes the run: `recycle agent` if agents or a script trained it."""
    command = "agent" if is_script or _has_agents(directory) else "train"
    return f"recycle {command} JOB --resume --run {directory}{' -- COMMAND' if is_script else ''}"


def connect_to_run(directory: Path) -> Link:
    """Connect to the leader of the run in a directory.

    Raises:
        JobError: the directory has no run, or the run has ended.
        NoLeader: no agent leads the run now, or its leader does not answer.
        RunError: the launcher or etcd does not answer.
    """
    if not (directory / "job.toml").is_file():
        raise JobError(f"{directory}: is not a run directory; give the directory that was given to --run")
    if not (directory / ADDRESS).is_file() or not is_running_in(directory):
        raise _ended_error(directory)
    try:
        address = msgspec.json.decode(read_whole(directory / ADDRESS, JobError), type=RunAddress)
    except msgspec.MsgspecError as error:
        raise JobError(f"{directory / ADDRESS}: {error}") from None
    answers: Any = Drained | Refused
    scheme, _, name = address.url.partition("://")
    if scheme == LOCAL:
        return connect_locally(name, answers, "the run's leader")
    job = Job.of_run(directory)
    membership = msgspec.structs.replace(job.membership, store=address.url)
    election = Election.connect(address.run, membership)
    info = election.run()
    if info is None or info.identity != read_whole(directory / "run", JobError).decode().strip():
        raise JobError(f"{directory}: this run has ended; its etcd no longer has it")
    leader = election.leader()
    if leader is None:
        raise NoLeader("none has the role")
    try:
        return connect_to(leader.host, leader.port, run_key(directory), answers)
    except (OSError, LinkClosed) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or "it closed the connection"
        raise NoLeader(f"the one at {leader.host}:{leader.port} does not answer: {reason}") from None


def _ended_error(directory: Path) -> JobError:
    return JobError(f"{directory}: this run has ended; continue it with: {resume_command(directory)}")


def is_running_in(directory: Path) -> bool:
    """Return whether a launcher has locked the directory; agents do not lock it; their address file counts."""
    if _has_agents(directory):
        return (directory / ADDRESS).is_file()
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:  # another user's; its launcher refuses with a message
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
    """Raise JobError if another launcher has locked the directory."""
    if not _has_agents(directory) and is_running_in(directory):
        raise in_use_error(directory)


def in_use_error(directory: Path) -> JobError:
    """Return the error for a directory that another launcher or an agent has locked."""
    return JobError(f"{directory}: is in use by another `recycle train` or by agents; choose another --run directory")


POLL_SECONDS = 0.05


def drain(directory: Path, target: str, seconds: float | None, report: Callable[[str], None]) -> None:
    """Drain a worker, or all workers of a node, and return when their processes have ended.

    While no agent leads the run, wait for the next leader.

    Args:
        directory: run directory.
        target: `k.r`, or the number of a node.
        seconds: time until a remaining worker is killed; None for no deadline.
        report: receives a line for each event.

    Raises:
        JobError: the run or worker does not exist, the worker is dead already, or the worker must stay.
        RunError: a worker died before it could leave, or no agent leads the run any more.
    """
    link: Link | None = None
    with contextlib.suppress(NoLeader):  # asked below, like the next leader
        link = connect_to_run(directory)
    events = LineTail(directory / EVENTS)
    for _ in events.objects():
        pass  # only later events count
    if link is not None:
        with contextlib.suppress(OSError):
            link.send(Drain(target, seconds))
    waits, refused, died = set[str](), list[str](), list[str]()
    is_told, answered = False, time.monotonic()
    while waits or not is_told:
        is_running = is_running_in(directory)
        try:
            answers = _answers(link)
        except LinkClosed:
            link, answers = None, []
        if link is not None:
            answered = time.monotonic()
        elif is_running:
            try:
                link = connect_to_run(directory)
                for wanted in waits if is_told else [target]:
                    link.send(Drain(wanted, seconds))
            except (RunError, JobError, OSError) as error:
                _require_leader_since(answered, directory, error)
        for _, event in events.objects() if is_told else ():
            name = event.get("worker")
            if name not in waits:
                continue
            if event["kind"] == "drained":
                report(f"worker {name} has left after {event['seconds']:.2f} s; step {event['step']} starts without it")
                waits.discard(name)
            elif event["kind"] == "detected":
                died.append(f"worker {name} has not left but died: {event['cause']}")
                waits.discard(name)
        for answer in answers:
            if isinstance(answer, Drained) and is_told:
                continue  # repeated after a change of leader
            if isinstance(answer, Drained):
                waits, is_told = set(answer.workers), True
                report(f"asked {' '.join(answer.workers)} to leave; waiting for the end of an iteration")
            elif not is_told:
                raise JobError(f"worker {answer.worker}: {answer.why}" if answer.worker else answer.why)
            elif answer.worker in waits:
                waits.discard(answer.worker)
                if answer.why == IS_DEAD:  # it has left, and a leader ended before it wrote the event
                    report(f"worker {answer.worker} has left")
                else:
                    refused.append(f"worker {answer.worker} stays: {answer.why}")
        if not is_running and not is_told:
            raise _ended_error(directory)
        if not is_running:
            report(f"the run has ended, and {' '.join(sorted(waits))} with it") if waits else None
            break
    if refused:
        raise JobError("; ".join(refused))
    if died:
        raise RunError("; ".join(died))


def _require_leader_since(answered: float, directory: Path, error: Exception) -> None:
    """Raise RunError if another agent had time to lead. Agents that were killed leave their address."""
    limits = Job.of_run(directory).membership
    longest = limits.lease + limits.store_timeout
    if _has_agents(directory) and time.monotonic() - answered > longest:
        remedy = "start its agents, then drain again"
        raise RunError(f"{directory}: no agent has led this run for {longest:g} s ({error}); {remedy}") from None


def _answers(link: Link | None) -> list[Drained | Refused]:
    if link is None:
        time.sleep(POLL_SECONDS)
        return []
    readable, _, _ = select.select([link.socket], [], [], POLL_SECONDS)
    return link.read() if readable else []
