"""Provided models, data and losses: the bits of recycle's own where these are equal, and refusals."""

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from recycle import Job, JobError, RunError
from recycle.exec import run
from recycle.exec.model import config as model_config
from recycle.exec.model.build import build_stages
from recycle.exec.model.gpt import build_part
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.providers import Providers
from recycle.exec.model.weights import SHARED_WEIGHT
from recycle.ir.families import one_f_one_b, zb_h1
from tests.exec.drive import CPU, differing, gradients_by_name, run_deferred, small_job
from tests.exec.model.megatron_models import FIELDS, PACKED, builder, masked, own_gradients
from tests.exec.model.test_other_layers import Stack
from tests.exec.runs import assert_same_training, job as process_job, kinds, require_startable
from tests.jobs import varied

pytestmark = pytest.mark.slow

OWN = {"hidden": 16, "heads": 2, "sequence": 8, "vocabulary": 256, "layers": 2}


def drawn_by_name(job: Job, first: int, last: int, **ends: bool) -> nn.Module:
    """`Stack`, with weights that do not depend on how the model is split."""
    from recycle.exec.model.weights import initialise

    module = Stack(job, first, last, **ends)
    initialise(module, job.model, first)
    return module


def own_job(**sections) -> Job:
    return small_job(model=OWN | sections.pop("model", {}), **sections)


def megatrons(job: Job, first: int, last: int, pre_process: bool, post_process: bool) -> GPTModel:
    """What recycle builds, as a user's function."""
    stages = [s for s, start in enumerate(starts(job)) if start == first and job.layers_per_stage()[s] == last - first]
    return build_part(job, stages[0])


def starts(job: Job) -> list[int]:
    layers = job.layers_per_stage()
    return [sum(layers[:stage]) for stage in range(len(layers))]


def losses(job: Job, family=one_f_one_b, **given) -> list[float]:
    return run(family(job.shape), job, steps=3, **given).losses


def test_provided_megatron_model_has_the_bits_of_the_built_in_model():
    job = small_job(model={"dropout": 0.0})
    assert losses(job, model=megatrons) == losses(job)


def test_megatron_layers_survive_a_kill_with_the_bits_of_the_calm_run(launch):
    module = "tests.exec.model.megatron_models"
    sections = {
        "model": {"provider": f"{module}:latent_with_experts", "tied": True},
        "data": PACKED,
        "train": {"per_token_loss": True},
    }
    job = process_job(2, 2, 2, kind="gpt", **sections)
    struck = launch(job, 5, "kill:1.1@1.backward", "rejoin:1.1@3")
    assert kinds(struck).count("rejoined") == 1
    assert_same_training(struck, run(one_f_one_b(job.shape), job, steps=5))


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "dropout"])
def test_gradients_equal_those_of_megatron_cores_backward(name):
    """Of the whole model in one graph, without stages, split backward, sums, or replaced classes."""
    model, data = OWN | {"layers": 4, "tied": name == "multi-token prediction"}, PACKED if name == "documents" else {}
    job = small_job(micro_batches=1, model=model, data=data, train={"accumulation": "fast"})
    providers = Providers(builder(name)).merged_with(job)
    stages = [build_stages(job, [index], CPU, providers=providers)[index] for index in range(2)]
    run_deferred(stages, 0, [0])
    loss = stages[-1].loss_sum()
    gradients = {name: gradient for name, gradient in gradients_by_name(stages).items() if "expert_bias" not in name}
    whole = builder(name)(job, 0, 4, pre_process=True, post_process=True)
    expected_loss, expected = own_gradients(whole, stages, job)
    assert loss == expected_loss
    tied = {SHARED_WEIGHT} if job.model.tied else set()  # its two gradients are added in another order
    assert set(differing(gradients, expected)) <= tied
    for shared in tied:
        torch.testing.assert_close(gradients[shared], expected[shared], rtol=1e-5, atol=1e-8)
    assert all(gradient.any() or ".experts." in name for name, gradient in gradients.items())


class Repeated:
    """The same few words in every iteration, so that what is learnt of them shows at once."""

    digest = "repeated"

    def __init__(self, job: Job):
        self.length = job.model.sequence + 1

    def batch(self, iteration: int, micro_batch: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(self.length)[None] + micro_batch) % 4
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


