"""Runs whose batch grows: Megatron's batch sizes and samples, and equal bits through deaths and resumed in the ramp."""

import pytest
import torch
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator
from msgspec.structs import replace

from recycle import JobError
from recycle.exec import run
from recycle.exec.data.loading import load_batches
from recycle.ir.families import one_f_one_b, zb_h1
from tests.exec.data.test_indexed import written
from tests.exec.runs import assert_same_training, calm_run, job, kinds


@pytest.mark.parametrize(
    ("pipelines", "micro_batches", "size", "ramp"),
    [
        (2, 6, 1, [4, 2, 100]),
        (3, 8, 2, [6, 6, 997]),
        (1, 9, 1, [1, 4, 3]),
        (2, 4, 1, [8, 2, 50]),
        (1, 7, 1, [2, 1, 31]),
    ],
)
def test_batches_are_megatron_cores(pipelines, micro_batches, size, ramp):
    tested = job(pipelines, 1, micro_batches, data={"micro_batch_size": size}, train={"rampup_batch_size": ramp})
    whole = pipelines * micro_batches * size
    if whole == ramp[0]:
        assert [tested.micro_batches_in(iteration) for iteration in range(3)] == [micro_batches] * 3
        return
    reference = RampupBatchsizeNumMicroBatchesCalculator(whole, size, pipelines, False, 0, *ramp)
    consumed = 0
    for iteration in range(200):
        reference.update(consumed, True)
        assert tested.sequences_before(iteration) == consumed
        assert tested.micro_batches_in(iteration) == reference.get()
        consumed += reference.get_current_global_batch_size()
    assert reference.get() == micro_batches


STEPS = 8
RAMP = {"rampup_batch_size": [2, 2, 12], "checkpoint_every": 2, "clip": 1e9}
COUNTS = [1, 1, 2, 3, 4, 4, 4, 4]
"""Micro-batches of each of two pipelines, of at most four, in the iterations of this ramp."""


def test_ramp_has_the_bits_of_the_calm_run_through_deaths_and_resumed(launch, tmp_path):
    tested, directory = job(2, 2, 4, train=RAMP), tmp_path / "run"
    assert [tested.micro_batches_in(iteration) for iteration in range(STEPS)] == COUNTS
    launch(tested, 2, "kill:1.1@1.backward", directory=directory)
    struck = launch(tested, STEPS, "kill:1.1@3.reduce", "rejoin:1.1@6", directory=directory, resume=True)
    assert kinds(struck).count("rejoined") == 1
    assert_same_training(struck, calm_run(tested, launch, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"kind": "megatron"}, {"kind": "gpt-dataset", "split": "1", "samples": 64}])
def test_iterations_of_the_ramp_train_as_a_job_of_their_size(keys, tmp_path):
    """The first two have the samples of a job with one micro-batch, and the third begins after these."""
    data = keys | {"path": str(written(tmp_path / "tokens", [40] * 40))}
    grown = job(
        2, 2, 4, kind="gpt", model={"layers": 2, "vocabulary": 2048}, data=data, train=RAMP | {"per_token_loss": True}
    )
    constant = replace(grown.train, rampup_batch_size=None)
    small, middle = (grown.with_sections(grid=replace(grown.grid, micro_batches=m), train=constant) for m in (1, 2))
    result, other, of_one, of_two = (
        run(family(each.shape), each, steps=steps).metrics
        for each, family, steps in ((grown, one_f_one_b, 4), (grown, zb_h1, 4), (small, zb_h1, 2), (middle, zb_h1, 2))
    )
    assert result == other
    for line, wanted in zip(result, of_one, strict=False):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    batches, of_middle = load_batches(grown), load_batches(middle)
    for pipeline in range(2):
        for index in range(2):
            ours, theirs = batches.batch(2, 4 * pipeline + index), of_middle.batch(1, 2 * pipeline + index)
            assert torch.equal(ours["tokens"], theirs["tokens"])
    assert of_two[0]["loss"] != result[0]["loss"]


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ([3, 2, 10], "3 and 2 must be multiples of 2, one micro-batch of each pipeline"),
        ([2, 4, 10], "no number of increments of 4 leads from 2 to the batch of 8"),
        ([10, 2, 10], "no number of increments of 2 leads from 10 to the batch of 8"),
        ([2, 2], r"expected `array` of length >= 3"),
    ],
)
def test_impossible_ramps_are_refused(ramp, message):
    with pytest.raises(JobError, match=rf"^job: \[train\] rampup_batch_size: {message}"):
        job(2, 2, 4, train={"rampup_batch_size": ramp})
