"""Makes the agents of a run agree on the run's description and its run directory, before any worker starts.

The first agent writes the description to etcd; every other agent compares its own. Until then the first agent holds an
exclusive lock on the run directory: it refuses another run's directory, or, with `--resume`, discards what follows the
newest checkpoint. Afterwards all agents share the lock, so that no other run can use the directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
import uuid
from pathlib import Path

import msgspec

from recycle.errors import JobError
from recycle.exec.checkpoint.resume import holds_steps
from recycle.exec.election import Election
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.run_directory import RunDirectory, has_ended, identity_of, lock_directory
from recycle.exec.protocol import RunInfo
from recycle.job.sections import MembershipSection
from recycle.plans import schedule_hash


def open_agreed_directory(
    request: RunRequest, election: Election, *, node: int, run: str, path: Path, resume: bool
) -> RunDirectory:
    """Open the run directory after agreeing on the run with the other agents.

    Raises JobError if this agent's run differs from the other agents' run, or the directory cannot be used.
    """
    own = RunInfo(
        identity=uuid.uuid4().hex,
        job=hashlib.sha256(request.job.to_toml().encode()).hexdigest(),
        steps=request.steps,
        faults=[str(fault) for fault in request.faults],
        started=time.time(),
        resume=resume,
        transport=request.findings.transport,
        schedule="" if request.schedule is None else schedule_hash(request.schedule),
        script_restarts=request.script_restarts if request.command else None,
    )
    has_outcome = resume and election.outcome() is not None
    if (info := election.run()) is not None and not has_outcome:
        _require_same(own, info, election, node, run)
    lock, is_alone, info = _lock(path, request.job.membership, election)
    try:
        if has_outcome and is_alone:  # its last leader died before it erased the run
            election.forget_ended()
            info = election.run()
        if info is not None:
            _require_same(own, info, election, node, run)
            if is_alone and identity_of(path) != info.identity:
                raise JobError(
                    f"{path}: the agents of run {run!r} do not use this directory; give all the same --run, on a file"
                    " system that all nodes share, or give another --id if the directory was removed"
                )
            directory = RunDirectory(path, request.job, shared=info, lock=lock)
        else:
            if has_ended(path, request.job, request.steps):
                raise JobError(
                    f"{path}: its run has ended after step {request.steps - 1}; choose another --run directory"
                )
            if not resume and holds_steps(path):
                raise JobError(
                    f"{path}: holds another run, which etcd does not have; start all agents with --resume to"
                    " continue it, or choose another --run directory"
                )
            before = identity_of(path)
            earlier = request.earlier_part(path) if resume else None
            if earlier is not None:
                own = msgspec.structs.replace(own, started=own.started - earlier.seconds)
            directory = RunDirectory(path, request.job, earlier, own, lock)
            if (info := election.agree(own)) != own:
                if info.identity != before:
                    raise JobError(
                        f"node {node}: agents of run {run!r} use different --run directories; give all the same"
                    )
                _require_same(own, info, election, node, run)  # of an agent that died while etcd wrote its description
                directory.adopt(info)
    except BaseException:
        os.close(lock)
        raise
    fcntl.flock(lock, fcntl.LOCK_SH)
    return directory


def _require_same(own: RunInfo, info: RunInfo, election: Election, node: int, run: str) -> None:
    for difference, own_value, agreed in (
        ("another job file", own.job, info.job),
        ("another number of steps", own.steps, info.steps),
        ("other faults", own.faults, info.faults),
        ("another --schedule", own.schedule, info.schedule),
        ("another number of --restarts, or recycle's own trainer", own.script_restarts, info.script_restarts),
    ):
        if own_value != agreed:
            raise JobError(f"node {node}: run {run!r} has {difference}; give another --id")
    if own.transport != info.transport:
        raise JobError(
            f"node {node}: run {run!r} uses the transport {info.transport}, this node selects {own.transport}; check"
            " its GPUs, or state [membership] transport"
        )
    if own.resume != info.resume and election.register()[0] is None:  # else the register decides
        first, second = ("with", "without") if info.resume else ("without", "with")
        raise JobError(
            f"node {node}: run {run!r} was started {first} --resume, this agent {second} it; start all agents of a run"
            " alike, or give all another --id"
        )


def _lock(path: Path, limits: MembershipSection, election: Election) -> tuple[int, bool, RunInfo | None]:
    """Return a lock, whether no other agent has one, and the run's description in etcd, if any."""
    began, is_told = time.monotonic(), False  # the first agent reads a whole checkpoint; those of an ended run end soon
    try:
        path.mkdir(parents=True, exist_ok=True)
        while True:
            for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                if (lock := lock_directory(path, kind)) is not None:
                    if (info := election.run()) is not None or kind == fcntl.LOCK_EX:
                        return lock, kind == fcntl.LOCK_EX, info
                    os.close(lock)
                    if time.monotonic() - began > limits.store_timeout:
                        raise JobError(f"{path}: is used by agents of another run; choose another --run directory")
            if time.monotonic() - began > limits.start_deadline:
                raise JobError(f"{path}: another process has locked this run directory; choose another --run directory")
            if not is_told and time.monotonic() - began > 1.0:
                is_told = True
                print(f"{path}: waiting for other agents that hold it", file=sys.stderr, flush=True)
            time.sleep(0.1)
    except OSError as error:
        raise JobError(f"{path}: cannot be written ({error.strerror})") from None
