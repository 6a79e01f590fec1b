"""Small models of transformers with random weights that tell: no norm is 1, no bias 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-6}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA_3, "head_dim": 16, "num_key_value_heads": 1}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen 2": ("Qwen2", {}),
    "qwen 3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
}


@cache
def transformers() -> Any:
    """The package; the test is skipped where it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    package = pytest.importorskip("transformers")
    package.utils.logging.disable_progress_bar()
    package.utils.logging.set_verbosity_error()
    return package


def hub_model(name: str, **changes: Any) -> Any:
    """A model of `MODELS`, in fp32; `changes` of its configuration."""
    kind, keys = MODELS[name]
    package = transformers()
    config = getattr(package, f"{kind}Config")(**SIZES | keys | changes)
    model = getattr(package, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            deviation = 0.2 if parameter.dim() > 1 else 0.1
            parameter.normal_(0.0, deviation, generator=generator)
            if key.endswith("norm.weight"):
                parameter.add_(1.0)
    return model.eval()


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What transformers makes of the model in a folder and tokens [rows, sequence], in fp32."""
    model = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits
    return found
