"""Our 1F1B against megatron-core's own, bit for bit: same weights, same data, other code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exec.drive import build_pipeline, differing, gradients_by_name, run_pipelines, small_job
from tests.exec.megatron_reference import MegatronReference


@pytest.fixture(scope="module")
def megatron() -> Iterator[MegatronReference]:
    with MegatronReference(small_job(), processes=4) as reference:
        yield reference


@pytest.mark.parametrize("pipelines", [1, 2])
def test_our_gradients_and_losses_are_megatrons_bit_for_bit(pipelines: int, megatron: MegatronReference) -> None:
    job = small_job(pipelines=pipelines, ranks=2, micro_batches=4, train={"accumulation": "fast"})
    megatron.use(job)
    ours = [build_pipeline(job) for _ in range(pipelines)]
    for step in (0, 3):
        theirs = megatron.iteration(step)
        loss_sum = run_pipelines(ours, step, count=4)
        assert theirs.replicas_equal
        assert loss_sum == sum(theirs.losses[number] for number in range(4 * pipelines))
        gradients = gradients_by_name(ours[0])
        assert len(gradients) == 53
        assert all(gradient.any() for gradient in gradients.values())
        assert differing(gradients, theirs.gradients) == []
