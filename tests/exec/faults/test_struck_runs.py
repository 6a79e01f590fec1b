"""Faults beside the plain kill on real processes, where they are awkward; test_faults_page.py strikes each kind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recycle import Worker
from recycle.errors import JobError
from recycle.exec.faults.kinds import KINDS
from recycle.exec.launch.launcher import RunResult
from recycle.exec.launch.trackers import Observer
from recycle.exec.processes.forkserver import ForkServer
from recycle.exec.processes.processes import LocalProcesses
from recycle.runs.logs import log_path, read_lines
from tests.exec.fault_matrix import ENDING, JOB, SHARDED_COLUMNS, STEPS, matrix_row, phases
from tests.exec.interactions import draw_interaction, outcome_of, run_interaction
from tests.exec.runs import (
    Run,
    assert_same_training,
    calm_run,
    deaths,
    figures,
    job,
    live_workers,
    processes_writing_below,
)
from tests.exec.sharded import bits, sharded

RUN_STEPS = 7
MEMBERSHIP = {"heartbeat": 0.1, "dead_after": 3.0}
EMULATED = job(3, 2, 2, train={"clip": 1e9}, membership=MEMBERSHIP)
"""Steps are staggered from the second on, and silence shows soon."""
SILENCE = ("2.0", "no heartbeat for 3 s")


def test_a_stopped_worker_is_found_by_its_silence_fenced_and_comes_back_as_a_new_process(
    launch: Run, tmp_path: Path
) -> None:
    """In its reduce, so that its peers wait in theirs."""
    run = launch(EMULATED, RUN_STEPS, "stop:2.0@2.reduce", "rejoin:2.0@4", directory=tmp_path)
    assert_same_training(run, calm_run(EMULATED, launch, RUN_STEPS))
    assert deaths(run) == [SILENCE]
    assert live_workers(run) == [6, 6, 5, 5, 6, 6, 6]
    assert "2.0" in run.digests
    assert not processes_writing_below(str(tmp_path))


class _Continue(Observer):
    """Keeps the kill from a worker, as if it were lost, and continues the process instead: at once, or in the middle
    of the next generation, where it holds the launcher until the worker has left its own."""

    def __init__(self, directory: Path, worker: Worker, at_once: bool, patch: pytest.MonkeyPatch) -> None:
        self.log, self.worker, self.at_once = log_path(directory, worker), worker, at_once
        self._output = str(directory / "logs" / f"{worker}.log")
        self.pid: int | None = None
        self._kill = LocalProcesses.kill
        patch.setattr(LocalProcesses, "kill", lambda processes, worker: self.kill(processes, worker))

    def kill(self, processes: LocalProcesses, worker: Worker) -> None:
        if worker != self.worker or self.pid is not None:
            self._kill(processes, worker)
            return
        (self.pid,) = processes_writing_below(self._output)
        if self.at_once:
            os.kill(self.pid, signal.SIGCONT)

    def committed(self, line: dict[str, Any]) -> None:
        if line["generation"] == 2 and self.pid is not None and not self.at_once:
            self.at_once = True
            os.kill(self.pid, signal.SIGCONT)
            deadline = time.monotonic() + 30
            while len(read_lines(self.log)) < 4 and time.monotonic() < deadline:
                time.sleep(0.005)


@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_stopped_worker_that_goes_on_because_its_kill_was_lost_takes_part_in_nothing(
    at_once: bool, launch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continued at once it may still end its iteration with the others, who leave: that is void, and repeated."""
    going_on = _Continue(tmp_path, Worker(2, 0), at_once, monkeypatch)
    run = launch(EMULATED, RUN_STEPS, "stop:2.0@3", observer=going_on, directory=tmp_path)
    assert_same_training(run, calm_run(EMULATED, launch, RUN_STEPS))
    assert deaths(run) == [SILENCE]
    assert live_workers(run) == [6] * 3 + [5] * 4
    assert "2.0" not in run.digests
    lines = [line for _, line in read_lines(going_on.log)]
    assert {line["generation"] for line in lines} == {1}
    if at_once:
        assert [line["step"] for line in lines[:3]] == [0, 1, 2]
    else:
        assert [line["step"] for line in lines] == [0, 1, 2, 3]
        assert not {"0REDUCE_GRAD", "0STEP"} & {row[0] for row in lines[3]["instructions"]}
    assert not processes_writing_below(str(tmp_path))


