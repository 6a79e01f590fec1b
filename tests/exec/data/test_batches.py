"""The corpus: the same micro-batch for whoever asks, and one clear line for what cannot be read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from recycle import Job, JobError
from recycle.exec.data.batches import Corpus, Text, load_corpus
from recycle.job.sections import DataSection, ModelSection, ShapeSection


def job(path: Path | None = None, **model: int) -> Job:
    return Job(
        grid=ShapeSection(2, 2, 4),
        model=ModelSection(**({"sequence": 16} | model)),
        data=DataSection(path=None if path is None else str(path), micro_batch_size=3),
    )


def corpus(folder: Path, text: bytes, sequence: int, micro_batch_size: int, seed: int = 0) -> Corpus:
    file = folder / "text"
    file.write_bytes(text)
    return Corpus(Text([file]), sequence, micro_batch_size, seed)


def test_a_batch_depends_on_seed_iteration_and_micro_batch_only(tmp_path: Path) -> None:
    text = bytes(range(256)) * 40
    first, second = (corpus(tmp_path, text, sequence=16, micro_batch_size=3, seed=5) for _ in range(2))
    first.batch(0, 0)
    for wanted in ((0, 0), (3, 7), (100, 11)):
        assert all(map(torch.equal, first.batch(*wanted).values(), second.batch(*wanted).values()))
    others = [first.batch(0, 1), first.batch(1, 0), corpus(tmp_path, text, 16, 3, seed=6).batch(0, 0)]
    assert not any(torch.equal(first.batch(0, 0)["tokens"], other["tokens"]) for other in others)


def test_the_draw_is_the_same_on_every_machine(tmp_path: Path) -> None:
    tokens, _ = corpus(tmp_path, bytes(range(200)), sequence=4, micro_batch_size=2).batch(7, 3).values()
    assert tokens.tolist() == [[88, 89, 90, 91], [109, 110, 111, 112]]


def test_a_label_is_the_token_that_follows(tmp_path: Path) -> None:
    tokens, labels = corpus(tmp_path, bytes(range(100)), sequence=16, micro_batch_size=3).batch(0, 0).values()
    assert tokens.shape == labels.shape == (3, 16)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, tokens + 1)


def test_a_folder_is_read_in_sorted_order_without_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second " * 10)
    (tmp_path / "a.txt").write_bytes(b"first " * 10)
    (tmp_path / "sub" / "c.txt").write_bytes(b"third " * 10)
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    expected = b"second " * 10
    whole = hashlib.sha256(b"first " * 10 + expected + b"third " * 10).hexdigest()
    assert load_corpus(job(tmp_path)).digest == whole
    assert load_corpus(job(tmp_path / "b.txt")).digest == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"", "no text in"), (b"too short", "9 bytes of text, but one row needs 17")],
)
def test_a_missing_empty_or_short_text_is_one_clear_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError, match=message) as error:
        load_corpus(job(path))
    assert str(error.value).startswith("[data] path: ")
    assert "\n" not in str(error.value)


def test_a_vocabulary_smaller_than_a_byte_is_an_error() -> None:
    with pytest.raises(JobError, match=r"\[model\] vocabulary: .* at least 256, got 128"):
        load_corpus(job(vocabulary=128))
