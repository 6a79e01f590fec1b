"""Built-in models with fields of `[model.config]` about attention, against megatron-core's own layers."""

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel

from recycle import JobError
from recycle.exec.model.config import transformer_config
from recycle.job.sections import RotaryScaling
from tests.exec.drive import build_pipeline, gradients_by_name, run_pipelines, small_job
from tests.exec.model.megatron_models import PACKED, own_gradients
from tests.exec.model.test_families import sharpened

pytestmark = pytest.mark.slow

YARN = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0, "beta_slow": 1.0}
ROWS = {
    "window": {"config": {"window_size": [3, 0]}},
    "window in some layers": {"config": {"window_size": [3, 0], "window_attn_skip_freq": [1, 1, 0, 1]}},
    "sinks": {"config": {"softmax_type": "learnable"}},
    "softmax off by one": {"config": {"softmax_type": "off-by-one"}},
    "no positions in every fourth layer": {"config": {"no_rope_freq": 4}},
    "norms of length": {"config": {"qk_l2_norm": True}},
    "part of the channels": {"rotary_percent": 0.5},
    "yarn": {"rotary_scaling": RotaryScaling(4.0, "yarn", original_max_position_embeddings=8, beta_fast=4.0)},
    "documents": {"data": PACKED},
    "documents and sinks": {"config": {"softmax_type": "learnable"}, "data": PACKED},
}


@pytest.mark.parametrize("name", ROWS)
def test_gradients_equal_those_of_megatron_cores_layers(name):
    """With its core attention, positions and masks; two stages with unequal numbers of layers."""
    row = dict(ROWS[name])
    data, config = row.pop("data", {}), row.pop("config", {}) | {"num_query_groups": 2}
    job = small_job(
        micro_batches=1,
        model={"kind": "llama", "hidden": 32, "sequence": 16, "split": [1, 3], "config": config} | row,
        data=data,
    )
    stages = build_pipeline(job)
    sharpened(stages)
    loss = run_pipelines([stages], 0, 1)
    gradients, fields = gradients_by_name(stages), transformer_config(job)
    for key, value in YARN.items():
        setattr(fields, f"yarn_{key}", value if name == "yarn" else None)
    if name == "yarn":
        fields.yarn_mscale = fields.yarn_mscale_all_dim = None
        fields.yarn_correction_range_round_to_int = True
    else:
        del fields.yarn_rotary_scaling_factor
    whole = GPTModel(
        config=fields,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm", qk_l2_norm=fields.qk_l2_norm),
        vocab_size=job.model.vocabulary,
        max_sequence_length=job.model.sequence,
        position_embedding_type="yarn" if name == "yarn" else "rope",
        rotary_percent=job.model.rotary_percent,
        rotary_base=job.model.rotary_base,
    )
    expected_loss, expected = own_gradients(whole, stages, job)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-4, atol=1e-6, msg=key)


def test_fields_change_the_loss():
    """So that a field that both sides ignore is found."""
    losses = set()
    for row in ({}, *ROWS.values()):
        model = {key: value for key, value in row.items() if key != "data"}
        job = small_job(
            ranks=1,
            micro_batches=1,
            model={"kind": "llama", "hidden": 32, "sequence": 16} | model,
            data=row.get("data", PACKED | {"reset_attention": False, "provider": f"{__name__}:unmasked"}),
        )
        stages = build_pipeline(job)
        sharpened(stages)
        losses.add(run_pipelines([stages], 0, 1))
    assert len(losses) == len(ROWS) + 1


def test_stages_between_the_ends_read_masks():
    jobs = [small_job(ranks=ranks, micro_batches=2, model={"sequence": 16}, data=PACKED) for ranks in (1, 4)]
    assert len({run_pipelines([build_pipeline(job)], 0, 2) for job in jobs}) == 1


def unmasked(job):
    from tests.exec.model.megatron_models import packed

    batch = packed(job)
    return lambda *numbers: {name: part for name, part in batch(*numbers).items() if name != "attention_mask"}


@pytest.mark.parametrize("window", [[3, 1], [-1, 0], [3]])
def test_windows_that_are_not_causal_are_refused(window):
    with pytest.raises(JobError, match=r"^\[model.config\] window_size: "):
        transformer_config(small_job(model={"config": {"window_size": window}}))
