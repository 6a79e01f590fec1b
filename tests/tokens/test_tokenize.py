"""Tokenizing: the tokens of every document, whatever the pieces, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from recycle import JobError, RecycleError
from recycle.tokens.tokenize import tokenize
from tests.tokens.tokenizers import WORDS, saved_tokenizer


def test_tokens_are_the_tokenizers_with_an_end_behind_each_document(tmp_path: Path) -> None:
    model = saved_tokenizer(tmp_path / "model")
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = ["the worker", "", "été 你好 and\nmore " * 50, "x"] * 400
    lines, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    text.write_text(WORDS * 200)
    assert len(WORDS) * 200 > 300_000
    written = tokenize([lines, text], tmp_path / "out", model)
    end = encoder.token_to_id("<end>")
    expected = [[*encoder.encode(each).ids, end] for each in [*texts, WORDS * 200] if each]
    assert [list(each) for each in IndexedDataset(str(tmp_path / "out"))] == expected
    assert (written.documents, written.eod) == (1201, end)
    assert written.tokens == sum(map(len, expected))
    assert written.vocabulary == encoder.get_vocab_size()


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>", "lstrip": False}])
def test_the_end_is_what_the_models_folder_says(tmp_path: Path, eos: object) -> None:
    model = saved_tokenizer(tmp_path / "model", eos)
    (tmp_path / "a.txt").write_text("the worker")
    for tokenizer in (model, model / "tokenizer.json"):
        assert tokenize([tmp_path / "a.txt"], tmp_path / "out", tokenizer).eod == 0
    assert tokenize([tmp_path / "a.txt"], tmp_path / "out", model, eod=None).eod is None
    assert tokenize([tmp_path / "a.txt"], tmp_path / "out", model, eod="e").eod is not None


def test_progress_counts_the_bytes_of_all_files(tmp_path: Path) -> None:
    model, told = saved_tokenizer(tmp_path / "model"), []
    for name in "ab":
        (tmp_path / name).write_text(WORDS)
    tokenize([tmp_path / "a", tmp_path / "b"], tmp_path / "out", model, progress=lambda *seen: told.append(seen))
    size = len(WORDS.encode())
    assert told[-1] == (tmp_path / "b", 2 * size)
    assert told[0] == (tmp_path / "a", size)


def test_bad_tokenizers_and_sources_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    model = saved_tokenizer(tmp_path / "model", eos=None)
    empty, text = tmp_path / "empty.txt", tmp_path / "a.txt"
    empty.write_text("")
    text.write_text("the worker")
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": "1.0"}')
    pointer = tmp_path / "pointer.json"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (tmp_path / "out").mkdir()
    for sources, tokenizer, eod, message in (
        ([text], tmp_path / "none.json", None, "none.json: there is no such file"),
        ([text], tmp_path / "out", None, "tokenizer.json: there is no such file; it has none of Hugging Face's fast"),
        ([text], broken, None, "broken.json: is not a tokenizer of Hugging Face"),
        ([text], pointer, None, "pointer.json: .*git lfs pull"),
        ([pointer], model, None, "pointer.json: .*git lfs pull"),
        ([text], model, "auto", "does not say which token ends a document; name it with --eod"),
        ([text], model, "<none>", "has no token '<none>'; name one of its own with --eod"),
        ([empty], model, None, "not written, since there is no text in"),
        ([text, tmp_path / "gone.txt"], model, None, "gone.txt: cannot be read"),
    ):
        with pytest.raises((JobError, RecycleError), match=message) as error:
            tokenize(sources, tmp_path / "out" / "x", tokenizer, eod=eod)
        assert "\n" not in str(error.value)
    assert not list((tmp_path / "out").iterdir())
