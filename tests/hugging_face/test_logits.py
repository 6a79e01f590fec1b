"""Models of transformers, imported: the same logits and gradients, and exports with the same bits."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy

from recycle.exec.checkpoint.checkpoint import verify_files, write_manifest
from recycle.exec.data.loading import load_batches
from recycle.hugging_face.conversion import export_model, import_model
from recycle.hugging_face.correspondence import blocks
from recycle.job.sections import RotaryScaling
from tests.cli.conftest import working_directory as working_directory
from tests.exec.checkpoint.test_checkpoint import store
from tests.exec.drive import build_pipeline, gradients_by_name, run_pipelines, small_job
from tests.exec.model.test_families import sharpened
from tests.exec.tensor_workers import in_halves
from tests.hugging_face.written import MODELS, hub_model, imported, job_of, logits_of, our_logits, same_bits, stored
from tests.tokens.tokenizers import saved_tokenizer

pytestmark = pytest.mark.slow

TOKENS = torch.arange(48).reshape(2, 24) * 7 % 256
CHECKPOINT, BACK = Path("checkpoint"), Path("back")
LOGITS_WITHIN = 1e-5


def there_and_back(model, **saved) -> Path:
    """Save a model, import and export it; gives the folder that it was saved in."""
    folder = imported(model, **saved)
    export_model(CHECKPOINT, BACK)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_imported_models_have_the_logits_of_transformers_and_are_exported_as_they_were(name):
    model = hub_model(name)
    folder = there_and_back(model, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert same_bits(stored(BACK), stored(folder))
    assert (BACK / "config.json").read_text() == (folder / "config.json").read_text()
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert torch.equal(logits_of(BACK, TOKENS), expected)
    result = our_logits(job_of(CHECKPOINT), TOKENS)
    assert float((result - expected).abs().max()) <= LOGITS_WITHIN
    assert float(expected.std()) > 1
    assert torch.equal(our_logits(job_of(CHECKPOINT, ranks=2, chunks=2), TOKENS), result)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_transformers(name):
    model = hub_model(name).train()
    imported(model)
    job = job_of(
        CHECKPOINT,
        more="[model.config]\nmoe_aux_loss_coeff = 0.0\n" if hasattr(model.config, "router_aux_loss_coef") else "",
    )
    stages = build_pipeline(job)
    run_pipelines([stages], 0, job.shape.micro_batches)
    batches = load_batches(job)
    for number in range(job.shape.micro_batches):
        batch = batches.batch(0, number)
        losses = cross_entropy(model(batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten())
        (losses / job.shape.micro_batches).backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    gradients = in_halves(gradients_by_name(stages), stages)
    assert gradients.keys() == {block.ours for block in blocks(job.model)}
    for block in blocks(job.model, batched_experts=True):
        gradient = torch.zeros(block.our_shape)
        block.copy_in(gradient, expected[block.theirs][block.their_index])
        index = block.our_index
        ours = gradients[block.ours].view(block.our_view)[index]
        torch.testing.assert_close(ours, gradient.view(block.our_view)[index], rtol=1e-4, atol=1e-6, msg=block.ours)


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "llama", "rotary_scaling": 8.0, "rotary_base": 5e5, "config": {"num_query_groups": 2}},
        {"kind": "qwen", "tied": True},
        {"kind": "llama", "rotary_scaling": RotaryScaling(4.0, "yarn", original_max_position_embeddings=8)},
        {"kind": "gemma", "tied": True, "local_rotary_base": 1e3, "config": {"window_attn_skip_freq": 2}},
        {"kind": "mixtral", "ffn": 40, "config": {"num_moe_experts": 4, "moe_router_topk": 3}},
    ],
    ids=lambda model: model["kind"],
)
def test_transformers_loads_exported_models(model):
    job = small_job(1, 2, 2, model={"layers": 2, "hidden": 32, "heads": 4, "sequence": 24} | model)
    pipeline = build_pipeline(job)
    sharpened(pipeline)
    folder = store(Path.cwd(), job, 0, pipeline)
    result = export_model(folder, Path("exported"))
    assert (result.stored, result.carried) == (("F32",), [])
    theirs = logits_of(Path("exported"), TOKENS)
    ours = our_logits(job_of(folder), TOKENS)
    assert float((ours - theirs).abs().max()) <= LOGITS_WITHIN
    assert float(theirs.std()) > 0.5
    import_model(Path("exported"), Path("again"))
    assert torch.equal(our_logits(job_of(Path("again")), TOKENS), ours)


def test_exported_config_states_longer_sequences():
    imported(hub_model("llama"))
    manifest = verify_files(CHECKPOINT).manifest
    longer = manifest.identity["[model]"] | {"sequence": 80}
    write_manifest(CHECKPOINT, msgspec.structs.replace(manifest, identity={"[model]": longer}))
    export_model(CHECKPOINT, BACK)
    had, has = (json.loads(Path(name, "config.json").read_text()) for name in ("model", "back"))
    assert has == had | {"max_position_embeddings": 80}


@pytest.mark.parametrize("is_legacy", [True, False])
def test_layout_of_experts_is_kept(is_legacy):
    folder = there_and_back(hub_model("mixtral"), save_original_format=is_legacy)
    assert ("model.layers.0.mlp.experts.gate_up_proj" in stored(folder)) is not is_legacy
    assert same_bits(stored(BACK), stored(folder))
    hub_model("mixtral").save_pretrained("other", save_original_format=not is_legacy)
    import_model(Path("other"), Path("of other"))
    assert same_bits(stored(Path("of other")), stored(CHECKPOINT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_kept_bit_for_bit(dtype):
    folder, wide = there_and_back(hub_model("llama").to(dtype)), Path("wide")
    assert same_bits(stored(BACK), stored(folder))
    assert {tensor.dtype for tensor in stored(CHECKPOINT).values()} == {torch.float32}
    assert export_model(CHECKPOINT, wide, "fp32").stored == ("F32",)
    assert same_bits(stored(wide), {name: tensor.float() for name, tensor in stored(folder).items()})
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    assert torch.equal(logits_of(wide, TOKENS), logits_of(folder, TOKENS))


def test_export_copies_the_tokenizer_and_limits_file_sizes():
    folder = Path("model")
    hub_model("qwen 3", vocab_size=320).save_pretrained(folder)
    saved_tokenizer(folder)
    result = import_model(folder, CHECKPOINT)
    assert list(result.carried) == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    assert verify_files(CHECKPOINT).manifest.step == -1
    progress = []
    export_model(CHECKPOINT, BACK, most_bytes=40_000, progress=lambda *bytes: progress.append(bytes))
    for name in result.carried:
        assert (BACK / name).read_bytes() == (folder / name).read_bytes()
    shards = sorted(BACK.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{n:05d}-of-00006.safetensors" for n in range(1, 7)]
    assert max(path.stat().st_size for path in shards[1:]) < 41_000  # the embedding alone is larger
    assert progress[-1] == (result.parameters * 4, result.parameters * 4)
    index = json.loads((BACK / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result.parameters * 4
    assert same_bits(stored(BACK), stored(folder))
    assert torch.equal(logits_of(BACK, TOKENS), logits_of(folder, TOKENS))
