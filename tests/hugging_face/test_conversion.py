"""Models that are not what they should be, and conversions that are broken off."""

import gc
import json
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recycle import JobError, RecycleError
from recycle.exec.checkpoint.checkpoint import verify_files
from recycle.hugging_face import conversion
from recycle.hugging_face.conversion import export_model, import_model
from tests.hugging_face.written import LLAMA, same_bits, stored, tensors_of, write_model, write_tensors
from tests.tokens.tokenizers import saved_tokenizer
from tests.warm import ANSWER_SECONDS, WarmProcess, run_recycle

FIRST, INDEX = "model-00001-of-00003.safetensors", "model.safetensors.index.json"


def without(folder: Path, name: str):
    write_tensors(folder, {key: tensor for key, tensor in tensors_of(LLAMA).items() if key != name})


def replaced(folder: Path, name: str, tensor: torch.Tensor):
    write_tensors(folder, tensors_of(LLAMA) | {name: tensor})


def config(folder: Path, **changes):
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))


def names_a_file(folder: Path, name: str):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))


def pickled(folder: Path):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
"""What a clone without Git LFS has in place of a large file."""
WRONG = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json: cannot be read \(No such file"),
    "config cut off": (lambda f: (f / "config.json").write_text("{"), r"config.json: not valid JSON, perhaps cut off"),
    "config no object": (lambda f: (f / "config.json").write_text("[]"), r"config.json: does not hold a JSON object"),
    "heads": (lambda f: config(f, num_key_value_heads=3), r"config.json: \[model.config\] num_query_groups: 3 groups"),
    "shard missing": (lambda f: (f / FIRST).unlink(), rf"{FIRST}: missing, though {INDEX} names it; fetch it"),
    "shard cut off": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-1]),
        rf"{FIRST}: cannot be read as safetensors \(.*incomplete.*\); fetch it again",
    ),
    "index elsewhere": (
        lambda f: names_a_file(f, "../x"),
        r"weight_map: '../x' is not the name of a file in the folder",
    ),
    "shard is a pointer": (
        lambda f: (f / FIRST).write_bytes(POINTER),
        rf"{FIRST}: is a pointer of Git LFS.*git lfs pull",
    ),
    "shards without index": (lambda f: (f / INDEX).unlink(), rf"has {FIRST} but not {INDEX}"),
    "not a number": (
        lambda f: replaced(f, "model.norm.weight", torch.full((8,), float("nan"))),
        r"safetensors: model.norm.weight has values that are NaN",
    ),
    "pickles": (pickled, r"has no weights, model.safetensors or .*; it has pickle files only"),
    "endless": (lambda f: config(f, num_hidden_layers=2**31 - 1), r"has no tensor model.layers.2.input_layernorm.wei"),
    "fewer layers": (
        lambda f: config(f, num_hidden_layers=1),
        r"has a tensor model.layers.1.\S+, which a model of this",
    ),
    "another width": (
        lambda f: config(f, intermediate_size=16),
        r"model.layers.0.mlp.gate_proj.weight is \[12, 8\], and by config.json it is \[16, 8\]",
    ),
    "tensor missing": (lambda f: without(f, "lm_head.weight"), r"has no tensor lm_head.weight, which a model of this"),
    "tensor extra": (
        lambda f: replaced(f, "model.layers.0.self_attn.q_proj.bias", torch.zeros(8)),
        r"has a tensor model.layers.0.self_attn.q_proj.bias, which a model of this config.json does not have",
    ),
    "tensor quantized": (
        lambda f: replaced(f, "model.norm.weight", torch.zeros(8, dtype=torch.int8)),
        r"model.norm.weight is I8; F32, BF16, F16 are supported",
    ),
    "tensor twice": (lambda f: save_file(stored(f), f / FIRST), r"has the tensor \S+, which model-\S+ has too"),
    "tokenizer too large": (
        lambda f: saved_tokenizer(write_model(f, vocab_size=299)),
        r"tokenizer.json: has 300 tokens, and the model's vocabulary is 299",
    ),
    **{
        f"tokenizer {content}": (
            lambda f, content=content: (f / "tokenizer.json").write_text(content),
            r"tokenizer.json: (not valid JSON|Expected|Object missing)",
        )
        for content in ("{", '{"model": {"vocab": 3}}')
    },
    "tied to another": (lambda f: config(f, tie_word_embeddings=True), r"lm_head.weight is not the embedding, though"),
}


