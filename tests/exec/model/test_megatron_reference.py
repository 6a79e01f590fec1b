"""Our 1F1B against megatron-core's own, bit for bit: same weights, same data, other code."""

import pytest

from recycle import Worker
from recycle.exec.launch.standalone import LocalRun
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import with_barrier
from tests.exec.drive import differing, gradients_by_name, small_job
from tests.exec.megatron_data import written
from tests.exec.megatron_reference import MegatronReference


@pytest.fixture(scope="module")
def megatron():
    with MegatronReference(small_job(), processes=4) as reference:
        yield reference


STILL = {"accumulation": "fast", "learning_rate": 1e-30, "clip": 1e9}
"""Steps so small that no weight changes: Megatron's side takes none."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("pipelines", "reads_samples"), [(1, False), (2, True)], ids=["random tokens", "megatron's samples"]
)
def test_1f1b_gives_megatrons_gradients_and_losses_bit_for_bit(pipelines, reads_samples, megatron, tmp_path):
    data = {}
    if reads_samples:
        prefix = written(tmp_path / "corpus", 2000, seed=3, end=255)
        data = {"kind": "gpt-dataset", "path": str(prefix), "micro_batch_size": 2, "seed": 1234}
    job = small_job(pipelines=pipelines, ranks=2, micro_batches=4, train=STILL, data=data)
    megatron.use(job)
    ours = LocalRun(with_barrier(one_f_one_b(job.shape)), job)
    for step in (0, 3):
        theirs, commit = megatron.iteration(step), ours.iterate(step)
        assert theirs.replicas_equal
        assert len(set(theirs.losses.values())) == 4 * pipelines
        assert commit.loss == sum(theirs.losses[number] for number in range(4 * pipelines)) / (4 * pipelines)
        for pipeline in range(pipelines):
            gradients = gradients_by_name([ours.stages[Worker(pipeline, rank)][rank] for rank in range(2)])
            assert len(gradients) == 53
            assert all(gradient.any() for gradient in gradients.values())
            assert differing(gradients, theirs.gradients) == []
