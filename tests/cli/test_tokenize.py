"""`recycle tokenize`."""

from __future__ import annotations

from pathlib import Path

from recycle import Job
from recycle.exec.data.indexed import IndexedRows
from recycle.exec.data.loading import load_batches
from tests.cli.command import Command
from tests.tokens.tokenizers import WORDS, saved_tokenizer


def test_what_is_written_is_what_a_job_trains_on(command: Command, tmp_path: Path) -> None:
    model, text = saved_tokenizer(tmp_path / "model"), tmp_path / "a.txt"
    text.write_text(WORDS)
    told = command("tokenize", text, "-o", tmp_path / "corpus", "--tokenizer", model)
    assert "1 documents" in told.out
    assert f'kind = "megatron", path = "{tmp_path / "corpus"}" and [model] vocabulary = 300' in told.out
    batches = load_batches(
        Job.from_toml(
            "[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n[model]\nvocabulary = 300\nsequence = 16\n"
            f'[data]\nkind = "megatron"\npath = "{tmp_path / "corpus"}"\n'
        )
    )
    assert isinstance(batches, IndexedRows)
    batches.require_vocabulary()
    assert batches.batch(0, 0)["tokens"].shape == (1, 16)


def test_json_says_what_was_written(command: Command, tmp_path: Path) -> None:
    model, lines = saved_tokenizer(tmp_path / "model"), tmp_path / "a.jsonl"
    lines.write_text('{"body": "x"}\n{"body": "x"}\n')
    arguments = ("-o", tmp_path / "corpus", "--tokenizer", model, "--key", "body")
    found = command("tokenize", lines, *arguments, "--json").json
    assert found == {"prefix": str(tmp_path / "corpus"), "documents": 2, "tokens": 4, "vocabulary": 300, "eod": 0}


def test_bad_input_is_refused_and_nothing_is_overwritten(command: Command, tmp_path: Path) -> None:
    model, text = saved_tokenizer(tmp_path / "model"), tmp_path / "a.txt"
    text.write_text(WORDS)
    arguments = ("tokenize", text, "-o", tmp_path / "corpus", "--tokenizer", model)
    assert command(*arguments, "--eod", "<end>", "--no-eod").refused("--eod and --no-eod contradict each other")
    assert command("tokenize", tmp_path / "none", *arguments[2:]).refused("none: cannot be read")
    assert command(*arguments[:2], "-o", tmp_path / "no" / "x", *arguments[4:]).refused("no/x.bin: cannot be written")
    (tmp_path / "corpus.idx").write_text("kept")
    assert command(*arguments).refused("corpus.idx: exists already; remove it, or choose another name with -o")
    assert (tmp_path / "corpus.idx").read_text() == "kept"