def test_a_cut_between_workers_that_send_each_other_nothing_is_told_and_of_two_hosts_of_a_stage_one_goes(
    launch: Run,
) -> None:
    """Of four hosts not all are neighbours in the sum. At 0.15 s per iteration the kernel gives up the first connection
    before the second cut ends the generation, and with it all connections."""
    sections = {"train": {"clip": 1e9}, "membership": {"heartbeat": 0.1, "dead_after": 1.5, "drift": 0.0}}
    steps, faults = 46, ["cut=1.0:3.2@1", "cut=0.1:2.1@22"]
    run = launch(job(4, 3, 2, model={"seconds_per_unit": 0.015}, **sections), steps, *faults)
    one_stage = job(4, 1, 2, model={"layers": 6}, **sections)  # of emulated stages, the losses are those of any number
    assert run.losses == launch(one_stage, steps).losses
    (warning,) = (event["message"] for event in run.events if event["kind"] == "warning")
    assert re.fullmatch(
        r"worker (1\.0|3\.2) is cut off from worker (1\.0|3\.2); they send each other nothing by this plan", warning
    )
    assert deaths(run) == [("2.1", "cut off from worker 0.1")]
    assert live_workers(run)[-1] == 11


def test_a_real_gpt_trains_through_faults_of_several_kinds_and_rejoins_bit_for_bit(launch: Run, tmp_path: Path) -> None:
    """A worker that fails by itself leaves its last lines."""
    of = job(3, 2, 2, kind="gpt", train={"clip": 1e9}, membership=MEMBERSHIP)
    faults = (
        *("oom:1.1@1.step", "exception:0.0@2.backward", "rejoin:1.1@3"),
        *("segfault:2.0@4", "rejoin:0.0@4", "hang:1.1@5"),
    )
    run, reference = launch(of, RUN_STEPS, *faults, directory=tmp_path), calm_run(of, launch, RUN_STEPS)
    assert figures(run) == figures(reference)
    assert run.digests == {worker: reference.digests[worker] for worker in ("0.0", "0.1", "1.0", "2.1")}
    found = deaths(run)
    assert set(found[:2]) == {("1.1", "ended with exit code 1"), ("0.0", "ended with exit code 1")}  # at the same time
    assert found[2:] == [("2.0", "killed by SIGSEGV"), ("1.1", "no heartbeat for 3 s")]
    for worker, says in (
        ("1.1", "MemoryError"),
        ("0.0", "RuntimeError: struck by the fault exception:0.0@2"),
        ("0.0", "in execute"),
        ("2.0", "Fatal Python error: Segmentation fault"),
    ):
        assert says in (tmp_path / "logs" / f"{worker}.log").read_text()


PARTS = sharded(JOB)


@pytest.fixture
def reference(launch: Run) -> RunResult:
    """The run without faults, which has the losses and norms of hosts that have all of the state."""
    calm = calm_run(PARTS, launch, STEPS)
    assert bits(calm) == bits(calm_run(JOB, launch, STEPS))
    return calm


@pytest.mark.parametrize(
    ("name", "struck"),
    [
        ("kill", ["reduce", "step", "gather", "undo", "copy"]),
        *(pytest.param(name, phases(KINDS[name], SHARDED_COLUMNS), marks=pytest.mark.soak) for name in ENDING),
    ],
)
def test_a_kind_is_found_in_its_phases_and_changes_no_bit(
    name: str, struck: Sequence[str], launch: Run, reference: RunResult
) -> None:
    row = matrix_row(name, struck, lambda faults: launch(PARTS, STEPS, *faults), reference)
    assert row[-1] == "identical"


def test_nothing_is_gathered_where_every_host_has_all(launch: Run) -> None:
    with pytest.raises(JobError, match=r"kill:1.1@1.gather: nothing is gathered without \[train\] sharded_optimizer"):
        launch(JOB, 2, "kill:1.1@1.gather")


@pytest.mark.process
@pytest.mark.parametrize("seed", range(3))
def test_features_and_faults_change_no_bit(seed: int, servers: dict[str, ForkServer], tmp_path: Path) -> None:
    run_interaction(draw_interaction(seed), tmp_path, servers["emulated"])


@pytest.mark.process
@pytest.mark.soak
def test_two_hundred_random_interactions_change_no_bit_and_never_hang() -> None:
    outcomes = {str(interaction): outcome_of(interaction) for interaction in map(draw_interaction, range(200))}
    assert {text: outcome for text, outcome in outcomes.items() if outcome} == {}
