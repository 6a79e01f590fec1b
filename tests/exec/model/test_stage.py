"""MegatronStage: the same bits however the model is split, the backward is split, and the work is routed."""

import gc
import math
import weakref
from collections.abc import Sequence

import pytest
import torch

from recycle import MicroBatch, RunError
from recycle.exec.model.megatron_stage import MegatronStage
from tests.exec.drive import (
    build_pipeline,
    differing,
    gradients_by_name,
    iterated,
    micro_batches,
    norm_squared_of,
    run_deferred,
    run_pipelines,
    small_job,
)
from tests.exec.model.test_families import MODELS, SMALL

pytestmark = pytest.mark.slow

BATCH = MicroBatch(0, 0)
FAST = {"accumulation": "fast"}


def begin(stages: Sequence[MegatronStage], step=0):
    for stage in stages:
        stage.begin_iteration(step)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": FAST},
        {"train": {"precision": "bf16"}},
        {"model": {"dropout": 0.2, "attention_dropout": 0.1}},
        {"data": {"micro_batch_size": 3}},
    ],
    ids=str,
)
def test_losses_and_gradients_are_the_same_bits_for_one_and_four_stages(sections):
    (loss, gradients), (other_loss, others) = (iterated(small_job(ranks=ranks, **sections), 2) for ranks in (1, 4))
    # The text is of Python itself and differs between its versions.
    assert loss / 4 == pytest.approx(math.log(256), abs=0.4)
    assert other_loss == loss
    assert differing(gradients, others) == []


def halves_of_linear_layers(stages: Sequence[MegatronStage]) -> set[str]:
    """In which half of the backward their weights get gradients."""
    halves = {name: half for stage in stages for name, half in stage.placement().items()}
    return {half for name, half in halves.items() if name.endswith("weight") and "linear_" in name}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_families_have_the_bits_of_one_stage_in_four_that_defer_w(model):
    loss, gradients = iterated(small_job(ranks=1, model=SMALL | model), 5)
    assert loss / 4 == pytest.approx(math.log(256), abs=0.4)
    stages = build_pipeline(small_job(ranks=4, model=SMALL | model))
    run_deferred(stages, 5)
    assert stages[-1].loss_sum() == loss
    assert differing(gradients, gradients_by_name(stages)) == []
    assert halves_of_linear_layers(stages) == {"W"}


@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("tied", [False, True])
def test_checksum_of_gradients_detects_every_bit(accumulation, tied):
    stages, equal_stages = (
        build_pipeline(small_job(ranks=2, train={"accumulation": accumulation}, model={"tied": tied})) for _ in range(2)
    )
    for pipeline in (stages, equal_stages):
        run_pipelines([pipeline], step=2, count=4)
    checksum, norms = stages[0].gradient_checksum(), stages[0].gradient_norms_squared()
    assert checksum == equal_stages[0].gradient_checksum() != stages[1].gradient_checksum()
    buffer = stages[0].gradient_buffers()[0]
    right, highest = buffer.clone(), 8 * buffer.element_size() - 1
    for bit in (0, 20, highest):
        stages[0].flip("gradient", bit)
        assert stages[0].gradient_checksum() != checksum
        assert bit != highest or stages[0].gradient_norms_squared() == norms  # the sign
        buffer.copy_(right)
        assert stages[0].gradient_checksum() == checksum
    for buffer in stages[0].tied_buffers():
        buffer[0] += 1.0
        assert stages[0].gradient_checksum() != checksum


@pytest.mark.parametrize("layers", [[0, 2, 2, 0], [1, 0, 0, 3], [0, 0, 4, 0]])
def test_a_stage_may_have_no_layers(layers):
    whole = build_pipeline(small_job(ranks=1))
    uneven = build_pipeline(small_job(ranks=4, model={"split": layers}))
    assert run_pipelines([whole], 0, 2) == run_pipelines([uneven], 0, 2)
    assert differing(gradients_by_name(whole), gradients_by_name(uneven)) == []
    for stage in uneven:
        stage.step(0, clip_factor=1.0)
    counts = {
        unit: state.state_tensors()[3].tolist() for stage in uneven for unit, state in stage.layout.units().items()
    }
    assert counts == {
        0: [1.0, 0.0],
        **{unit: [1.0, 1.0] for unit in range(1, 6)},
    }  # the embedding decays as a whole


