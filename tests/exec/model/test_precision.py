"""bf16: weights, activations and messages of half the size, gradients and updates in fp32 or wider."""

from __future__ import annotations

import pytest
import torch

from recycle import RunError
from recycle.exec import run
from recycle.exec.model.build import build_stages, require_precision
from recycle.ir.families import one_f_one_b, zb_v
from tests.exec.drive import CPU, build_pipeline, run_pipelines, small_job
from tests.exec.runs import Run, job

STEPS = 5
HALF = {"precision": "bf16"}


def test_working_weights_are_the_rounded_fp32_ones_which_start_as_without() -> None:
    (half,), (full,) = build_pipeline(small_job(ranks=1, train=HALF)), build_pipeline(small_job(ranks=1))
    layer = 1
    assert half.layout.units()[layer].state_tensors()[0].equal(full.layout.units()[layer].state_tensors()[0])
    small = 1e-6  # far below what bf16 can tell from a weight, so only fp32 keeps it
    run_pipelines([[half]], 0, 4)
    before = half.layout.units()[layer].state_tensors()[0].clone()
    half.step(0, small)
    after, *_, working = half.layout.units()[layer].state_tensors()
    assert not after.equal(before)
    assert working.equal(after.bfloat16())
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert half.parameters[name].data_ptr() in range(working.data_ptr(), working.data_ptr() + working.nbytes)


def test_a_run_through_a_kill_an_undo_and_a_rejoin_has_the_bits_of_one_process(launch: Run) -> None:
    train = HALF | {"clip": 1e3}
    of = job(2, 2, 3, kind="gpt", memory={"limit": 8}, model={"layers": 4}, train=train)
    one = job(1, 1, 6, kind="gpt", memory={"limit": 8}, model={"layers": 4}, train=train)
    reference = run(one_f_one_b(one.shape), one, steps=STEPS)
    result = launch(of, STEPS, "nan:0.0@1", "kill:1.1@2", "rejoin:1.1@4")
    assert result.losses == reference.losses
    assert result.undone[0] == 1
    assert result.digests["0.1"] == result.digests["1.1"]
    vee = job(1, 2, 6, kind="gpt", shape={"chunks": 2}, memory={"limit": 12}, model={"layers": 4}, train=train)
    assert run(zb_v(vee.shape), vee, steps=STEPS).losses == reference.losses
    assert reference.losses[-1] < reference.losses[0]


def test_a_device_without_bf16_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("\"layer_norm\" not implemented for 'BFloat16'\nand a second line")

    monkeypatch.setattr(torch.nn.functional, "layer_norm", refuse)
    of = small_job(train=HALF)
    with pytest.raises(RunError, match=r"\[train\] precision: cpu cannot compute in bf16 .*; use fp32") as error:
        build_stages(of, [0], CPU)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    require_precision("bf16", CPU)
