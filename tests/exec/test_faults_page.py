"""The table of docs/faults.md is what the kinds of faults do to a run, each struck here as its example says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recycle import Job
from recycle.exec.faults import BETWEEN, KINDS, PHASES, Kind
from recycle.exec.launcher import RunResult
from tests.exec.runs import Run, job

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
COLUMNS = ("kind", "example", "does", "detected by", "seconds at most", "measured", "then", "losses")
STEPS = 10
BEFORE = {"rejoin": ["kill:1.1@5"]}
"""What must happen first."""
LOAD_SECONDS = 10.0
"""How much longer than said a detection may take on a machine with too much to do."""


@pytest.fixture(scope="module")
def emulated() -> Job:
    return job(3, 2, 2, train={"clip": 1e9}, membership={"heartbeat": 0.1, "dead_after": 3.0, "hung_after": 4.0})


_FAULT_FREE: list[RunResult] = []


def written() -> dict[str, list[str]]:
    """The page's rows by kind, cell by cell."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert tuple(rows[0]) == COLUMNS
    return {row[0].strip("`"): row for row in rows[2:]}


def detection(run: RunResult, of: Job) -> tuple[str, str, float | None]:
    """By what the fault was detected, the formula for how long that takes at most, and its value for this job."""
    limits = of.membership
    (cause,) = [e["cause"] for e in run.events if e["kind"] in ("detected", "undone") and "cause" in e] or [""]
    rows = {
        f"no heartbeat for {limits.dead_after:g} s": (
            "no heartbeat",
            "`dead_after` + `heartbeat`",
            limits.dead_after + limits.heartbeat,
        ),
        f"no progress for {limits.hung_after:g} s": (
            "heartbeats without progress",
            "`hung_after` + 2 `heartbeat`",
            limits.hung_after + 2 * limits.heartbeat,
        ),
        "a gradient is not finite": ("the commit: a gradient is not finite", "the end of the iteration", None),
        "": ("nothing", "–", None),
    }
    return rows.get(cause) or (f"the process's end: {cause}", "at once", 0.0)


def consequence(run: RunResult) -> str:
    """What follows, as the events tell."""
    kinds = [event["kind"] for event in run.events]
    if "rejoined" in kinds:
        return "a generation with the worker, its state copied from a peer"
    if "detected" in kinds:
        assert run.metrics[-1]["live_workers"] == 5
        return "fenced; a generation without the worker does the iteration again"
    assert run.metrics[-1]["live_workers"] == 6
    if "undone" in kinds:
        return "a generation with the same workers does the iteration again"
    assert kinds.count("generation") == 1
    return "the run goes on, at the slow worker's pace"


def seconds(run: RunResult) -> float | None:
    """From the fault to its detection."""
    times = {kind: event["time"] for event in run.events for kind in [event["kind"]] if kind in ("fault", "detected")}
    return times["detected"] - times["fault"] if "detected" in times else None


@pytest.mark.parametrize("name", KINDS)
def test_the_page_says_what_a_fault_does_to_a_run(name: str, emulated: Job, launch: Run) -> None:
    if not _FAULT_FREE:
        _FAULT_FREE.append(launch(emulated, STEPS))
    kind: Kind = KINDS[name]
    run = launch(emulated, STEPS, *BEFORE.get(name, []), kind.example)
    same = (run.losses, {w: _FAULT_FREE[0].digests[w] for w in run.digests}) == (_FAULT_FREE[0].losses, run.digests)
    by, at_most, limit = ("being asked for", "–", None) if name == "rejoin" else detection(run, emulated)
    took = None if name == "rejoin" else seconds(run)
    if took is not None:
        assert limit is not None
        assert took <= limit + LOAD_SECONDS
    row = [f"`{name}`", f"`{kind.example}`", kind.does, by, at_most]
    row += ["–" if took is None else f"{took:.2f}", consequence(run), "identical" if same else "differ"]
    assert same
    on_page = written().get(name, [])
    measured = COLUMNS.index("measured")
    assert on_page[:measured] + on_page[measured + 1 :] == row[:measured] + row[measured + 1 :], (
        f"docs/faults.md is out of date; the row is now:\n| {' | '.join(row)} |"
    )


def test_the_page_has_every_kind_in_order_and_every_phase() -> None:
    assert list(written()) == list(KINDS)
    phases = re.findall(r"`([a-z]+)`", PAGE.read_text().split("Phases are")[1].split("\n\n")[0])
    assert tuple(phases) == PHASES
    assert set(BETWEEN) < set(PHASES)
