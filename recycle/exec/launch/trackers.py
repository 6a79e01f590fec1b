"""Observers of a run, sentences for events, and experiment trackers (TensorBoard, Weights & Biases, Prometheus).

A tracker that raises is disabled after one warning.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import msgspec

from recycle.child import Child
from recycle.errors import JobError, RunError, first_line
from recycle.exec.model.state.learning_rate import learning_rate
from recycle.job import Job
from recycle.job.analytic import model_flops
from recycle.job.endpoints import parse_listening
from recycle.runs.exporter import Request
from recycle.threads import WaitingThread


class Observer:
    """Callbacks during a run; this base class does nothing."""

    def waiting(self, what: str) -> None:
        """Called when the run waits for `what`."""

    def committed(self, line: dict[str, Any]) -> None:
        """Called when a step was committed; `line` is its metrics line."""

    def event(self, event: dict[str, Any]) -> None:
        """Called when an event was written; `event` is its line in events.jsonl."""

    def close(self) -> None:
        """Called at the end of the run."""


def sentence(event: dict[str, Any]) -> str | None:
    """Return an event as a sentence for the user; None for events of no immediate interest."""
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
        f"worker {e['worker']} has left {e['seconds']:.2f} s after the request; step {e['step']} starts without it"
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
        + (" while training continued" if e.get("while_running") else "")
    ),
    "shards": lambda e: (
        f"deaths that each stage can still tolerate without losing optimizer state: "
        f"{' '.join(map(str, e['further_deaths']))} (by stage)"
    ),
    "checkpoint": lambda e: (
        f"no checkpoint of step {e['step']}: {e['error']}" if "error" in e else f"checkpoint {e['folder']} is complete"
    ),
    "restored": lambda e: f"continues at step {e['step']} from {e['checkpoint']} with {len(e['live'])} workers",
    "corrupt": lambda e: f"step {e['step']}: {e['what']}",
    "stopped": lambda e: (
        (f"ended early after step {e['step']}" if e["step"] >= 0 else "ended before the first step")
        + " on request"
        + (f"; resume from {e['checkpoint']}" if e["checkpoint"] else "")
    ),
    "warning": lambda e: f"warning: {e['message']}",
    "undone": lambda e: f"step {e['step']} is repeated, undone on {e['count']} workers: {e['cause']}",
}


CLOSING_SECONDS = 60.0
"""Seconds to wait at the end of a run for pending updates."""
EXPORT_SECONDS = 5.0
"""Seconds that the exporter of metrics may take to send the last ones."""
CURVES = ("loss", "grad_norm", "tokens_per_second", "live_workers", "period_error", "eval_loss")
"""Fields of a metrics line to show."""
PEAK_FLOPS = {
    "A100": {"fp32": 19.5e12, "bf16": 312e12},
    "H100": {"fp32": 67e12, "bf16": 989e12},
    "H200": {"fp32": 67e12, "bf16": 989e12},
    "B200": {"fp32": 75e12, "bf16": 2250e12},
}
"""Dense operations per second by GPU name and precision, from the vendor's data sheets (SXM)."""


