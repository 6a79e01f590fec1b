"""Schedules of Bamboo and Oobleck on real stages: redundant forwards, takeovers and pipelines of unequal depth give the
gradients of fault-free 1F1B."""

from functools import cache

import pytest

from recycle import Job, Schedule, Worker
from recycle.exec import run
from recycle.exec.launch.launcher import RunResult
from recycle.exec.launch.standalone import LocalRun
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import with_barrier
from recycle.plans import with_updates_of
from recycle.systems.bamboo.pipelines import StageRanks, healthy_hosts, hosts_after_loss, iteration_schedule
from recycle.systems.oobleck.pipelines import iteration_schedule as unequal
from tests.exec.runs import job

pytestmark = pytest.mark.slow
STEPS = 3


def gpt(pipelines: int, ranks: int, micro_batches: int, split: list[int], chunks=1) -> Job:
    """The job of a GPT with so many layers per stage; all with as many layers and micro-batches in all, and the same
    seed, train the same model on the same data."""
    sizes = {"chunks": chunks}
    model = {"layers": sum(split), "split": split}
    return job(pipelines, ranks, micro_batches, kind="gpt", shape=sizes, memory={"limit": 64}, model=model)


@cache
def fault_free(layers: int) -> RunResult:
    """One worker per layer and pipeline, all alive; eight micro-batches."""
    trained = gpt(2, layers, 4, [1] * layers)
    return run(one_f_one_b(trained.shape), trained, steps=STEPS)


def states(result: RunResult) -> dict[int, str]:
    """Digest of each stage's parameters and optimizer state, which all of its hosts agree on."""
    digests_of_stage = {}
    for stages in result.digests.values():
        for stage, digest in stages.items():
            digests_of_stage.setdefault(stage, set()).add(digest)
    assert all(len(digests) == 1 for digests in digests_of_stage.values())
    return {stage: digests.pop() for stage, digests in sorted(digests_of_stage.items())}


def assert_same_bits(schedule: Schedule, trained: Job) -> RunResult:
    """Run the schedule; losses, gradient norms, and the state of single-layer stages must equal those of 1F1B."""
    result, expected = run(schedule, trained, steps=STEPS), fault_free(trained.model.layers)
    assert result.losses == expected.losses
    assert [m["grad_norm"] for m in result.metrics] == [m["grad_norm"] for m in expected.metrics]
    assert sorted(states(result)) == list(range(trained.shape.stages))
    if trained.shape.stages == trained.model.layers:
        assert states(result) == states(expected)
    return result


def without(*dead: int) -> StageRanks:
    hosts = healthy_hosts(4)
    for rank in dead:
        hosts = hosts_after_loss(hosts, rank)
    return hosts


@pytest.mark.parametrize(
    ("dead", "shares"),
    [
        ([(), ()], [4, 4]),
        ([(), (0,)], [5, 3]),
        ([(), (3,)], [5, 3]),
        ([(1, 3), ()], [4, 4]),
    ],
)
def test_copies_and_takeovers_of_any_stage(dead, shares):
    result = assert_same_bits(iteration_schedule([without(*each) for each in dead], shares), gpt(2, 4, 4, [1] * 4))
    hosting = {worker: sorted(stages) for worker, stages in result.digests.items()}
    assert not {str(Worker(k, rank)) for k, ranks in enumerate(dead) for rank in ranks} & hosting.keys()
    if dead == [(), ()]:
        assert hosting["1.2"] == [2, 3]


def test_redundant_forwards_release_their_activations():
    trained = gpt(2, 4, 4, [1] * 4)
    ran = LocalRun(with_barrier(with_updates_of(iteration_schedule([healthy_hosts(4)] * 2, [4, 4]), trained)), trained)
    ran.iterate(0)
    assert {stage.held_micro_batches() for stages in ran.stages.values() for stage in stages.values()} == {0}


CASES = {
    "two and three stages": ([(3, 3), (2, 2, 2)], [3, 5]),
    "three depths": ([(6,), (3, 3), (2, 1, 2, 1)], [2, 2, 4]),
    "another cut at the same depth": ([(4, 2), (2, 4)], [5, 3]),
}


@pytest.mark.parametrize("case", CASES)
def test_unequal_pipelines_train_to_the_bits_of_1f1b(case):
    schedule, common = unequal(*CASES[case])
    shape = schedule.shape
    assert shape.global_micro_batches == 8
    assert_same_bits(schedule, gpt(shape.pipelines, shape.ranks, shape.micro_batches, list(common), shape.chunks))
