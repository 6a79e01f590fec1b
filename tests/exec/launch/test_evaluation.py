"""Evaluations between iterations: through faults, stops and take-overs to the bits of the calm run."""

import math

import pytest

from recycle import Job, Worker
from recycle.exec import run
from recycle.ir.families import interleaved
from recycle.runs.logs import load_trace
from tests.exec.runs import assert_same_training, calm_run, job, kinds, lines_of

STEPS = 8
EVERY_OTHER = {"every": 2, "batches": 3}
KILLED = ("kill:1.1@3.evaluation", "rejoin:1.1@5", "kill:0.0@7.evaluation")
MODES = {"staggered": {"clip": 1e9}, "barrier": {"clip": 1e-3}}
"""`[train]` by whose clipping limit all iterations but the first step so."""


def small(**sections) -> Job:
    return job(3, 2, 2, eval=EVERY_OTHER, **sections)


@pytest.mark.parametrize("mode", ["staggered", pytest.param("barrier", marks=pytest.mark.soak)])
def test_workers_that_die_in_evaluations_change_no_bit(launch, mode):
    config = small(train=MODES[mode])
    calm, struck = calm_run(config, launch, STEPS), launch(config, STEPS, *KILLED)
    assert_same_training(struck, calm)
    assert sorted(struck.evaluations) == [1, 3, 5, 7]
    assert mode in struck.modes
    assert kinds(struck).count("detected") == 2
    assert kinds(struck).count("rejoined") == 1
    assert "undone" not in kinds(struck)
    assert lines_of(struck.directory, "metrics") == struck.metrics
    assert [line["step"] for line in struck.metrics] == list(range(STEPS))
    trace = load_trace(struck.directory, config.shape)
    assert trace.steps == list(range(STEPS))
    assert trace.evaluations.steps == [1, 3, 5, 7]
    assert (trace.batch == -1).all()
    for step, died in ((1, False), (3, True)):
        assert len(trace.evaluations.generations_of(step)) == 1 + died
        ran = trace.evaluation(step)
        computed = [str(ran.instruction(row)) for row in range(len(ran)) if ran.end[row] > ran.start[row]]
        forwards = [f"{stage}F{pipeline}.{j}" for stage in range(2) for pipeline in range(3) for j in range(2)]
        assert sorted(text for text in computed if "_" not in text) == sorted(3 * forwards)
        assert set(ran.batch.tolist()) == {0, 1, 2}
        assert (ran.shape.worker_index(Worker(1, 1)) in ran.process) != died


def test_evaluation_after_deaths_has_the_bits_of_one_process(launch):
    config = job(
        2,
        2,
        2,
        kind="gpt",
        shape={"chunks": 2},
        memory={"limit": 8},
        model={"dropout": 0.1},
        train={"clip": 1e9},
        eval=EVERY_OTHER,
    )
    struck = launch(config, STEPS, *KILLED)
    calm = run(interleaved(config.shape), config, steps=STEPS)
    assert_same_training(struck, calm)
    assert kinds(struck).count("detected") == 2
    assert len(set(struck.evaluations.values())) == 4
    assert all(math.isfinite(loss) for loss in struck.evaluations.values())


def test_training_has_the_bits_of_a_run_without_evaluations(launch):
    config = small(train={"clip": 1e9})
    without = calm_run(job(3, 2, 2, train={"clip": 1e9}), launch, STEPS)
    evaluated = calm_run(config, launch, STEPS)
    assert evaluated.losses == without.losses
    assert evaluated.digests == without.digests
    assert without.evaluations == {}
    assert not any("eval_loss" in line for line in without.metrics)


def test_stage_lost_in_an_evaluation_is_restored_and_evaluated(launch):
    config = small(train={"clip": 1e9, "checkpoint_every": 2}, planner={"ahead": 0})
    lost = [f"kill:{pipeline}.1@11.evaluation" for pipeline in range(3)]  # long after a checkpoint is complete
    struck, calm = launch(config, 14, *lost), calm_run(config, launch, 14)
    assert struck.losses == calm.losses
    assert struck.evaluations == calm.evaluations
    assert kinds(struck).count("restored") == 1
    assert [line["step"] for line in struck.metrics] == list(range(14))
