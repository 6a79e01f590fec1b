"""Difficult cases of faults on real processes; test_faults_page.py strikes each kind."""

import os
import re
import signal

import pytest

from recycle import Worker
from recycle.exec.faults.kinds import KINDS
from recycle.exec.processes.processes import LocalProcesses
from recycle.runs.logs import log_path, read_lines
from tests.exec.fault_matrix import ENDING, JOB, SHARDED_COLUMNS, matrix_row, phases, steps_for
from tests.exec.interactions import draw_interaction, run_interaction, with_real_model
from tests.exec.runs import (
    assert_same_training,
    calm_run,
    deaths,
    figures,
    job,
    live_workers,
    only,
    processes_writing_below,
)
from tests.exec.sharded import sharded

RUN_STEPS = 7
MEMBERSHIP = {"heartbeat": 0.1, "dead_after": 3.0}
EMULATED = job(3, 2, 2, train={"clip": 1e9}, membership=MEMBERSHIP)
"""Steps are staggered from the second on, and silence is detected soon."""
SILENCE = ("2.0", "no heartbeat for 3 s")


def test_stopped_worker_is_fenced_and_rejoins_as_a_new_process(launch, tmp_path):
    """It stops in its reduce, so its peers wait in theirs."""
    run = launch(EMULATED, RUN_STEPS, "stop:2.0@2.reduce", "rejoin:2.0@4", directory=tmp_path)
    assert_same_training(run, calm_run(EMULATED, launch, RUN_STEPS))
    assert deaths(run) == [SILENCE]
    assert live_workers(run) == [6, 6, 5, 5, 6, 6, 6]
    assert "2.0" in run.digests
    assert not processes_writing_below(str(tmp_path))


def test_stopped_worker_that_continues_after_a_lost_kill_changes_nothing(launch, tmp_path, monkeypatch):
    """It may still end its iteration with the others, which leave; the iteration is repeated."""
    stopped, continued, kill = Worker(2, 0), [], LocalProcesses.kill

    def lose_kill(processes, worker):
        if worker != stopped or continued:
            kill(processes, worker)
            return
        continued.extend(processes_writing_below(str(tmp_path / "logs" / f"{worker}.log")))
        os.kill(continued[0], signal.SIGCONT)

    monkeypatch.setattr(LocalProcesses, "kill", lose_kill)
    run = launch(EMULATED, RUN_STEPS, "stop:2.0@3", directory=tmp_path)
    assert_same_training(run, calm_run(EMULATED, launch, RUN_STEPS))
    assert deaths(run) == [SILENCE]
    assert live_workers(run) == [6] * 3 + [5] * 4
    assert "2.0" not in run.digests
    lines = [line for _, line in read_lines(log_path(tmp_path, stopped))]
    assert {line["generation"] for line in lines} == {1}
    assert [line["step"] for line in lines[:3]] == [0, 1, 2]
    assert not processes_writing_below(str(tmp_path))


def test_cut_without_messages_warns_and_cut_between_hosts_fences_one_of_them(launch):
    """Not all of four hosts are neighbours in the sum. At 0.15 s per iteration the kernel breaks the first connection
    before the second cut ends the generation, and with it all connections."""
    sections = {"train": {"clip": 1e9}, "membership": {"heartbeat": 0.1, "dead_after": 1.5, "drift": 0.0}}
    steps, faults = 46, ["cut=1.0:3.2@1", "cut=0.1:2.1@22"]
    run = launch(job(4, 3, 1, model={"seconds_per_unit": 0.02}, **sections), steps, *faults)
    one_stage = job(4, 1, 1, model={"layers": 6}, **sections)  # emulated losses do not depend on the number of stages
    assert run.losses == calm_run(one_stage, launch, steps).losses
    warning = only(run, "warning")["message"]
    assert re.fullmatch(
        r"worker (1\.0|3\.2) is cut off from worker (1\.0|3\.2); training continues, because .*",
        warning,
    )
    assert deaths(run) == [("2.1", "cut off from worker 0.1")]
    assert live_workers(run)[-1] == 11


def test_gpt_trains_through_faults_of_several_kinds_bit_for_bit(launch, tmp_path):
    """The log of a failed worker has its last lines."""
    gpt = job(3, 2, 2, kind="gpt", model={"layers": 2}, train={"clip": 1e9}, membership=MEMBERSHIP)
    faults = (
        *("oom:1.1@1.step", "exception:0.0@2.backward", "rejoin:1.1@3"),
        *("segfault:2.0@4", "rejoin:0.0@4", "hang:1.1@5"),
    )
    run, reference = launch(gpt, RUN_STEPS, *faults, directory=tmp_path), calm_run(gpt, launch, RUN_STEPS)
    assert figures(run) == figures(reference)
    assert run.digests == {worker: reference.digests[worker] for worker in ("0.0", "0.1", "1.0", "2.1")}
    causes = deaths(run)
    struck = "ended with exit code 1 (RuntimeError: struck by the fault exception:0.0@2"
    assert [cause.startswith(struck) for worker, cause in causes[:2] if worker == "0.0"] == [True]
    assert [
        cause.startswith("ended with exit code 1 (MemoryError") for worker, cause in causes[:2] if worker == "1.1"
    ] == [True]
    assert causes[2:] == [("2.0", "killed by SIGSEGV"), ("1.1", "no heartbeat for 3 s")]
    for worker, says in (
        ("0.0", "in execute"),
        ("2.0", "Fatal Python error: Segmentation fault"),
    ):
        assert says in (tmp_path / "logs" / f"{worker}.log").read_text()


PARTS = sharded(JOB)


@pytest.mark.parametrize(
    ("name", "struck"),
    [
        ("kill", ["reduce", "step", "gather", "undo", "copy"]),
        *(pytest.param(name, phases(KINDS[name], SHARDED_COLUMNS), marks=pytest.mark.soak) for name in ENDING),
    ],
)
def test_fault_of_a_sharded_run_changes_no_bit(name, struck, launch):
    steps = steps_for(struck)
    calm = calm_run(PARTS, launch, steps)
    assert figures(calm) == figures(calm_run(JOB, launch, steps))
    row = matrix_row(name, struck, lambda faults: launch(PARTS, steps, *faults), calm)
    assert row[-1] == "identical"


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 200))])
def test_features_and_faults_change_no_bit(seed, servers, tmp_path):
    run_interaction(draw_interaction(seed), tmp_path, servers["emulated"])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(60))
def test_features_and_faults_change_no_bit_of_real_models(seed, servers, tmp_path):
    run_interaction(with_real_model(seed), tmp_path, servers["gpt"])
