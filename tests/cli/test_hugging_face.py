"""`recycle import-hf` and `recycle export-hf`."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.cli.command import Command
from tests.hugging_face.written import same_bits, stored, write_model, write_tensors
from tests.tokens.tokenizers import saved_tokenizer


def test_a_model_goes_in_and_comes_out(command: Command, tmp_path: Path) -> None:
    folder, checkpoint, back = tmp_path / "model", tmp_path / "checkpoint", tmp_path / "back"
    write_model(folder, vocab_size=300)
    write_tensors(folder, {name: tensor.bfloat16() for name, tensor in stored(folder).items()})
    saved_tokenizer(folder)
    lines = command("import-hf", folder, "-o", checkpoint).out.splitlines()
    assert lines == [
        f"{checkpoint}: LlamaForCausalLM, 5,800 parameters, converted from bfloat16 to float32",
        "kept beside them: tokenizer.json, tokenizer_config.json",
        f'start from it with [model] weights = "{checkpoint}"',
    ]
    lines = command("export-hf", checkpoint, "-o", back).out.splitlines()
    assert lines == [
        f"{back}: LlamaForCausalLM, 5,800 parameters in bfloat16, rounded from float32 (--dtype fp32 keeps every bit)",
        "beside them: config.json, tokenizer.json, tokenizer_config.json",
        f'load it with transformers: AutoModelForCausalLM.from_pretrained("{back}")',
    ]
    assert same_bits(stored(back), stored(folder))
    wide = command(
        "export-hf", checkpoint, "-o", tmp_path / "wide", "--dtype", "fp32", "--shard-size", "8 KB", "--json"
    )
    carried = ["tokenizer.json", "tokenizer_config.json"]
    told = {"architecture": "LlamaForCausalLM", "parameters": 5800, "dtype": "float32", "carried": carried}
    assert wide.json == {"folder": str(tmp_path / "wide")} | told
    assert {tensor.dtype for tensor in stored(tmp_path / "wide").values()} == {torch.float32}


def test_json_says_what_was_imported(command: Command, tmp_path: Path) -> None:
    found = command("import-hf", write_model(tmp_path / "model"), "-o", tmp_path / "checkpoint", "--json")
    told = {"architecture": "LlamaForCausalLM", "parameters": 1640, "stored": ["float32"], "carried": []}
    assert found.json == {"checkpoint": str(tmp_path / "checkpoint")} | told


def test_bad_input_is_one_line(command: Command, tmp_path: Path) -> None:
    folder, target = write_model(tmp_path / "model"), tmp_path / "target"
    assert command("import-hf", tmp_path / "none", "-o", target).refused("none: there is no such folder")
    assert command("import-hf", folder, "-o", folder).refused("model: exists already; remove it, or choose another")
    assert command("import-hf", folder, "-o", tmp_path / "no" / "x").refused("x: cannot be written (No such file or")
    gemma = write_model(tmp_path / "gemma", num_hidden_layers=1)
    text = (gemma / "config.json").read_text().replace("LlamaFor", "GemmaFor")
    (gemma / "config.json").write_text(text)
    assert command("import-hf", gemma, "-o", target).refused("architectures: 'GemmaForCausalLM' is not supported")
    assert command("export-hf", folder, "-o", target).refused("model: is no checkpoint, it has no manifest.json")
    assert command("export-hf", folder, "-o", target, "--shard-size", "big").refused("--shard-size: 'big'")
    assert not target.exists()
