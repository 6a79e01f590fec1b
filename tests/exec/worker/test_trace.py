"""A worker's log of executed instructions: its iterations, its size, and training that never waits for it."""

import json
import os
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recycle import Shape, Worker
from recycle.exec.device import ExecutedInstruction
from recycle.exec.hooks import trace
from recycle.exec.hooks.trace import TraceLog
from recycle.exec.protocol import GenerationRecord
from recycle.runs.logs import TRACE, append_iteration, load_trace, log_path, read_logs
from tests.exec.runs import job

SHAPE = Shape(pipelines=2, ranks=1, micro_batches=1)


class At:
    """A mark that the device has reached, or not yet."""

    def __init__(self, seconds: float, reached=True):
        self._seconds, self.is_reached = seconds, reached

    def reached(self) -> bool:
        return self.is_reached

    def seconds(self) -> float:
        assert self.is_reached
        return self._seconds


RAN = [ExecutedInstruction("0F0.0", At(10.0), At(11.0)), ExecutedInstruction("0B0.0", At(11.0), At(13.0))]


def started(path: Path, warn: Callable[[str], None], **options: Any) -> TraceLog:
    log = TraceLog(log_path(path, Worker(0, 0)), 10.0, warn, **options)
    record = GenerationRecord(1, [], {}, "")
    log.begin_generation(SimpleNamespace(record=record, role=Worker(0, 0)))
    return log


def test_incomplete_instructions_are_written_once_their_times_are_known(tmp_path):
    log = started(tmp_path, [].append)
    late = At(14.0, reached=False)
    log.end_iteration(0, [*RAN, ExecutedInstruction("0STEP", At(13.0), late)], whole=True)
    log.end_iteration(1, [*RAN, ExecutedInstruction("0STEP", At(13.0), late)], whole=False)
    assert log._pending.empty()
    late.is_reached = True
    log.end_generation()
    log.end_iteration(2, [ExecutedInstruction("0STEP", At(13.0), At(14.0, reached=False))], whole=True)
    log.end_generation()
    log.close()
    iterations = [json.loads(line) for line in log_path(tmp_path, Worker(0, 0)).read_text().splitlines()]
    assert [len(line["instructions"]) for line in iterations] == [3, 2]
    assert iterations[0]["instructions"][-1] == ["0STEP", 3.0, 4.0]


def test_growing_log_keeps_fewer_and_fewer_iterations(tmp_path):
    warnings = []
    log = started(tmp_path, warnings.append, sparse_bytes=1000)
    for step in range(400):
        log.end_iteration(step, RAN, whole=True)
        while not log._pending.empty():  # no faster than the disk
            time.sleep(0.0005)
    log.close()
    assert warnings == []
    steps = read_logs(tmp_path, SHAPE).steps
    size = os.path.getsize(log_path(tmp_path, Worker(0, 0)))
    gaps = {later - earlier for earlier, later in pairwise(steps)}
    assert {1, 2, 4, 8} <= gaps
    assert all(gap & (gap - 1) == 0 for gap in gaps)
    assert size < 1000 * 8 < 400 * size / len(steps)


def test_training_does_not_wait_for_a_stuck_disk(tmp_path, monkeypatch):
    resumes, warnings, waits = threading.Event(), [], []

    def slow(*iteration):
        resumes.wait(30)
        return append_iteration(*iteration)

    monkeypatch.setattr(trace, "append_iteration", slow)
    log = started(tmp_path, warnings.append, set_waiting=waits.append)
    for step in range(3 * trace.MOST_PENDING):
        log.end_iteration(step, RAN, whole=True)
    assert [warning.partition(":")[0] for warning in warnings] == ["the trace has gaps"]
    assert waits == []
    resumes.set()
    log.close()
    assert waits == [True, False]  # else the leader takes the worker for dead
    steps = read_logs(tmp_path, SHAPE).steps
    assert steps == list(range(len(steps)))
    assert trace.MOST_PENDING <= len(steps) <= trace.MOST_PENDING + 2


@pytest.mark.parametrize(("setting", "steps"), [(2, [0, 2, 4]), ("off", [])])
def test_run_traces_the_iterations_of_its_job(launch, setting, steps):
    traced = job(2, 1, 1, train={"trace": setting})
    run = launch(traced, 5)
    assert (run.directory / TRACE).exists() == bool(steps)
    assert load_trace(run.directory, traced.shape).steps == steps
    assert len(run.losses) == 5
