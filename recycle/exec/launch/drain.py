"""Ask a run that goes on to let workers leave, and wait until they have."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import JobError, RunError
from recycle.exec.launch.contact import is_going_on, reach
from recycle.exec.links import Link, LinkClosed
from recycle.exec.protocol import Drain, Drained, Refused
from recycle.runs.logs import EVENTS

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
    link: Link | None = reach(directory)
    assert link is not None
    events = _Tail(directory / EVENTS)
    link.send(Drain(target, seconds))
    waits, refused, died = set[str](), list[str](), list[str]()
    is_told = False
    while waits or not is_told:
        goes_on = is_going_on(directory)
        try:
            answers = _answers(link)
        except LinkClosed:
            link, answers = None, []
        if link is None and goes_on:
            with contextlib.suppress(RunError, JobError, OSError):  # until another agent leads
                link = reach(directory)
                for wanted in waits if is_told else [target]:
                    link.send(Drain(wanted, seconds))
        for answer in answers:
            if isinstance(answer, Drained) and is_told:
                continue  # told again after another agent has come to lead
            if isinstance(answer, Drained):
                waits, is_told = set(answer.workers), True
                report(f"told {' '.join(answer.workers)} to leave; waiting for the end of an iteration")
            elif not answer.worker and not is_told:
                raise JobError(answer.why)
            elif answer.worker in waits:
                refused.append(f"worker {answer.worker} stays: {answer.why}")
                waits.discard(answer.worker)
        for event in events.lines() if is_told else ():
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
    if refused:
        raise JobError("; ".join(refused))
    if died:
        raise RunError("; ".join(died))


def _answers(link: Link | None) -> list[Drained | Refused]:
    """What the leader has answered; waits a moment for it. None for a leader that is gone."""
    if link is None:
        time.sleep(LOOK_SECONDS)
        return []
    readable, _, _ = select.select([link.socket], [], [], LOOK_SECONDS)
    return link.read() if readable else []


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
