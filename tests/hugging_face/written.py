"""Models of Hugging Face, written by hand or by transformers with weights that tell, and what recycle makes of them."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recycle.exec.model.build import build_stages
from recycle.hugging_face.architectures import model_of
from recycle.hugging_face.conversion import import_model
from recycle.hugging_face.correspondence import blocks
from recycle.job import Job

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def tensors_of(config) -> dict[str, torch.Tensor]:
    """Random tensors of a model, fp32."""
    generator = torch.Generator().manual_seed(1)
    shapes = {block.theirs: block.their_shape for block in blocks(model_of(config, "config.json"))}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_model(folder: Path, config: dict[str, Any] | None = None, shards=1, **changes) -> Path:
    """Write a folder with `config`, which `changes` add to, and its tensors in so many files."""
    config = (config or LLAMA) | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, tensors_of(config), shards)
    return folder


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards=1):
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    files = {name: f"model-{place % shards + 1:05d}-of-{shards:05d}.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in a folder's safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether both have tensors of the same names, types and bits."""
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "truncate": False,
}
GEMMA = {
    "head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
MODELS = {
    "llama": ("Llama", {"rms_norm_eps": 1e-6}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA_3, "head_dim": 16, "num_key_value_heads": 1}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen 2": ("Qwen2", {}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, other constants": ("Llama", {"rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 16}}),
    "qwen 3 yarn": ("Qwen3", {"rope_parameters": YARN}),
    "gemma 3": ("Gemma3", GEMMA),
    "mistral with a window": ("Mistral", {"sliding_window": 7}),
    "qwen 3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen 3 moe": ("Qwen3Moe", {"num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}),
    "qwen 3 moe 30b": (
        "Qwen3Moe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}


@cache
def transformers():
    """The package; the test is skipped where it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    package = pytest.importorskip("transformers")
    package.utils.logging.disable_progress_bar()
    package.utils.logging.set_verbosity_error()
    return package


def hub_model(name: str, **changes):
    """A model of `MODELS`, in fp32; `changes` of its configuration."""
    kind, keys = MODELS[name]
    package = transformers()
    config = getattr(package, f"{kind}{'Text' * (kind == 'Gemma3')}Config")(**SIZES | keys | changes)
    model = getattr(package, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            deviation = 0.2 if parameter.dim() > 1 else 0.1
            parameter.normal_(0.0, deviation, generator=generator)
            if key.endswith("norm.weight") and kind != "Gemma3":
                parameter.add_(1.0)
    return model.eval()


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What transformers makes of the model in a folder and tokens [rows, sequence], in fp32."""
    model = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens).logits


CPU = torch.device("cpu")


def imported(model, **saved) -> Path:
    """Save a model of transformers as `model` and import it as `checkpoint`; gives the folder of the model."""
    model.save_pretrained("model", **saved)
    import_model(Path("model"), Path("checkpoint"))
    return Path("model")


def job_of(weights: Path, ranks=1, chunks=1, more="") -> Job:
    """A job that starts from `weights`, read from a file; `more` adds sections."""
    path = Path("job.toml")
    path.write_text(
        f"[shape]\npipelines = 1\nranks = {ranks}\nmicro_batches = 2\nchunks = {chunks}\n"
        f'[model]\nweights = "{weights}"\nsequence = 24\n{more}\n'
    )
    return Job.load(path)


def our_logits(job: Job, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [rows, sequence, vocabulary] of the job's stages with their initial weights."""
    carried = None
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    for stage in build_stages(job, range(job.shape.stages), CPU).values():
        module = stage._part.module.eval()
        if carried is not None:
            module.set_input_tensor(carried)
        with torch.no_grad():
            carried = module(input_ids=tokens, position_ids=positions, attention_mask=None, labels=None)
    return carried
