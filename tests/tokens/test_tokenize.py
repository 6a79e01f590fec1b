"""Text to token files: documents in pieces, their tokens, and files byte for byte as megatron-core writes them."""

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from recycle import JobError, RecycleError
from recycle.tokens import tokenize as module
from recycle.tokens.token_files import UINT16_VOCABULARY, TokenFiles
from recycle.tokens.tokenize import PIECE_BYTES, documents, tokenize
from tests.tokens.tokenizers import WORDS, saved_tokenizer


def test_documents_are_tokenized_with_end_tokens(tmp_path):
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
def test_end_token_comes_from_the_models_folder(tmp_path, eos):
    model = saved_tokenizer(tmp_path / "model", eos)
    (tmp_path / "a.txt").write_text("the worker")
    for tokenizer in (model, model / "tokenizer.json"):
        assert tokenize([tmp_path / "a.txt"], tmp_path / "out", tokenizer).eod == 0
    assert tokenize([tmp_path / "a.txt"], tmp_path / "out", model, eod=None).eod is None
    assert tokenize([tmp_path / "a.txt"], tmp_path / "out", model, eod="e").eod is not None


def test_bad_tokenizers_and_sources_are_one_line_and_leave_nothing(tmp_path):
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
        ([text], tmp_path / "none.json", None, "none.json: does not exist"),
        ([text], tmp_path / "out", None, "tokenizer.json: does not exist; the folder has no fast tokenizer"),
        ([text], broken, None, "broken.json: is not a tokenizer of Hugging Face"),
        ([text], pointer, None, "pointer.json: .*git lfs pull"),
        ([pointer], model, None, "pointer.json: .*git lfs pull"),
        ([text], model, "auto", "states no token that ends a document; give it with --eod"),
        ([text], model, "<none>", "has no token '<none>'; give one of its tokens with --eod"),
        ([empty], model, None, "not written: no text in"),
        ([text, tmp_path / "gone.txt"], model, None, "gone.txt: cannot be read"),
    ):
        with pytest.raises((JobError, RecycleError), match=message) as error:
            tokenize(sources, tmp_path / "out" / "x", tokenizer, eod=eod)
        assert "\n" not in str(error.value)
    assert not list((tmp_path / "out").iterdir())


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_each_json_line_is_a_document(tmp_path, name):
    lines = b'{"text": "first", "id": 1}\n\n{"meta": {"text": "no"}, "text": "second"}\n{"text": ""}'
    pieces = list(documents(written(tmp_path, name, lines), "text"))
    assert [(piece.text, piece.ends) for piece in pieces] == [("first", True), ("second", True), ("", True)]


@pytest.mark.parametrize("name", ["a.txt", "README", "a.txt.gz"])
def test_text_pieces_end_at_line_ends(tmp_path, name):
    text = "".join(f"line {number} of a long text\n" + "\n" * (number % 3) for number in range(40_000))
    pieces = list(documents(written(tmp_path, name, text.encode()), "text"))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) == -(-len(text) // PIECE_BYTES) + 1
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for before, after in itertools.pairwise(pieces):
        assert before.text.endswith("\n")
        assert after.text[:1] in ("l", "")


@settings(max_examples=200)
@given(st.text(alphabet=["a", "\n", " ", "é", "你", "🚀"], max_size=60), st.integers(4, 12))
def test_pieces_of_any_size_give_the_text(tmp_path_factory, text, size):
    path = written(tmp_path_factory.mktemp("text"), "a.txt", text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", size)
        pieces = list(documents(path, "text"))
    assert "".join(piece.text for piece in pieces) == text
    assert all(len(piece.text.encode()) <= size for piece in pieces)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"txt": "y"}\n',
            r"a\.jsonl: line 2: .*`text`; each line is an object with a text under",
        ),
        ("a.jsonl", b'{"text": "x"}\n["y"]\n', r"a\.jsonl: line 2: Expected `object`, got `array`"),
        ("a.jsonl", b'{"text": "x"', r"a\.jsonl: line 1: .*truncated"),
        ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl: line 1: "),
        ("a.txt", b"good\n" * 100_000 + b"\xff\n", r"a\.txt: is not UTF-8 text \(byte 500000\)"),
    ],
)
def test_invalid_document_is_refused_with_its_place(tmp_path, name, content, message):
    with pytest.raises(JobError, match=message) as error:
        list(documents(written(tmp_path, name, content), "text"))
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(JobError, match=r"none\.txt: cannot be read \(No such file or directory\)"):
        list(documents(tmp_path / "none.txt", "text"))
    path = tmp_path / "a.txt.gz"
    path.write_bytes(b"not packed")
    with pytest.raises(JobError, match=r"a\.txt\.gz: cannot be read \(Not a gzipped file"):
        list(documents(path, "text"))
    path.write_bytes(gzip.compress(b"text\n" * 1000)[:-20])
    with pytest.raises(JobError, match=r"a\.txt\.gz: cannot be read \(Compressed file ended"):
        list(documents(path, "text"))


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_LINE_BYTES", 1 << 20)
        with pytest.raises(JobError, match=r"line 1 is longer than 1 MiB; cut it into documents"):
            list(documents(written(tmp_path, "a.jsonl", b"x" * (2 << 20)), "text"))


@pytest.mark.parametrize("vocabulary", [256, UINT16_VOCABULARY - 1, UINT16_VOCABULARY, 128_256])
def test_the_files_are_those_of_megatron_core(tmp_path, vocabulary):
    documents = [[1, 2, 3], [vocabulary - 1], list(range(200)), [7] * 70_000]
    with TokenFiles(tmp_path / "ours", vocabulary) as files:
        for tokens in documents:
            files.add(tokens[:2])
            files.add(tokens[2:])
            files.end_document()
    builder = IndexedDatasetBuilder(f"{tmp_path / 'theirs'}.bin", dtype=DType.optimal_dtype(vocabulary))
    for tokens in documents:
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{tmp_path / 'theirs'}.idx")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    assert (files.documents, files.tokens) == (4, 70_204)
    assert [list(each) for each in IndexedDataset(str(tmp_path / "ours"))] == documents
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.bin", "ours.idx", "theirs.bin", "theirs.idx"]


def test_many_documents_are_indexed(tmp_path):
    count = 3 * 2**16 + 5
    with TokenFiles(tmp_path / "many", 256) as files:
        for number in range(count):
            files.add([number % 256] * (1 + number % 3))
            files.end_document()
    dataset = IndexedDataset(str(tmp_path / "many"))
    assert len(dataset) == count
    assert np.array_equal(dataset.index.sequence_lengths, 1 + np.arange(count) % 3)
    assert list(dataset[count - 1]) == [(count - 1) % 256] * (1 + (count - 1) % 3)
    assert np.array_equal(dataset.document_indices, np.arange(count + 1))


def test_empty_document_is_dropped(tmp_path):
    with TokenFiles(tmp_path / "few", 256) as files:
        files.end_document((9,))
        files.add([1])
        files.end_document((9,))
        files.end_document((9,))
    assert [list(each) for each in IndexedDataset(str(tmp_path / "few"))] == [[1, 9]]


def test_failed_files_are_removed(tmp_path):
    def interrupted():
        with TokenFiles(tmp_path / "half", 256) as files:
            files.add([1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())
    with pytest.raises(RecycleError, match=r"no/where\.bin: cannot be written \(No such file or directory\)"):
        TokenFiles(tmp_path / "no" / "where", 256)
