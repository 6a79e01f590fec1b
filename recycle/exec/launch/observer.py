"""Observers of a run while it goes on: a progress display, a test; and what an event says in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Observer:
    """Is called while a run goes on. This one does nothing."""

    def waiting(self, what: str) -> None:
        """The run waits for `what`."""

    def committed(self, line: dict[str, Any]) -> None:
        """A step was committed; `line` is its metrics line."""

    def event(self, event: dict[str, Any]) -> None:
        """An event was written; `event` is its line in events.jsonl."""

    def close(self) -> None:
        """Nothing follows."""


def sentence(event: dict[str, Any]) -> str | None:
    """What an event tells a person; None for one that is of no interest at once."""
    describe = _SENTENCES.get(event["kind"])
    return None if describe is None else describe(event)


_SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    "coordinator": lambda e: f"node {e['node']} coordinates from generation {e['generation']} on",
    "fault": lambda e: f"fault: {e.get('fault') or e.get('cause')} (worker {e['worker']}, step {e['step']})",
    "detected": lambda e: (
        f"worker {e['worker']} is dead: {e['cause']}; "
        + ("all steps are done" if e.get("over") else f"step {e['step']} starts again without it")
    ),
    "recovered": lambda e: f"recovered in {e['seconds'] * 1000:.0f} ms: generation {e['generation']} runs",
    "drained": lambda e: (
        f"worker {e['worker']} has left, {e['seconds']:.2f} s after it was told to; step {e['step']} starts without it"
    ),
    "rejoined": lambda e: f"worker {e['worker']} re-joined at step {e['step']}, state copied from {e['copied_from']}",
    "replanned": lambda e: (
        f"step {e['step']} runs another plan: {e['cause']}; period {e['period_before']:g} -> {e['period']:g}"
    ),
    "layout": lambda e: (
        (f"with worker {' '.join(e['returned'])} back " if e.get("returned") else "")
        + (f"without workers {' '.join(e['failed'])} " if e["failed"] else "")
        + (
            f"{'another order runs' if 'layout_limit' in e else 'layers move'}: period {e['period_before']:g} ->"
            f" {e['period']:g}"
            if e["moves"]
            else "layers stay"
        )
        + (f": {e['cause']}" if e.get("cause") else "" if e["moves"] else ": the pause costs more than moving saves")
    ),
    "moved": lambda e: (
        f"worker {e['worker']} "
        + (
            f"owns {', '.join(e['shards'])}"
            if "shards" in e
            else f"hosts layers {e['units'][0]} to {e['units'][1] - 1}"
        )
        + f" from step {e['step']} on,"
        f" {e['bytes']:,} bytes copied from {e['source']} in {e['seconds'] * 1000:.0f} ms"
        + (" while training went on" if e.get("while_running") else "")
    ),
    "shards": lambda e: (
        f"further deaths of a stage's hosts that lose none of its optimizer's shards: "
        f"{' '.join(map(str, e['further_deaths']))} (by stage)"
    ),
    "checkpoint": lambda e: (
        f"no checkpoint of step {e['step']}: {e['error']}" if "error" in e else f"checkpoint {e['folder']} is complete"
    ),
    "restored": lambda e: (
        f"goes on at step {e['step']} from checkpoint {e['checkpoint']} with {len(e['live'])} workers"
    ),
    "corrupt": lambda e: f"step {e['step']}: {e['what']}",
    "stopped": lambda e: (
        (f"ended early after step {e['step']}" if e["step"] >= 0 else "ended before the first step")
        + ", as it was told to; "
        + (f"it can go on from {e['checkpoint']}" if e["checkpoint"] else "without a checkpoint")
    ),
    "warning": lambda e: f"warning: {e['message']}",
    "undone": lambda e: f"step {e['step']} is repeated, undone on {e['count']} workers: {e['cause']}",
}
