"""Our 1F1B against megatron-core's own, bit for bit: same weights, same data, other code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recycle.exec.launch.standalone import LocalRun
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import with_barrier
from recycle.job.shape import Worker
from tests.exec.drive import differing, gradients_by_name, small_job
from tests.exec.megatron_data import written
from tests.exec.megatron_reference import MegatronReference


@pytest.fixture(scope="module")
def megatron() -> Iterator[MegatronReference]:
    with MegatronReference(small_job(), processes=4) as reference:
        yield reference


STILL = {"accumulation": "fast", "learning_rate": 1e-30, "clip": 1e9}
"""Steps so small that no weight changes: Megatron's side takes none."""


@pytest.mark.process
@pytest.mark.parametrize("pipelines", [1, 2])
def test_our_1f1b_gives_megatrons_gradients_and_losses_bit_for_bit(pipelines: int, megatron: MegatronReference) -> None:
    job = small_job(pipelines=pipelines, ranks=2, micro_batches=4, train=STILL)
    megatron.use(job)
    ours = LocalRun(with_barrier(one_f_one_b(job.shape)), job)
    for step in (0, 3):
        theirs = megatron.iteration(step)
        commit = ours.iterate(step)
        assert theirs.replicas_equal
        assert commit.loss == sum(theirs.losses[number] for number in range(4 * pipelines)) / (4 * pipelines)
        for pipeline in range(pipelines):
            stages = [ours.stages[Worker(pipeline, rank)][rank] for rank in range(2)]
            gradients = gradients_by_name(stages)
            assert len(gradients) == 53
            assert all(gradient.any() for gradient in gradients.values())
            assert differing(gradients, theirs.gradients) == []


@pytest.mark.process
@pytest.mark.parametrize("pipelines", [1, 2])
def test_on_megatrons_own_samples_the_losses_are_those_of_its_loop_bit_for_bit(
    pipelines: int, megatron: MegatronReference, tmp_path: Path
) -> None:
    prefix = written(tmp_path / "corpus", 2000, seed=3, end=255)
    data = {"kind": "gpt-dataset", "path": str(prefix), "micro_batch_size": 2, "seed": 1234}
    job = small_job(pipelines=pipelines, ranks=2, micro_batches=4, train=STILL, data=data)
    megatron.use(job)
    ours = LocalRun(with_barrier(one_f_one_b(job.shape)), job)
    for step in (0, 3):
        theirs, commit = megatron.iteration(step), ours.iterate(step)
        assert len(set(theirs.losses.values())) == 4 * pipelines
        assert commit.loss == sum(theirs.losses[number] for number in range(4 * pipelines)) / (4 * pipelines)
        stages = [ours.stages[Worker(0, rank)][rank] for rank in range(2)]
        assert differing(gradients_by_name(stages), theirs.gradients) == []
