"""`recycle tokenize`."""

from __future__ import annotations

from pathlib import Path

from recycle import Job
from recycle.exec.data.indexed import IndexedRows
from recycle.exec.data.loading import load_batches
from tests.cli.command import Command
from tests.tokens.tokenizers import WORDS, saved_tokenizer


def test_what_is_written_is_what_a_job_trains_on(command: Command) -> None:
    saved_tokenizer(Path("model"))
    Path("a.txt").write_text(WORDS)
    told = command("tokenize a.txt -o corpus --tokenizer model")
    assert "1 documents" in told.out
    assert 'kind = "megatron", path = "corpus" and [model] vocabulary = 300' in told.out
    batches = load_batches(
        Job.from_toml(
            "[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n[model]\nvocabulary = 300\nsequence = 16\n"
            '[data]\nkind = "megatron"\npath = "corpus"\n'
        )
    )
    assert isinstance(batches, IndexedRows)
    batches.require_vocabulary()
    assert batches.batch(0, 0)["tokens"].shape == (1, 16)


def test_json_says_what_was_written(command: Command) -> None:
    saved_tokenizer(Path("model"))
    Path("a.jsonl").write_text('{"body": "x"}\n{"body": "x"}\n')
    found = command("tokenize a.jsonl -o corpus --tokenizer model --key body --json").json
    assert found == {"prefix": "corpus", "documents": 2, "tokens": 4, "vocabulary": 300, "eod": 0}
