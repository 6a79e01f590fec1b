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
from tests.hugging_face.hub_models import MODELS, hub_model, logits_of
from tests.hugging_face.written import same_bits, stored
from tests.tokens.tokenizers import saved_tokenizer

pytestmark = pytest.mark.slow

TOKENS = torch.arange(48).reshape(2, 24) % 256


def there_and_back(folder: Path, tmp_path: Path) -> Path:
    import_model(folder, tmp_path / "checkpoint")
    export_model(tmp_path / "checkpoint", tmp_path / "back")
    return tmp_path / "back"


@pytest.mark.parametrize("name", MODELS)
def test_tensors_config_and_logits_come_back(name: str, tmp_path: Path) -> None:
    model, folder = hub_model(name), tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    with torch.no_grad():
        expected = model(TOKENS).logits
    back = there_and_back(folder, tmp_path)
    assert same_bits(stored(back), stored(folder))
    assert (back / "config.json").read_text() == (folder / "config.json").read_text()
    assert torch.equal(logits_of(back, TOKENS), expected)


def test_a_run_with_longer_sequences_than_the_model_had_says_so_in_its_config(tmp_path: Path) -> None:
    hub_model("llama").save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "checkpoint")
    manifest = verify_files(tmp_path / "checkpoint").manifest
    longer = manifest.identity["[model]"] | {"sequence": 80}
    write_manifest(tmp_path / "checkpoint", msgspec.structs.replace(manifest, identity={"[model]": longer}))
    export_model(tmp_path / "checkpoint", tmp_path / "back")
    had, has = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "back"))
    assert has == had | {"max_position_embeddings": 80}


@pytest.mark.parametrize("is_legacy", [True, False])
def test_experts_come_back_in_the_layout_that_they_had(is_legacy: bool, tmp_path: Path) -> None:
    model, folder = hub_model("mixtral"), tmp_path / "model"
    model.save_pretrained(folder, save_original_format=is_legacy)
    names = stored(folder).keys()
    assert ("model.layers.0.mlp.experts.gate_up_proj" in names) is not is_legacy
    back = there_and_back(folder, tmp_path)
    assert same_bits(stored(back), stored(folder))
    other = tmp_path / "other"
    hub_model("mixtral").save_pretrained(other, save_original_format=not is_legacy)
    import_model(other, tmp_path / "of other")
    assert same_bits(stored(tmp_path / "of other"), stored(tmp_path / "checkpoint"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_comes_back_to_the_bit_and_is_kept_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    model, folder = hub_model("llama").to(dtype), tmp_path / "model"
    model.save_pretrained(folder)
    back = there_and_back(folder, tmp_path)
    assert same_bits(stored(back), stored(folder))
    assert {tensor.dtype for tensor in stored(tmp_path / "checkpoint").values()} == {torch.float32}
    wide = tmp_path / "wide"
    assert export_model(tmp_path / "checkpoint", wide, "fp32").stored == ("F32",)
    assert same_bits(stored(wide), {name: tensor.float() for name, tensor in stored(folder).items()})
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    assert torch.equal(logits_of(wide, TOKENS), logits_of(folder, TOKENS))


def test_a_tokenizer_goes_along_and_an_export_has_files_of_the_size_asked_for(tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "model", tmp_path / "checkpoint"
    hub_model("qwen 3", vocab_size=320).save_pretrained(folder)
    saved_tokenizer(folder)
    found = import_model(folder, checkpoint)
    assert list(found.carried) == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    assert verify_files(checkpoint).manifest.step == -1
    told: list[tuple[int, int]] = []
    export_model(checkpoint, tmp_path / "back", most_bytes=40_000, progress=lambda *bytes: told.append(bytes))
    for name in found.carried:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{n:05d}-of-00006.safetensors" for n in range(1, 7)]
    assert max(path.stat().st_size for path in shards[1:]) < 41_000  # the embedding alone is larger
    assert told[-1] == (found.parameters * 4, found.parameters * 4)
    index: dict[str, Any] = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.parameters * 4
    assert same_bits(stored(tmp_path / "back"), stored(folder))
    assert torch.equal(logits_of(tmp_path / "back", TOKENS), logits_of(folder, TOKENS))