@pytest.mark.parametrize(("spoil", "complaint"), WRONG.values(), ids=WRONG)
def test_refused_import_leaves_no_files(spoil, complaint, tmp_path):
    folder = write_model(tmp_path / "model", shards=3)
    spoil(folder)
    with pytest.raises(JobError, match=complaint):
        import_model(folder, tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tokenizer_may_fill_the_vocabulary(tmp_path):
    import_model(saved_tokenizer(write_model(tmp_path / "model", vocab_size=300)), tmp_path / "checkpoint")


def test_redundant_tensors_are_dropped(tmp_path):
    folder = write_model(tmp_path / "model", tie_word_embeddings=True)
    tensors = stored(folder)
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    write_tensors(folder, tensors | more | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    import_model(folder, tmp_path / "checkpoint")
    export_model(tmp_path / "checkpoint", tmp_path / "back")
    assert same_bits(stored(tmp_path / "back"), tensors)


def test_mixed_types_are_exported_in_the_widest(tmp_path):
    folder = write_model(tmp_path / "model")
    tensors = {name: t.bfloat16() if t.dim() > 1 else t for name, t in stored(folder).items()}
    write_tensors(folder, tensors)
    assert import_model(folder, tmp_path / "checkpoint").stored == ("BF16", "F32")
    export_model(tmp_path / "checkpoint", tmp_path / "back")
    assert same_bits(stored(tmp_path / "back"), {name: tensor.float() for name, tensor in tensors.items()})


def test_refused_export_leaves_no_files(tmp_path):
    folder, checkpoint = write_model(tmp_path / "model"), tmp_path / "run" / "checkpoints" / "step-00000004"
    checkpoint.parent.mkdir(parents=True)
    big = tensors_of(LLAMA)
    big["model.norm.weight"][0] = 1e6
    write_tensors(folder, big)
    import_model(folder, checkpoint)
    target = tmp_path / "back"
    with pytest.raises(
        JobError, match=r"run: is not a checkpoint, .*; give one of its checkpoints, such as \S+/step-0+4$"
    ):
        export_model(tmp_path / "run", target)
    with pytest.raises(RecycleError, match=r"model.norm.weight: has numbers beyond the range of fp16"):
        export_model(checkpoint, target, "fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]
    note = checkpoint / "huggingface" / "import.json"
    for spoiled, complaint in (('{"dtype": "I8"}', r"dtype: 'I8' is none of F32"), ('{"dtype": 1}', r"Expected `str`")):
        note.write_text(spoiled)
        with pytest.raises(JobError, match=rf"import.json: {complaint}"):
            export_model(checkpoint, target)
    weights = checkpoint / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(RecycleError, match=r"weights.safetensors: cut off"):
        export_model(checkpoint, target)


def test_import_holds_at_most_one_file_of_weights(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model", num_hidden_layers=12)
    monkeypatch.setattr(conversion, "PART_BYTES", 4096)
    most = 0

    def look(*_):
        nonlocal most
        held = {t.untyped_storage().data_ptr(): t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor}
        most = max(most, sum(held.values()))

    gc.collect()
    look()
    before, most = most, 0
    result = import_model(folder, tmp_path / "checkpoint", look)
    assert len(verify_files(tmp_path / "checkpoint").manifest.files) > 5
    assert most - before < 3 * 4096 < result.parameters * 4 / 2


def import_with_a_limit(*arguments: str):
    """A limit on the size of files is a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    run_recycle("import-hf", *arguments)


@pytest.mark.process
def test_full_disk_leaves_no_files(tmp_path):
    folder = write_model(tmp_path / "model", vocab_size=4000)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # which Python 3.11 would leave cut off
    with tempfile.TemporaryFile() as errors:
        arguments, streams = (str(folder), "-o", str(tmp_path / "checkpoint")), {2: errors.fileno()}
        process = WarmProcess(import_with_a_limit, *arguments, streams=streams, environment=environment)
        assert process.wait(ANSWER_SECONDS) == 2
        errors.seek(0)
        last = errors.read().decode().splitlines()[-1]
    assert last.startswith("recycle: ")
    assert "weights.safetensors: cannot be written (" in last
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_config_of_another_model_is_not_exported(tmp_path):
    import_model(write_model(tmp_path / "model"), tmp_path / "checkpoint")
    config(tmp_path / "checkpoint" / "huggingface", rope_theta=5e5)
    with pytest.raises(JobError, match=r"huggingface/config.json: \[model\] rotary_base"):
        export_model(tmp_path / "checkpoint", tmp_path / "back")
    (tmp_path / "checkpoint" / "huggingface" / "config.json").unlink()
    export_model(tmp_path / "checkpoint", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_theta"] == 1e4
