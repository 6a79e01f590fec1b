"""`recycle import-hf` and `recycle export-hf`."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.cli.command import Command
from tests.hugging_face.written import same_bits, stored, write_model, write_tensors
from tests.tokens.tokenizers import saved_tokenizer


def test_a_model_goes_in_and_comes_out(command: Command) -> None:
    folder, checkpoint, back = map(Path, ("model", "checkpoint", "back"))
    write_model(folder, vocab_size=300)
    write_tensors(folder, {name: tensor.bfloat16() for name, tensor in stored(folder).items()})
    saved_tokenizer(folder)
    lines = command(f"import-hf {folder} -o {checkpoint}").out.splitlines()
    assert lines == [
        f"{checkpoint}: LlamaForCausalLM, 5,800 parameters, converted from bfloat16 to float32",
        "kept beside them: tokenizer.json, tokenizer_config.json",
        f'start from it with [model] weights = "{checkpoint}"',
    ]
    lines = command(f"export-hf {checkpoint} -o {back}").out.splitlines()
    assert lines == [
        f"{back}: LlamaForCausalLM, 5,800 parameters in bfloat16, rounded from float32 (--dtype fp32 keeps every bit)",
        "beside them: config.json, tokenizer.json, tokenizer_config.json",
        f'load it with transformers: AutoModelForCausalLM.from_pretrained("{back}")',
    ]
    assert same_bits(stored(back), stored(folder))
    wide = command(f"export-hf {checkpoint} -o wide --dtype fp32 --shard-size '8 KB' --json")
    carried = ["tokenizer.json", "tokenizer_config.json"]
    told = {"architecture": "LlamaForCausalLM", "parameters": 5800, "dtype": "float32", "carried": carried}
    assert wide.json == {"folder": "wide"} | told
    assert {tensor.dtype for tensor in stored(Path("wide")).values()} == {torch.float32}


def test_json_says_what_was_imported(command: Command) -> None:
    found = command(f"import-hf {write_model(Path('model'))} -o checkpoint --json")
    told = {"architecture": "LlamaForCausalLM", "parameters": 1640, "stored": ["float32"], "carried": []}
    assert found.json == {"checkpoint": "checkpoint"} | told