@pytest.mark.parametrize(
    ("order", "model", "train", "ranks"),
    [
        ([0, 1, 2, 3], {}, FAST, 2),
        ([3, 1, 0, 2], {}, {}, 2),
        ([3, 1, 0, 2], {"tied": True}, {}, 1),
        ([3, 1, 0, 2], {"recompute": "full", "dropout": 0.1, "tied": True}, {"precision": "bf16"}, 2),
    ],
)
def test_i_and_deferred_w_in_any_order_equal_whole_b(order, model, train, ranks):
    job = small_job(ranks=ranks, model=model, train=train)
    whole, deferred = build_pipeline(job), build_pipeline(job)
    run_pipelines([whole], 5, 4)
    run_deferred(deferred, 5, order)
    for left, right in zip(whole, deferred, strict=True):
        assert torch.equal(left.gradient_buffers()[0], right.gradient_buffers()[0])
        assert left.gradient_norms_squared() == right.gradient_norms_squared()
        assert halves_of_linear_layers([right]) == {"W"}
    assert whole[-1].loss_sum() == deferred[-1].loss_sum()


def test_gradient_beyond_the_bound_makes_the_norm_not_finite():
    stages = build_pipeline(small_job(train={"gradient_exponent": -20}))
    run_pipelines([stages], 0, 4)
    assert not any(math.isfinite(norm_squared_of([stage])) for stage in stages)


def test_interrupted_iteration_leaves_no_state():
    stages = build_pipeline(small_job())
    expected = run_pipelines([stages], 1, 4), [stage.gradient_buffers()[0].clone() for stage in stages]
    batches = micro_batches(0, 4)
    begin(stages, 1)
    held = weakref.ref(stages[0].forward(batches[0], None))
    stages[1].forward(batches[0], stages[0].forward(batches[1], None))
    stages[1].backward_input(batches[0], None)
    stages[0].parameters["decoder.layers.0.mlp.linear_fc1.bias"].grad = torch.ones(256)
    begin(stages, 1)
    gc.collect()
    assert held() is None
    assert [stage.held_micro_batches() for stage in stages] == [0, 0]
    assert not any(stage.gradient_buffers()[0].any() for stage in stages)
    assert stages[1].loss_sum() == 0.0
    assert run_pipelines([stages], 1, 4) == expected[0]
    assert all(map(torch.equal, (stage.gradient_buffers()[0] for stage in stages), expected[1]))


def test_instructions_out_of_order_name_stage_and_micro_batch():
    first, last = build_pipeline(small_job())
    begin([first, last], 4)
    with pytest.raises(RunError, match=r"stage 0, iteration 4: B of micro-batch 0\.0: its F has not run"):
        first.backward(BATCH, torch.zeros(32, 1, 64))
    activation = first.forward(BATCH, None)
    with pytest.raises(RunError, match="already held"):
        first.forward(BATCH, None)
    with pytest.raises(RunError, match=r"W of micro-batch .* its I has not run"):
        first.backward_weight(BATCH)
    with pytest.raises(RunError, match=r"W_PART of micro-batch .* its I has not run"):
        first.backward_weight(BATCH, 0, 2)
    with pytest.raises(RunError, match="the last stage takes no gradient"):
        first.backward_input(BATCH, None)
    with pytest.raises(RunError, match="stage 0 takes no input"):
        first.forward(MicroBatch(0, 1), activation)
    with pytest.raises(RunError, match="stage 0 takes no input"):
        last.forward(BATCH, None)
