"""Ask a run that goes on to let workers leave, and wait until they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import JobError, RunError
from recycle.exec.launch.contact import is_going_on, reach
from recycle.exec.leader.departures import announce, withdraw
from recycle.exec.membership.schema import NoticesKey, PlacesKey, RegisterKey
from recycle.exec.membership.store import Store
from recycle.job import Job
from recycle.nodes import node_of
from recycle.runs import EVENTS
from recycle.shape import Worker

LOOK_SECONDS = 0.05


def drain(directory: Path, target: str, seconds: float | None, report: Callable[[str], None]) -> None:
    """Have a worker, or all of a node, leave a run, and return when their processes have ended.

    Args:
        directory: of the run.
        target: `k.r`, or the number of a node.
        seconds: until a worker is killed that has not left; None for no deadline.
        report: takes a line for whatever happens.

    Raises:
        JobError: there is no such run or worker, it is dead already, or it has to stay.
        RunError: a worker died before it could leave.
    """
    job, store = reach(directory)
    workers = _workers(job, store, target, directory)
    events = _Tail(directory / EVENTS)
    announce(store, dict.fromkeys(workers), seconds)
    names = " ".join(map(str, workers))
    report(f"told {names} to leave; waiting for the end of an iteration")
    waits, refused, died = {str(worker) for worker in workers}, list[str](), list[str]()
    while waits:
        goes_on = is_going_on(directory)
        for event in events.lines():
            name = event.get("worker")
            if name not in waits:
                continue
            if event["kind"] == "drained":
                report(f"worker {name} has left after {event['seconds']:.2f} s; step {event['step']} starts without it")
                waits.discard(name)
            elif event["kind"] == "detected":
                died.append(f"worker {name} has not left but died: {event['cause']}")
                waits.discard(name)
        if not goes_on:
            report(f"the run has ended, and {' '.join(sorted(waits))} with it") if waits else None
            break
        for name, why in _refusals(store, waits).items():
            refused.append(f"worker {name} stays: {why}")
            waits.discard(name)
        time.sleep(LOOK_SECONDS)
    if refused:
        raise JobError("; ".join(refused))
    if died:
        raise RunError("; ".join(died))


def _workers(job: Job, store: Store, target: str, directory: Path) -> list[Worker]:
    """The live workers that a target means. Raises JobError."""
    record = store.read(RegisterKey())
    live = set(job.shape.workers()) if record is None else {Worker.parse(name) for name in record.live}
    if not target.isdecimal():
        worker = job.shape.require(Worker.parse(target), f"worker {target}")
        if worker not in live:
            raise JobError(f"worker {target} of {directory} is dead already")
        return [worker]
    homes = node_of(job.shape, job.cluster.workers_per_node)
    if int(target) > max(homes.values()):
        raise JobError(f"node {target}: the job's workers lie on nodes 0 to {max(homes.values())}")
    places = store.read(PlacesKey()) or {}
    here = [w for w in sorted(live) if homes[Worker.parse(places.get(str(w), str(w)))] == int(target)]
    if not here:
        raise JobError(f"node {target}: all its workers in {directory} are dead already")
    return here


def _refusals(store: Store, names: Collection[str]) -> dict[str, str]:
    """Worker -> why it stays; who was refused is asked no more."""
    try:
        notices = store.read(NoticesKey()) or {}
        refused = {name: notices[name].refused for name in names if name in notices and notices[name].refused}
        withdraw(store, map(Worker.parse, refused))
    except RunError:
        return {}  # the run ends
    return refused


class _Tail:
    """The lines that are added to a file of JSON lines from now on."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, path.stat().st_size

    def lines(self) -> list[dict[str, Any]]:
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            whole, _, _ = stream.read().rpartition(b"\n")
        if whole:
            self._offset += len(whole) + 1
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in whole.split(b"\n") if line]
