"""`recycle convert`, `tokenize`, `import-hf` and `export-hf`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recycle import Job, Profile, Shape, lower
from recycle.exec.data.indexed import IndexedRows
from recycle.exec.data.loading import load_batches
from recycle.ir.families import one_f_one_b
from tests.hugging_face.written import same_bits, stored, write_model, write_tensors
from tests.tokens.tokenizers import WORDS, saved_tokenizer


def test_timeline_has_simulated_times_and_converts_back(command):
    source, timeline, back = map(Path, ("a.json", "a.trace.json", "b.json"))
    lower(one_f_one_b(Shape(2, 2, 2))).with_metadata(note="kept").save(source)
    Profile(1.0, 3.0, 2.0, latency=0.5).save("profile.json")
    for options in ("", "--times 1,3,2 --comm 0.5", "--profile profile.json", "--overlap 4"):
        simulated = command(f"simulate {source} {options} --json").json
        assert command(f"convert {source} {timeline} {options}").out == f"{timeline}: D=2 P=2 m=2, 40 instructions\n"
        written = json.loads(timeline.read_text())
        assert written["otherData"]["makespan"] == simulated["makespan"]
        assert max(e["ts"] + e["dur"] for e in written["traceEvents"] if e["ph"] == "X") == 1e6 * simulated["makespan"]
        assert command(f"convert {timeline} {back}").status == 0
        assert back.read_bytes() == source.read_bytes()


def test_timeline_to_timeline_is_lossless(command, caplog):
    source, timeline, copy = map(Path, ("a.json", "a.trace.json", "b.trace.json"))
    one_f_one_b(Shape(1, 2, 2)).save(source)
    assert command(f"convert {source} {timeline} --times 1,3,2").status == 0
    assert command(f"convert {timeline} {copy}").status == 0
    assert json.loads(copy.read_text())["traceEvents"] == json.loads(timeline.read_text())["traceEvents"]
    assert caplog.messages == []
    assert command(f"convert {timeline} {source}").status == 0
    assert len(caplog.messages) == 1


@pytest.mark.process
def test_lossy_conversion_warns_on_standard_error():
    one_f_one_b(Shape(1, 2, 2)).save("a.json")
    line = [sys.executable, "-c", "from recycle.cli import main; main()", "convert", "a.json", "a.csv"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == "a.csv: D=1 P=2 m=2, 8 instructions\n"
    assert done.stderr == "a torch CSV cannot hold, and leaves out: metadata (family)\n"


def test_hugging_face_model_is_imported_and_exported(command):
    folder, checkpoint, back = map(Path, ("model", "checkpoint", "back"))
    write_model(folder, vocab_size=300)
    write_tensors(folder, {name: tensor.bfloat16() for name, tensor in stored(folder).items()})
    saved_tokenizer(folder)
    lines = command(f"import-hf {folder} -o {checkpoint}").out.splitlines()
    assert lines == [
        f"{checkpoint}: LlamaForCausalLM, 5,800 parameters, converted from bfloat16 to float32",
        "also kept: tokenizer.json, tokenizer_config.json",
        f'start from it with [model] weights = "{checkpoint}"',
    ]
    lines = command(f"export-hf {checkpoint} -o {back}").out.splitlines()
    assert lines == [
        f"{back}: LlamaForCausalLM, 5,800 parameters in bfloat16, rounded from float32 (--dtype fp32 keeps every bit)",
        "also written: config.json, tokenizer.json, tokenizer_config.json",
        f'load it with transformers: AutoModelForCausalLM.from_pretrained("{back}")',
    ]
    assert same_bits(stored(back), stored(folder))
    wide = command(f"export-hf {checkpoint} -o wide --dtype fp32 --shard-size '8 KB' --json")
    carried = ["tokenizer.json", "tokenizer_config.json"]
    expected = {"architecture": "LlamaForCausalLM", "parameters": 5800, "dtype": "float32", "carried": carried}
    assert wide.json == {"folder": "wide"} | expected
    assert {tensor.dtype for tensor in stored(Path("wide")).values()} == {torch.float32}


def test_import_prints_json(command):
    outcome = command(f"import-hf {write_model(Path('model'))} -o checkpoint --json")
    expected = {"architecture": "LlamaForCausalLM", "parameters": 1640, "stored": ["float32"], "carried": []}
    assert outcome.json == {"checkpoint": "checkpoint"} | expected


def test_job_trains_on_tokenized_files(command):
    saved_tokenizer(Path("model"))
    Path("a.txt").write_text(WORDS)
    outcome = command("tokenize a.txt -o corpus --tokenizer model")
    assert "1 documents" in outcome.out
    assert 'kind = "megatron", path = "corpus" and [model] vocabulary = 300' in outcome.out
    batches = load_batches(
        Job.from_toml(
            "[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n[model]\nvocabulary = 300\nsequence = 16\n"
            '[data]\nkind = "megatron"\npath = "corpus"\n'
        )
    )
    assert isinstance(batches, IndexedRows)
    batches.require_vocabulary()
    assert batches.batch(0, 0)["tokens"].shape == (1, 16)


def test_tokenize_prints_json(command):
    saved_tokenizer(Path("model"))
    Path("a.jsonl").write_text('{"body": "x"}\n{"body": "x"}\n')
    printed = command("tokenize a.jsonl -o corpus --tokenizer model --key body --json").json
    assert printed == {"prefix": "corpus", "documents": 2, "tokens": 4, "vocabulary": 300, "eod": 0}