@pytest.mark.parametrize("model", [{}, {"dropout": 0.2}, {"recompute": "full", "dropout": 0.2}])
def test_provided_model_has_the_same_bits_for_every_split_and_schedule(model):
    whole = losses(own_job(ranks=1, model=model), model=drawn_by_name, data=Repeated)
    assert whole[-1] < whole[0]
    for family in (one_f_one_b, zb_h1):
        assert losses(own_job(ranks=2, model=model), family, model=drawn_by_name, data=Repeated) == whole


class Masked:
    """Batches whose mask leaves the first `kept` tokens; the others have labels that no model would guess."""

    def __init__(self, job: Job, kept: int, spoil: bool):
        self.job, self.kept, self.spoil = job, kept, spoil
        self.digest = f"kept {kept}"

    def batch(self, iteration: int, micro_batch: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * iteration + micro_batch)
        tokens = torch.randint(256, (1, self.job.model.sequence + 1), generator=generator)
        mask = torch.arange(self.job.model.sequence)[None] < self.kept
        labels = torch.where(mask, tokens[:, 1:], 7) if self.spoil else tokens[:, 1:]
        return {"tokens": tokens[:, :-1], "labels": labels, "loss_mask": mask}


@pytest.mark.parametrize("model", [None, Stack])
def test_masked_tokens_do_not_count(model):
    job = own_job()
    results = [losses(job, model=model, data=lambda job, spoil=spoil: Masked(job, 5, spoil)) for spoil in (False, True)]
    assert results[0] == results[1]
    assert results[0] != losses(job, model=model, data=lambda job: Masked(job, 8, False))
    assert losses(job, model=model, data=lambda job: Masked(job, 0, False)) == [0.0] * 3


class Joined:
    """The micro-batches of `masked` in one."""

    def __init__(self, job: Job):
        self._batch = masked(varied(job, data={"micro_batch_size": 1}))

    def batch(self, iteration: int, micro_batch: int) -> dict[str, torch.Tensor]:
        parts = [self._batch(iteration, number) for number in range(2)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_per_token_loss_does_not_depend_on_the_cut_into_micro_batches():
    results = {}
    for count, data in ((2, masked), (1, Joined)):
        for per_token in (True, False):
            job = own_job(ranks=2, micro_batches=count, data={"micro_batch_size": 2 // count})
            results[count, per_token] = losses(varied(job, train={"per_token_loss": per_token}), data=data)
    assert results[2, True] == pytest.approx(results[1, True], rel=1e-5)
    assert results[1, True] == pytest.approx(results[1, False], rel=1e-6)
    assert abs(results[2, True][0] - results[2, False][0]) > 1e-3


def test_per_token_loss_refuses_a_loss_that_counts_other_tokens_than_the_mask():
    job = varied(own_job(), train={"per_token_loss": True})
    with pytest.raises(RunError, match=r"\[train\] per_token_loss: .*lambda.* counts 8 tokens, .* loss_mask 2; both"):
        losses(job, data=masked, loss=lambda output, batch: (output.sum(), output.numel()))


def test_provided_loss_returns_sum_and_count():
    job, twice = own_job(), lambda output, batch: (2 * output.sum(), output.numel())
    assert losses(job, loss=twice)[0] == 2 * losses(job)[0]


def bad_sum(output: torch.Tensor, batch: dict[str, torch.Tensor]):
    return output.mean()


def running(job: Job, first: int, last: int, pre_process: bool, post_process: bool) -> nn.Module:
    module = Stack(job, first, last, pre_process, post_process)
    module.layers.append(nn.BatchNorm1d(job.model.sequence))
    return module


def too_wide(job: Job, first: int, last: int, pre_process: bool, post_process: bool) -> nn.Module:
    module = Stack(job, first, last, pre_process, post_process)
    del module.message_shape
    return module


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"loss": bad_sum}, r"\[train\] loss: bad_sum must return a sum, .* it returned Tensor"),
        ({"model": running}, r"\[model\] provider: the forward of stage 0 changes the buffer layers.1."),
        (
            {"model": too_wide},
            r"\[model\] provider: the module of stage 0 returned \[1, 8, 16\] torch.float32, but stages pass"
            r" \[8, 1, 16\]",
        ),
        ({"data": lambda job: lambda i, m: [1]}, r"\[data\] provider: .* returned list as a batch"),
        (
            {"data": lambda job: lambda i, m: {"tokens": 1}},
            r"\[data\] provider: .* a mapping of int as a batch",
        ),
    ],
)
def test_unusable_results_of_providers_are_refused(given, complaint):
    with pytest.raises(RunError, match=f"^{complaint}"):
        losses(own_job(), **given)