class TensorBoard:
    """Writes event files to `tensorboard/` in the run directory."""

    def __init__(self, _: Job, directory: Path) -> None:
        self._folder = str(directory / "tensorboard")
        self._writer: Any = None

    def start(self, step: int) -> None:
        """Start at this step; values shown earlier for this and later steps no longer count."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.close()
        self._writer = EventFileWriter(self._folder)
        self._write(step, file_version="brain.Event:2")
        self._write(step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def step(self, step: int, values: dict[str, float]) -> None:
        self._write(step, summary={"value": [{"tag": name, "simple_value": value} for name, value in values.items()]})
        self._writer.flush()

    def note(self, step: int, text: str) -> None:
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = {"dtype": "DT_STRING", "string_val": [text.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
        metadata = create_summary_metadata(None, None)
        self._write(step, summary={"value": [{"tag": "events/text_summary", "tensor": tensor, "metadata": metadata}]})

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Logs to a Weights & Biases project; notes are rows of a table. Methods as in `TensorBoard`."""

    def __init__(self, job: Job, directory: Path) -> None:
        self._job, self._directory = job, directory
        self._notes: list[tuple[int, str]] = []
        self._run: Any = None

    def start(self, step: int) -> None:
        import wandb

        if self._run is not None:
            return
        self._table: Any = wandb.Table
        self._run = wandb.init(
            project=self._job.logging.wandb,
            name=self._directory.name,
            id=self._directory.name,
            resume="allow",
            dir=str(self._directory),
            mode=self._job.logging.wandb_mode,
            config={"job": self._job.to_toml()},
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def note(self, step: int, text: str) -> None:
        self._notes.append((step, text))
        self._run.log({"step": step, "events": self._table(["step", "event"], data=self._notes)})

    def close(self) -> None:
        self._run.finish()


class MetricsExport:
    """Exports the run's metrics from a child process (recycle.runs.exporter). Methods as in `TensorBoard`."""

    def __init__(self, job: Job, directory: Path) -> None:
        where = job.logging.prometheus
        self._request = Request(None if where is None else parse_listening(where), job.logging.otlp)
        self._directory = directory
        self._child: Child | None = None

    def start(self, step: int) -> None:
        if self._child is not None:
            return
        with (self._directory / "logs" / "exporter.log").open("ab") as errors:
            self._child = Child("recycle.runs.exporter", str(self._directory), errors=errors)
        self._child.send(self._request)
        problem = msgspec.json.decode(next(self._child.lines(), b'"it ended"'), type=str)
        if problem:
            self._child.close()
            raise RunError(problem)

    def step(self, step: int, values: dict[str, float]) -> None:
        if self._child is not None and self._child.process.poll() is not None:
            raise RunError(f"its process has ended; see {self._directory / 'logs' / 'exporter.log'}")

    def note(self, step: int, text: str) -> None:
        return

    def close(self) -> None:
        """Let the child send the last metrics, and end it."""
        if self._child is not None:
            self._child.send(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.process.wait(EXPORT_SECONDS)
            self._child.close()


Tracker = TensorBoard | WeightsAndBiases | MetricsExport
_TRACKERS: dict[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "prometheus": (MetricsExport, "prometheus_client"),
    "otlp": (MetricsExport, "opentelemetry"),
}
"""Key of `[logging]` -> tracker, and package that it needs."""


def _wanted_keys(job: Job) -> list[str]:
    return [key for key in _TRACKERS if getattr(job.logging, key)]


class Trackers(Observer):
    """All experiment trackers of a run, in a separate thread, so that training does not wait for network or disk.

    The first step is `first`. `warn` is called in the caller's thread.
    """

    def __init__(self, job: Job, directory: Path, first: int, warn: Callable[[str], None], gpu: str = "") -> None:
        self._job, self._warn, self._last = job, warn, first - 1
        self._failures: deque[str] = deque()
        self._peak = peak_flops(job, gpu)
        kinds = dict.fromkeys(_TRACKERS[key][0] for key in _wanted_keys(job))
        self._trackers: list[Tracker] = [kind(job, directory) for kind in kinds]
        self._thread = WaitingThread()  # starts with the first tracker
        self._each(lambda tracker: tracker.start(first))

    def committed(self, line: dict[str, Any]) -> None:
        job, step = self._job, line["step"]
        tokens = job.sequences_in(step) * job.model.sequence
        values = {name: float(line[name]) for name in CURVES if line.get(name) is not None}
        values["seconds"] = tokens / line["tokens_per_second"]
        values["learning_rate"] = learning_rate(job.train, step)
        if self._peak is not None and job.model.provider is None:  # the operations of a user's model are unknown
            processes = line["live_workers"] * job.grid.tensor_parallel
            values["mfu"] = model_flops(job, step) / values["seconds"] / (processes * self._peak)
        if step <= self._last:  # training restored a checkpoint
            self._each(lambda tracker: tracker.start(step))
        self._last = step
        self._each(lambda tracker: tracker.step(step, values))
        while self._failures:
            self._warn(self._failures.popleft())

    def event(self, event: dict[str, Any]) -> None:
        text, step = sentence(event), max(self._last, 0)
        if text is not None:
            self._each(lambda tracker: tracker.note(step, text))

    def close(self) -> None:
        """Close the trackers; pending updates have `CLOSING_SECONDS`."""
        if self._trackers:
            self._each(lambda tracker: tracker.close())
            if wait([self._thread.submit(lambda: None)], CLOSING_SECONDS).not_done:
                names = ", ".join(type(tracker).__name__ for tracker in self._trackers)
                self._warn(f"{names}: the last values were not written within {CLOSING_SECONDS:g} s")
        self._thread.shut()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        if self._trackers:
            self._thread.submit(self._act, act)

    def _act(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # any exception of the tracker's library
                name = type(tracker).__name__
                self._failures.append(
                    f"{name} is disabled for the rest of this run: {type(error).__name__}: {first_line(error)}"
                )
                self._trackers.remove(tracker)


def require_packages(job: Job) -> None:
    """Raise JobError for a tracker whose package is not installed."""
    from importlib.util import find_spec

    for key in _wanted_keys(job):
        if find_spec(_TRACKERS[key][1]) is None:
            raise JobError(
                f"[logging] {key}: needs a package; install it with: pip install 'recycle-pipeline[logging]'"
            )


def asks_for_gpu(job: Job) -> bool:
    """Return whether the trackers need the GPU's name."""
    return (job.logging.tensorboard or job.logging.wandb is not None) and job.logging.peak_flops is None


def peak_flops(job: Job, gpu: str) -> float | None:
    """Return the peak operations per second of a process's device with this name; None if unknown."""
    if job.logging.peak_flops is not None:
        return job.logging.peak_flops
    return next((peaks[job.train.precision] for known, peaks in PEAK_FLOPS.items() if known in gpu), None)
