"""State by unit: a model that is cut anew computes the same bits around the tensors that stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import pytest
import torch

from recycle import JobError, Worker
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage
from recycle.exec.model.weights import units_of
from recycle.exec.protocol import Commit
from recycle.exec.worker.hosted import Hosted
from recycle.exec.worker.updates import Updates
from recycle.job import Job
from tests.exec.drive import execute, micro_batches, one_f_one_b
from tests.exec.runs import job

KINDS = {
    "gpt": {},
    "tied": {"kind": "gpt", "tied": True},
    "llama": {"kind": "llama", "ffn": 48},
    "emulated": {"kind": "emulated"},
    "bf16": {},
}


def job_of(name: str) -> Job:
    model = {"kind": "gpt", "layers": 4, "hidden": 32, "heads": 2, "sequence": 16, **KINDS[name]}
    return job(1, 2, 2, model=model, train={"precision": "bf16"} if name == "bf16" else {})


def iterate(stages: Mapping[int, Stage], step: int) -> list[float]:
    """One iteration and its step on one worker that hosts the whole model; the norms."""
    batches = micro_batches(0, 2)
    for stage in stages.values():
        stage.begin_iteration(step)
    execute((stage, one_f_one_b(stage.index, len(stages), batches)) for stage in stages.values())
    norms = [norm for stage in stages.values() for norm in stage.gradient_norms_squared()]
    updates = Updates(stages, step - 1)
    updates.reduced(step)
    updates.settle(step, Commit(step, 0.0, 0.0, 0.5))
    return norms


def named(stages: Mapping[int, Stage]) -> dict[str, torch.Tensor]:
    return {
        f"{stage.index == max(stages)} {name}" if "word_embeddings" in name else name: tensor.clone()
        for stage in stages.values()
        for name, tensor in stage.named_state(stage.state_tensors()).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_is_cut_anew_between_steps_gives_the_same_bits(name: str) -> None:
    of = job_of(name)

    still, moved = (Hosted(Worker(0, 0), partial(build_stages, of), (), [0, 1]) for _ in range(2))
    for step, cut in enumerate([(), (1, 1, 2), (3, 1), ()]):
        tensors = {id(t): t.data_ptr() for s in moved.stages.values() for t in s.state_tensors()}
        if cut or step:
            assert moved.place(cut, range(len(cut) or 2))
            assert moved.missing() == set()
            moved.confirm()
            assert {id(t): t.data_ptr() for s in moved.stages.values() for t in s.state_tensors()} == tensors
        assert math.fsum(iterate(moved.stages, step)) == math.fsum(iterate(still.stages, step))
    left, right = named(moved.stages), named(still.stages)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_worker_holds_what_it_had_until_its_new_stages_are_confirmed() -> None:
    of = job_of("emulated")

    hosted = Hosted(Worker(0, 0), partial(build_stages, of), (), [0])
    assert not hosted.place_held()
    given, kept = hosted.layout, [tensor.clone() for tensor in hosted.held(0, 3)]
    assert hosted.place((1, 3), [1])
    assert not hosted.place((1, 3), [1])
    assert hosted.missing() == {3, 4, 5}
    assert not hosted.is_confirmed
    assert all(torch.equal(one, other) for one, other in zip(hosted.held(0, 3), kept, strict=True))
    for tensor in hosted.placed(3, 6):
        tensor.fill_(7.0)
    assert hosted.place_held()  # the generation came to nothing
    assert (hosted.layout, hosted.missing(), hosted.is_confirmed) == (given, set(), True)
    assert all(torch.equal(one, other) for one, other in zip(hosted.placed(0, 3), kept, strict=True))
    assert hosted.place((1, 3), [1])
    hosted.confirm()
    assert [tensor[0].item() for tensor in hosted.held(3, 5)[::2]] != [7.0, 7.0]
    with pytest.raises(Exception, match="unit 0 of the model"):
        hosted.held(0, 1)


def test_what_lies_outside_of_layers_belongs_to_the_ends() -> None:
    names = ["embedding.weight", "decoder.layers.0.w", "decoder.layers.1.w", "decoder.norm", "output_layer.weight"]
    assert units_of(names, 0, 2, (True, True), 3) == dict(zip(names, (0, 1, 2, 3, 3), strict=True))
    assert units_of(["embedding.weight", "layers.0.w", "scale"], 0, 1, (True, False), 3)["scale"] == 0
    assert units_of(["embedding.weight", "layers.1.w"], 1, 1, (False, True), 3)["embedding.weight"] == 3
    assert units_of(["scale"], 4, 2, (False, False), 9) == {"scale": 5}
    with pytest.raises(JobError, match="without layers"):
        units_of(["scale"], 4, 0, (False, False), 9)