def frozen(job: Job, *layers: int, **ends: bool) -> nn.Module:
    module = Stack(job, *layers, **ends)
    module.layers[0][1].weight.requires_grad_(False)
    return module


def predicting(job: Job, *layers: int, **ends: bool) -> nn.Module:
    return builder("multi-token prediction")(job, *layers, **ends)


@pytest.mark.parametrize(
    ("model", "tied", "complaint"),
    [
        (lambda job, *layers, **ends: nn.GELU(), False, "its module has no parameters to train"),
        (lambda job, *layers, **ends: 5, False, "it returned int, not a torch.nn.Module"),
        (lambda job: nn.GELU(), False, r"it cannot be built \(TypeError: .*"),
        (predicting, False, "embedding.word_embeddings.weight is on the first stage, too; write .model. tied = true"),
        (frozen, False, "layers.0.1.weight does not require a gradient"),
        (Stack, True, r"\[model\] tied needs a parameter embedding.word_embeddings.weight, which its module lacks"),
    ],
)
def test_untrainable_module_is_refused(model, tied, complaint):
    with pytest.raises(JobError, match=rf"^\[model\] provider: .*: stage [01]: {complaint}") as refused:
        build_stages(own_job(model={"tied": tied}), [0, 1], CPU, providers=Providers(model))
    assert "\n" not in str(refused.value)


def test_parameter_names_are_unique_in_the_whole_model():
    def bare(job, *layers, **ends):
        return nn.Linear(16, 16)

    layer_names = [f"{place}.{kind}" for place in (0, 1, 3) for kind in ("bias", "weight")]
    names = []
    for model in (Stack, bare):
        stages = build_stages(own_job(), [0, 1], CPU, providers=Providers(model))
        names.append([sorted(stage.parameters) for stage in stages.values() if isinstance(stage, MegatronStage)])
    assert names[0] == [
        ["embedding.weight", *(f"layers.0.{name}" for name in layer_names)],
        ["head.weight", *(f"layers.1.{name}" for name in layer_names)],
    ]
    assert names[1] == [["stages.0.bias", "stages.0.weight"], ["stages.1.bias", "stages.1.weight"]]


def test_function_is_not_both_passed_and_named():
    job = varied(own_job(), train={"loss": "os.path:join"})
    with pytest.raises(JobError, match=r"^\[train\] loss: the job names os.path:join, and another function is passed"):
        losses(job, loss=bad_sum)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"kv_chanels": 8}, r"kv_chanels: .* has no such field; did you mean \"kv_channels\"\?"),
        ({"num_layers": 8}, "num_layers: cannot be set: \\[model\\] layers sets it"),
        ({"fp8": "hybrid"}, "fp8: cannot be set: its scales"),
        (
            {"calculate_per_token_loss": True},
            r"calculate_per_token_loss: cannot be set: \[train\] per_token_loss sets it",
        ),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor: cannot be set: tokens are never dropped"),
        ({"init_method_std": -0.02}, "init_method_std: -0.02 must be a number above 0"),
        ({"layernorm_epsilon": "many"}, "layernorm_epsilon: Expected `float`, got `str`"),
        ({"normalization": "Norm"}, "normalization: Invalid enum value 'Norm'"),
        ({"activation_func": "swish"}, "activation_func: 'swish' is none of gelu, silu"),
        ({"init_method": "normal"}, "init_method: cannot be set: its value is a function"),
        (
            {"moe_router_load_balancing_type": "global_aux_loss"},
            "moe_router_load_balancing_type: .* is none of aux_loss",
        ),
        ({"sequence_parallel": True}, r"sequence_parallel: cannot be set: \[shape\] sequence_parallel sets it"),
    ],
)
def test_unsupported_config_field_is_refused_with_a_reason(config, complaint):
    with pytest.raises(JobError, match=rf"^\[model.config\] {complaint}"):
        require_startable(small_job(model={"config": config}))


def test_config_field_of_a_later_version_is_refused(monkeypatch):
    monkeypatch.setattr(model_config, "_SUPPORTED", model_config._SUPPORTED - {"qk_l2_norm"})
    with pytest.raises(
        JobError, match=r"^\[model.config\] qk_l2_norm: cannot be set: .* this field of megatron-core 0"
    ):
        require_startable(small_job(model={"config": {"qk_l2_norm": True}}))
