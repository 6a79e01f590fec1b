"""Models that transformers wrote, imported and exported again: the same tensors to the bit, the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from recycle.exec.checkpoint.checkpoint import verify_files, write_manifest
from recycle.hugging_face.conversion import export_model, import_model
from tests.cli.conftest import here as here
from tests.hugging_face.hub_models import MODELS, hub_model, logits_of
from tests.hugging_face.ours import imported
from tests.hugging_face.written import same_bits, stored
from tests.tokens.tokenizers import saved_tokenizer

pytestmark = pytest.mark.slow

TOKENS = torch.arange(48).reshape(2, 24) % 256


CHECKPOINT, BACK = Path("checkpoint"), Path("back")


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
