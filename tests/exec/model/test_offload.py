"""Activations that leave for the host while a model trains: the same bits, and freed memory."""

from functools import partial

import pytest
import torch

from recycle import MicroBatch, Profile, Schedule
from recycle.exec import emulation, run
from recycle.exec.emulation import EmulatedStage
from recycle.exec.profile.memory import allocated_by
from recycle.ir.instruction import Forward, Offload, Reload
from tests.exec.drive import build_pipeline, small_job
from tests.exec.model.test_providers import drawn_by_name
from tests.exec.worker.test_step_state import LatestCopies
from tests.waiting import ManualTime

LAST = "1F0.0 1B0.0 1F0.1 1B0.1 1F0.2 1B0.2 1F0.3 1B0.3"
PLAIN = {"0.0": "0F0.0 0F0.1 0F0.2 0I0.0 0F0.3 0W0.0 0B0.1 0B0.2 0B0.3", "0.1": LAST}
MOVED = {
    "0.0": "0F0.0 0F0.1 0OFFLOAD0.0 0F0.2 0RELOAD0.0 0OFFLOAD0.1 0I0.0 0F0.3 0RELOAD0.1 0W0.0 0B0.1 0B0.2 0B0.3",
    "0.1": "1F0.0 1OFFLOAD0.0 1RELOAD0.0" + LAST.removeprefix("1F0.0"),
}
BATCH = MicroBatch(0, 0)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"recompute": "selective", "config": {"recompute_modules": ["core_attn", "mlp"]}},
        {"recompute": "layers"},
        {"dropout": 0.1},
        {"kind": "mixtral", "layers": 2, "hidden": 32, "tied": False},
    ],
    ids=str,
)
def test_training_has_the_same_bits_with_and_without_offloads(model):
    job = small_job(ranks=2, micro_batches=4, model=model)
    own = drawn_by_name if "dropout" in model else None
    plain, moved = (run(Schedule.from_text(job.shape, text), job, steps=2, model=own) for text in (PLAIN, MOVED))
    assert plain.losses == moved.losses
    assert plain.digests == moved.digests


def test_what_needs_a_copy_waits_for_it(monkeypatch):
    job = small_job(ranks=2, micro_batches=4)
    plain = run(Schedule.from_text(job.shape, PLAIN), job, steps=2)
    monkeypatch.setattr("recycle.exec.model.offload.copy_stream_of", lambda device: LatestCopies(()))
    assert run(Schedule.from_text(job.shape, MOVED), job, steps=2).digests == plain.digests


def test_an_offload_frees_what_the_forward_saved():
    stage = build_pipeline(small_job())[0]
    stage.begin_iteration(0)
    stage.forward(MicroBatch(0, 1), None)
    held = allocated_by(partial(stage.forward, BATCH, None), torch.device("cpu")).kept
    stage.begin_iteration(0)
    stage.expect(0, [cls(0, BATCH) for cls in (Forward, Offload, Reload)])
    copied = allocated_by(partial(stage.forward, BATCH, None), torch.device("cpu")).kept - held
    freed = -allocated_by(partial(stage.offload, BATCH), torch.device("cpu")).kept
    assert 0.9 * held < freed <= copied <= held
    returned = allocated_by(partial(stage.reload, BATCH), torch.device("cpu"))
    assert returned.kept == 0, "each copy on the host is freed for one on the device, which is the same memory here"


def test_an_emulated_copy_begins_after_its_forward_and_the_backward_waits_for_its_return(monkeypatch):
    clock = ManualTime()
    monkeypatch.setattr(emulation, "time", clock)
    stage = EmulatedStage(small_job(ranks=1), 0, Profile(0.0, 0.0, 0.0, host_bandwidth=20.0))
    stage.begin_iteration(0)
    began = clock.now
    stage.forward(BATCH, None)
    clock.sleep(0.02)
    stage.offload(BATCH)
    assert clock.now == pytest.approx(began + 0.05)
    stage.reload(BATCH)
    assert clock.now == pytest.approx(began + 0.05)
    stage.backward(BATCH, None)
    assert clock.now == pytest.approx(began + 0.1)
