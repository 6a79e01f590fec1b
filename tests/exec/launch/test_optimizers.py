"""Runs with other optimizers than AdamW, and with groups of parameters: the bits of calm runs, and refusals."""

import pytest
import torch

from recycle import Job, JobError
from recycle.exec import Optimizer
from recycle.exec.checkpoint.checkpoint import folder_of
from recycle.exec.launch.checks import check_request
from recycle.exec.launch.standalone import LocalRun
from recycle.exec.model.providers import Providers
from recycle.exec.model.state.rules import Update
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.lower import with_barrier
from recycle.job.sections import GroupSection, RotaryScaling
from recycle.megatron.conversion import export_model
from tests.exec.drive import small_job
from tests.exec.runs import figures, job, kinds, require_startable
from tests.exec.sharded import require_equal, state_of, stored

GROUPS = [
    {"parameters": ["*layernorm*", "*.bias"], "weight_decay": 0.1},
    {"parameters": ["embedding.*"], "learning_rate_scale": 0.5},
    {"parameters": ["*.linear_proj.weight"], "optimizer": "adamw"},
]
STEPS = 7


class SignOfMomentum(Optimizer):
    """What a user may write."""

    state = ("momentum",)

    def step(self, update: Update):
        (momentum,) = update.state
        momentum.lerp_(update.gradient, 1 / (1 + float(update.steps)))
        update.parameter.mul_(1 - update.rate * update.weight_decay).sub_(momentum.sign(), alpha=update.rate)


MIXED_OPTIMIZERS = {
    "clip": 0.5,
    "optimizer": f"{__name__}:SignOfMomentum",
    "groups": [
        {"parameters": ["*layernorm*"], "optimizer": "sgd"},
        {"parameters": ["*.linear_qkv.*"], "optimizer": "adamw"},
    ],
}


def muon(pipelines: int, ranks: int, micro_batches: int) -> Job:
    train = {"optimizer": "muon", "groups": GROUPS, "checkpoint_every": 5, "clip": 1e9}
    return job(pipelines, ranks, micro_batches, kind="gpt", model={"layers": 2}, train=train)


def test_muon_with_groups_has_the_bits_of_the_calm_run_through_deaths_and_in_another_shape(launch, tmp_path):
    directory = tmp_path / "run"
    struck = launch(muon(2, 2, 2), 5, "kill:1.1@1", "rejoin:1.1@2", "kill:0.0@3.step", directory=directory)
    assert [kinds(struck).count(kind) for kind in ("detected", "rejoined", "recovered")] == [2, 1, 2]
    resumed = launch(muon(1, 2, 4), STEPS, directory=directory, resume=True)
    whole = muon(1, 1, 4)
    calm = LocalRun(with_barrier(one_f_one_b(whole.shape)), whole)
    assert figures(resumed) == figures(calm.run(STEPS))
    last = stored(folder_of(directory / "checkpoints", STEPS - 1))
    require_equal(last, state_of(calm))
    layer = "decoder.layers.1.self_attention."
    assert {name for name in last if name.endswith(f"{layer}linear_qkv.weight")} == {
        f"{prefix}{layer}linear_qkv.weight" for prefix in ("", "momentum_buffer.", "step.")
    }
    assert f"exp_avg_sq.{layer}linear_proj.weight" in last
    assert not export_model(folder_of(directory / "checkpoints", STEPS - 1), tmp_path / "exported").moments
    with pytest.raises(
        JobError, match=r"another model, batch or optimizer, .* \[train\] optimizer is None, there muon"
    ):
        launch(job(1, 2, 4, kind="gpt", model={"layers": 2}), 9, directory=directory, resume=True)


def test_groups_change_the_parameters_they_name_only():
    """A group without a rate leaves its parameters as they were."""
    fixed = GroupSection(["decoder.layers.2.*", "*word_embeddings*"], learning_rate_scale=0.0)
    before, after = (
        LocalRun(zb_h1(tested.shape), tested) for tested in [small_job(train={"groups": [fixed], "warmup": 0})] * 2
    )
    after.run(2)
    changed = {
        name
        for old, new in zip(stages_of(before), stages_of(after), strict=True)
        for name in old.parameters
        if not torch.equal(old.parameters[name], new.parameters[name])
    }
    names = {name for stage in stages_of(before) for name in stage.parameters}
    assert names - changed == {name for name in names if ".layers.2." in name or "word_embeddings" in name}


def stages_of(run: LocalRun):
    return [stage for stages in run.stages.values() for stage in stages.values()]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"optimizer": "muon", "sharded_optimizer": True},
            r'"muon" needs whole matrices, .* sharded_optimizer = false$',
        ),
        ({"optimizer": "muon"}, r'"muon" needs whole matrices, .* \[shape\] tensor_parallel = 1$'),
        ({"optimizer": "torch.optim:AdamW"}, "torch.optim:AdamW is not a class derived from recycle.exec.Optimizer$"),
        ({"optimizer": "torch.optim:Lyon"}, 'torch.optim has no "Lyon"'),
    ],
)
def test_optimizers_that_cannot_work_are_refused_before_the_run(keys, message):
    tested = small_job(2, tensor_parallel=1 if len(keys) > 1 else 2, train=keys)
    with pytest.raises(JobError, match=rf"^\[train\] optimizer: {message}"):
        require_startable(tested)


def test_patterns_must_match_a_parameter_of_any_layer():
    """A model of four layers, with its head; the message names what the pattern resembles."""
    right = GroupSection(["decoder.layers.3.*", "output_layer.weight"], weight_decay=0.0)
    layers = {"kind": "llama", "rotary_scaling": RotaryScaling(4.0, "yarn"), "config": {"no_rope_freq": [0, 0, 1, 0]}}
    for model in ({}, layers):
        require_startable(small_job(model=model, train={"groups": [right]}))
    wrong = GroupSection(["*.mlp.*", "decoder.layers.?.mpl.linear_fc1.weight"])
    message = r'^\[train\] groups\[1\].parameters: "decoder.* matches no .* decoder.layers.\d.mlp.linear_fc1.weight'
    with pytest.raises(JobError, match=message):
        require_startable(small_job(train={"groups": [right, wrong]}))
    check_request(small_job(train={"groups": [wrong]}), 1, (), frozenset(), Providers(model=lambda *_, **__: None))
