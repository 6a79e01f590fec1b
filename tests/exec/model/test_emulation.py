"""Emulated stages: the profile's time, and contents that show exactly-once and misrouted messages."""

import pytest
import torch

from recycle import MicroBatch, Profile, RunError
from recycle.exec import emulation
from recycle.exec.emulation import EmulatedStage
from tests.exec.drive import execute, micro_batches, one_f_one_b, reduce_gradients, small_job, split
from tests.exec.runs import figures, job, local_run
from tests.waiting import ManualTime

JOB = small_job(pipelines=3, ranks=2, micro_batches=4)
FREE = Profile.uniform(0.0, 0.0, 0.0)


def host(index: int) -> EmulatedStage:
    return EmulatedStage(JOB, index, FREE)


def pipeline() -> list[EmulatedStage]:
    stages = [host(0), host(1)]
    for stage in stages:
        stage.begin_iteration(7)
    return stages


def test_sum_of_all_hosts_contains_each_micro_batch_once():
    pipelines = [pipeline() for _ in range(3)]
    for home, stages in enumerate(pipelines):
        batches = micro_batches(home, 4)
        execute((stage, one_f_one_b(stage.index, 2, batches)) for stage in stages)
    for index in range(2):
        reduce_gradients([stages[index] for stages in pipelines])
        expected = sum(host(index).gradient(7, MicroBatch(home, place)) for home in range(3) for place in range(4))
        assert all(torch.equal(stages[index].gradient_buffers()[0], expected) for stages in pipelines)
        assert pipelines[0][index].gradient_norms_squared() == (expected / 12).square().tolist()
    assert len({stages[0].loss_sum() for stages in pipelines}) == 1
    assert len({stages[1].loss_sum() for stages in pipelines}) == 3


def test_weight_gradients_are_added_in_w_in_any_order():
    whole, deferred = pipeline(), pipeline()
    batches = micro_batches(0, 4)
    execute((stage, one_f_one_b(stage.index, 2, batches)) for stage in whole)
    execute((stage, split(one_f_one_b(stage.index, 2, batches), [])) for stage in deferred)
    assert [stage.held_micro_batches() for stage in deferred] == [4, 4]
    assert not deferred[0].gradient_buffers()[0].any()
    for batch in reversed(batches):
        for stage in deferred:
            stage.backward_weight(batch)
    for whole_stage, deferred_stage in zip(whole, deferred, strict=True):
        assert torch.equal(whole_stage.gradient_buffers()[0], deferred_stage.gradient_buffers()[0])
        assert deferred_stage.held_micro_batches() == 0
        whole_stage.step(7, 0.5)
        deferred_stage.step(7, 0.5)
        assert whole_stage.digests() == deferred_stage.digests() != host(whole_stage.index).digests()


def test_names_of_a_shard_cover_all_that_its_steps_change():
    """A layer begins in the first of two shards only; a worker that reads the checkpoint must get the same state."""
    stage = EmulatedStage(job(2, 1, 1, model={"layers": 1}, train={"sharded_optimizer": True}), 0, FREE)
    stage.layout.own([0, 1])
    for shard in stage.layout.pieces.values():
        before = [tensor.clone() for tensor in shard.state_tensors()]
        stage.gradient_buffers()[0].fill_(1.0)
        shard.step(0, 1.0)
        named = [tensor.data_ptr() for tensor in shard.named_state(shard.state_tensors()).values()]
        changed = [tensor for tensor, old in zip(shard.state_tensors(), before, strict=True) if not tensor.equal(old)]
        assert {tensor.data_ptr() for tensor in changed} == set(named)


def test_a_message_for_another_micro_batch_stage_or_step_is_refused():
    first, second = pipeline()
    activation = first.forward(MicroBatch(0, 0), None)
    with pytest.raises(RunError, match=r"stage 1, iteration 7: F of .* 0\.1: got a message that is not stage 0's"):
        second.forward(MicroBatch(0, 1), activation)
    second.begin_iteration(8)
    with pytest.raises(RunError, match="iteration 8"):
        second.forward(MicroBatch(0, 0), activation)
    second.begin_iteration(7)
    second.forward(MicroBatch(0, 0), activation)
    with pytest.raises(RunError, match="B of micro-batch"):
        first.backward(MicroBatch(0, 0), activation)


def test_time_and_bytes_are_the_profiles(monkeypatch):
    clock = ManualTime()
    monkeypatch.setattr(emulation, "time", clock)
    profile = Profile([9.0, 2.0], backward_input=3.0, backward_weight=5.0, message=4096.0, activation=[1.0, 50.0])
    stage = EmulatedStage(JOB, 1, profile, scale=0.01)
    first = EmulatedStage(JOB, 0, profile, scale=0.0)
    assert stage.message_spec() == ((1024, 1, 1), torch.float32)
    uneven = Profile([9.0, 2.0], message=[4096.0, 8.0])
    assert [EmulatedStage(JOB, index, uneven).message_spec()[0] for index in (0, 1)] == [(1024, 1, 1)] * 2
    seconds = []
    batch = MicroBatch(0, 0)
    activation = first.forward(batch, None)
    assert activation.nbytes == 4096
    for work in (
        lambda: stage.forward(batch, activation),
        lambda: stage.backward_input(batch, None),
        lambda: stage.backward_weight(batch),
    ):
        assert stage.held_micro_batches() == (1 if seconds else 0)
        start = clock.now
        work()
        seconds.append(clock.now - start)
    assert stage.held_micro_batches() == 0
    assert seconds == pytest.approx([0.02, 0.03, 0.05])


def test_another_shape_with_the_same_batch_has_the_same_losses():
    shapes = [(3, 2, 4), (2, 3, 6), (1, 1, 12)]
    keys = {"model": {"layers": 6}, "eval": {"every": 2}}
    runs = [local_run(job(*shape, **keys)).run(3) for shape in shapes]
    assert len({repr([figures(run), run.evaluations]) for run in runs}) == 1
