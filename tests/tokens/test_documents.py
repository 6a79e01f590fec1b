"""Documents: every character of a text in pieces of bounded size, and the line of whatever is no document."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import JobError
from recycle.tokens import documents as module
from recycle.tokens.documents import PIECE_BYTES, documents


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_every_line_is_a_document_whose_other_keys_do_not_matter(tmp_path: Path, name: str) -> None:
    lines = b'{"text": "first", "id": 1}\n\n{"meta": {"text": "no"}, "text": "second"}\n{"text": ""}'
    found = list(documents(written(tmp_path, name, lines), "text"))
    assert [(piece.text, piece.ends) for piece in found] == [("first", True), ("second", True), ("", True)]


def test_the_key_may_be_another(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'{"content": "x", "text": 3}')
    assert [piece.text for piece in documents(path, "content")] == ["x"]


@pytest.mark.parametrize("name", ["a.txt", "README", "a.txt.gz"])
def test_a_text_is_one_document_in_pieces_that_end_where_lines_do(tmp_path: Path, name: str) -> None:
    text = "".join(f"line {number} of a long text\n" + "\n" * (number % 3) for number in range(40_000))
    found = list(documents(written(tmp_path, name, text.encode()), "text"))
    assert "".join(piece.text for piece in found) == text
    assert len(found) == -(-len(text) // PIECE_BYTES) + 1
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    for before, after in itertools.pairwise(found):
        assert before.text.endswith("\n")
        assert after.text[:1] in ("l", "")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=["a", "\n", " ", "é", "你", "🚀"], max_size=60), st.integers(4, 12))
def test_any_text_comes_back_whatever_the_size_of_a_piece(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = written(tmp_path_factory.mktemp("text"), "a.txt", text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", size)
        found = list(documents(path, "text"))
    assert "".join(piece.text for piece in found) == text
    assert all(len(piece.text.encode()) <= size for piece in found)
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"txt": "y"}\n',
            r"a\.jsonl: line 2: .*`text`; each is an object with a text under",
        ),
        ("a.jsonl", b'{"text": "x"}\n["y"]\n', r"a\.jsonl: line 2: Expected `object`, got `array`"),
        ("a.jsonl", b'{"text": "x"', r"a\.jsonl: line 1: .*truncated"),
        ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl: line 1: "),
        ("a.txt", b"good\n" * 100_000 + b"\xff\n", r"a\.txt: is not UTF-8 text \(byte 500000\)"),
    ],
)
def test_what_is_no_document_is_named_with_its_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(JobError, match=message) as error:
        list(documents(written(tmp_path, name, content), "text"))
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"none\.txt: cannot be read \(No such file or directory\)"):
        list(documents(tmp_path / "none.txt", "text"))
    path = tmp_path / "a.txt.gz"
    path.write_bytes(b"not packed")
    with pytest.raises(JobError, match=r"a\.txt\.gz: cannot be read \(Not a gzipped file"):
        list(documents(path, "text"))
    path.write_bytes(gzip.compress(b"text\n" * 1000)[:-20])
    with pytest.raises(JobError, match=r"a\.txt\.gz: cannot be read \(Compressed file ended"):
        list(documents(path, "text"))


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_LINE_BYTES", 1 << 20)
        with pytest.raises(JobError, match=r"line 1 is longer than 1 MiB; cut it into documents"):
            list(documents(written(tmp_path, "a.jsonl", b"x" * (2 << 20)), "text"))
