"""What stages know of buckets: where they cut their gradients, and which share of a W is for which."""

from __future__ import annotations

import pytest
import torch

from recycle.errors import RunError
from recycle.exec.emulation import EmulatedStage
from recycle.exec.model.stage import Stage
from recycle.exec.model.state.accumulate import FlatLayout
from tests.exec.drive import build_pipeline, execute, micro_batches, one_f_one_b, reduce_tied, run_pipelines, small_job

pytestmark = pytest.mark.slow


def test_cuts_lie_between_parts_nearest_to_equal_shares() -> None:
    layout = FlatLayout([torch.Size([size]) for size in (640, 64, 320, 64, 64)])
    assert layout.cut(1, range(6), 1152) == [0, 1152]
    assert layout.cut(2, range(6), 1152) == [0, 640, 1152]
    assert layout.cut(3, range(6), 1152) == [0, 640, 704, 1152]
    # The last three parts stay together.
    assert layout.cut(8, range(3), 1152) == [0, 0, 0, 640, 640, 704, 704, 704, 1152]
    assert layout.cut(2, [0, 2, 5], 1152) == [0, 704, 1152]


@pytest.mark.parametrize("model", [{}, {"tied": True}])
@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("buckets", [1, 2, 3, 7])
def test_the_buckets_are_the_whole_gradient_each_entry_once(model: dict, accumulation: str, buckets: int) -> None:
    for ranks in (1, 2):
        for stage in build_pipeline(small_job(ranks=ranks, model=model, train={"accumulation": accumulation})):
            for place, buffer in enumerate(stage.gradient_buffers()):
                buffer.copy_(torch.arange(len(buffer)) + 1000.0 * place)
            parts = [part for bucket in range(buckets) for part in stage.gradient_bucket(bucket, buckets)]
            assert torch.equal(torch.cat(parts), torch.cat(stage.gradient_buffers()))
            assert buckets == 1 or stage.gradient_bucket(0, buckets)[0].numel() > 0


@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("model", [{}, {"tied": True}])
@pytest.mark.parametrize("buckets", [2, 5])
def test_weights_bucket_by_bucket_give_the_bits_of_whole_ones_and_leave_finished_buckets_alone(
    accumulation: str, model: dict, buckets: int
) -> None:
    job = small_job(ranks=2, model=model, train={"accumulation": accumulation})
    whole, cut = build_pipeline(job), build_pipeline(job)
    batches = micro_batches(0, 4)
    run_pipelines([whole], 5, 4)
    for stage in cut:
        stage.begin_iteration(5)
    execute(
        (stage, [("I" if kind == "B" else kind, batch) for kind, batch in one_f_one_b(stage.index, 2, batches)])
        for stage in cut
    )
    for stage in cut:
        finished: list[torch.Tensor] = []
        for bucket in range(buckets):
            for batch in batches:
                stage.backward_weight(batch, bucket, buckets)
            for earlier, content in enumerate(finished):
                assert torch.equal(stage.gradient_bucket(earlier, buckets)[0], content)
            finished.append(stage.gradient_bucket(bucket, buckets)[0].clone())
        assert stage.held_micro_batches() == 0
    reduce_tied(cut)
    for left, right in zip(whole, cut, strict=True):
        assert all(map(torch.equal, left.gradient_buffers(), right.gradient_buffers()))
        assert left.gradient_norms_squared() == right.gradient_norms_squared()


@pytest.mark.parametrize("kind", ["gpt", "emulated"])
def test_a_part_of_a_weight_without_its_input_gradient_is_refused(kind: str) -> None:
    job = small_job(ranks=1)
    stage: Stage = build_pipeline(job)[0] if kind == "gpt" else EmulatedStage(job, 0, scale=0.0)
    stage.begin_iteration(3)
    (batch,) = micro_batches(0, 1)
    with pytest.raises(RunError, match=r"stage 0, iteration 3: W_PART of micro-batch 0\.0: its I has not run"):
        stage.backward_weight(batch, 0, 2)
