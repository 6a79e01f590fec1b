"""Models of transformers, imported: the same logits, training as with torch's AdamW, and back to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy

from recycle.exec import run
from recycle.exec.checkpoint.checkpoint import verify_files, write_manifest
from recycle.exec.data.loading import load_batches
from recycle.exec.model.state.optimizer import decays
from recycle.hugging_face.conversion import export_model, import_model
from recycle.hugging_face.correspondence import blocks
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.job import Job
from tests.cli.conftest import here as here
from tests.exec.checkpoint.test_checkpoint import store
from tests.exec.drive import build_pipeline, gradients_by_name, run_pipelines, small_job
from tests.exec.model.test_families import sharpened
from tests.exec.tensor_workers import in_halves
from tests.hugging_face.written import MODELS, hub_model, imported, job_of, logits_of, our_logits, same_bits, stored
from tests.tokens.tokenizers import saved_tokenizer

pytestmark = pytest.mark.slow

TOKENS = torch.arange(48).reshape(2, 24) * 7 % 256
CHECKPOINT, BACK = Path("checkpoint"), Path("back")
LOGITS_WITHIN, LOSSES_WITHIN = 1e-5, 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_whatever_the_split(name: str) -> None:
    expected = logits_of(imported(hub_model(name)), TOKENS)
    found = our_logits(job_of(CHECKPOINT), TOKENS)
    assert float((found - expected).abs().max()) <= LOGITS_WITHIN
    assert float(expected.std()) > 1
    for ranks, chunks in ((2, 1), (2, 2)):
        assert torch.equal(our_logits(job_of(CHECKPOINT, ranks, chunks), TOKENS), found)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_transformers(name: str) -> None:
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


TRAIN = """
[train]
schedule = "constant"
warmup = 0
learning_rate = 1e-3
steps = 20
[data]
micro_batch_size = 2
"""


def losses_of(model: Any, job: Job) -> list[float]:
    """What transformers and torch's AdamW make of the job's micro-batches."""
    train, batches = job.train, load_batches(job)
    matrices = [parameter for parameter in model.parameters() if decays(parameter)]
    vectors = [parameter for parameter in model.parameters() if not decays(parameter)]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, train.learning_rate, (train.beta1, train.beta2), train.epsilon)
    count = job.shape.global_micro_batches
    losses = []
    for step in range(train.steps):
        total = 0.0
        for number in range(count):
            batch = batches.batch(step, number)
            logits = model(batch["tokens"]).logits
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            (loss / count).backward()
            total += loss.item() / count
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    "name", ["llama 3.1", *(pytest.param(name, marks=pytest.mark.soak) for name in ("qwen 2", "qwen 3")), "mixtral"]
)
def test_training_goes_on_as_with_transformers_and_torchs_adamw(name: str) -> None:
    model = hub_model(name).train()
    imported(model)
    config = "[model.config]\nmoe_aux_loss_coeff = 0.0\n" if name == "mixtral" else ""
    job = job_of(CHECKPOINT, ranks=2, more=f"{config}{TRAIN}")
    found = run(zb_h1(job.shape), job).losses
    expected = losses_of(model, job)
    assert max(abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)) < LOSSES_WITHIN
    assert found[-1] < found[0] - 0.3
    assert run(one_f_one_b(job.shape), job, steps=3).losses == found[:3]


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "llama", "rotary_scaling": 8.0, "rotary_base": 5e5, "config": {"num_query_groups": 2}},
        {"kind": "qwen", "tied": True},
        {"kind": "mixtral", "ffn": 40, "config": {"num_moe_experts": 4, "moe_router_topk": 3}},
    ],
    ids=lambda model: model["kind"],
)
def test_a_model_that_recycle_drew_is_one_that_transformers_loads(model: dict[str, Any]) -> None:
    job = small_job(1, 2, 2, model={"layers": 2, "hidden": 32, "heads": 4, "sequence": 24} | model)
    pipeline = build_pipeline(job)
    sharpened(pipeline)
    folder = store(Path.cwd(), job, 0, pipeline)
    found = export_model(folder, Path("exported"))
    assert (found.stored, found.carried) == (("F32",), [])
    theirs = logits_of(Path("exported"), TOKENS)
    ours = our_logits(job_of(folder), TOKENS)
    assert float((ours - theirs).abs().max()) <= LOGITS_WITHIN
    assert float(theirs.std()) > 0.5
    import_model(Path("exported"), Path("again"))
    assert torch.equal(our_logits(job_of(Path("again")), TOKENS), ours)


def there_and_back(model: Any, **saved: Any) -> Path:
    """Save a model, import and export it; gives the folder that it was saved in."""
    folder = imported(model, **saved)
    export_model(CHECKPOINT, BACK)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_tensors_config_and_logits_come_back(name: str) -> None:
    model = hub_model(name)
    folder = there_and_back(model, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert same_bits(stored(BACK), stored(folder))
    assert (BACK / "config.json").read_text() == (folder / "config.json").read_text()
    with torch.no_grad():
        assert torch.equal(logits_of(BACK, TOKENS), model(TOKENS).logits)


def test_a_run_with_longer_sequences_than_the_model_had_says_so_in_its_config() -> None:
    imported(hub_model("llama"))
    manifest = verify_files(CHECKPOINT).manifest
    longer = manifest.identity["[model]"] | {"sequence": 80}
    write_manifest(CHECKPOINT, msgspec.structs.replace(manifest, identity={"[model]": longer}))
    export_model(CHECKPOINT, BACK)
    had, has = (json.loads(Path(name, "config.json").read_text()) for name in ("model", "back"))
    assert has == had | {"max_position_embeddings": 80}


@pytest.mark.parametrize("is_legacy", [True, False])
def test_experts_come_back_in_the_layout_that_they_had(is_legacy: bool) -> None:
    folder = there_and_back(hub_model("mixtral"), save_original_format=is_legacy)
    assert ("model.layers.0.mlp.experts.gate_up_proj" in stored(folder)) is not is_legacy
    assert same_bits(stored(BACK), stored(folder))
    hub_model("mixtral").save_pretrained("other", save_original_format=not is_legacy)
    import_model(Path("other"), Path("of other"))
    assert same_bits(stored(Path("of other")), stored(CHECKPOINT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_comes_back_to_the_bit_and_is_kept_in_fp32(dtype: torch.dtype) -> None:
    folder, wide = there_and_back(hub_model("llama").to(dtype)), Path("wide")
    assert same_bits(stored(BACK), stored(folder))
    assert {tensor.dtype for tensor in stored(CHECKPOINT).values()} == {torch.float32}
    assert export_model(CHECKPOINT, wide, "fp32").stored == ("F32",)
    assert same_bits(stored(wide), {name: tensor.float() for name, tensor in stored(folder).items()})
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    assert torch.equal(logits_of(wide, TOKENS), logits_of(folder, TOKENS))


def test_a_tokenizer_goes_along_and_an_export_has_files_of_the_size_asked_for() -> None:
    folder = Path("model")
    hub_model("qwen 3", vocab_size=320).save_pretrained(folder)
    saved_tokenizer(folder)
    found = import_model(folder, CHECKPOINT)
    assert list(found.carried) == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    assert verify_files(CHECKPOINT).manifest.step == -1
    told: list[tuple[int, int]] = []
    export_model(CHECKPOINT, BACK, most_bytes=40_000, progress=lambda *bytes: told.append(bytes))
    for name in found.carried:
        assert (BACK / name).read_bytes() == (folder / name).read_bytes()
    shards = sorted(BACK.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{n:05d}-of-00006.safetensors" for n in range(1, 7)]
    assert max(path.stat().st_size for path in shards[1:]) < 41_000  # the embedding alone is larger
    assert told[-1] == (found.parameters * 4, found.parameters * 4)
    index: dict[str, Any] = json.loads((BACK / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.parameters * 4
    assert same_bits(stored(BACK), stored(folder))
    assert torch.equal(logits_of(BACK, TOKENS), logits_of(folder, TOKENS))
