"""The corpus: the same micro-batch for whoever asks, made ahead, and one clear line for what cannot be read."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
import torch

from recycle import Job, JobError, MicroBatch, RunError
from recycle.exec.data.batches import (
    BLOCK,
    DEFAULT_BYTES,
    DIGESTED_BYTES,
    Corpus,
    Text,
    TokenRows,
    load_corpus,
    text_of,
)
from recycle.exec.data.loading import DEPTH, BatchesAhead, load_batches
from recycle.exec.model.build import build_stages
from recycle.exec.worker.interpreter import Interpreter
from recycle.ir.families import one_f_one_b
from recycle.job.sections import DataSection, ModelSection, ShapeSection
from recycle.job.shape import Shape, Worker
from tests.exec.drive import CPU, build_pipeline, small_job


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


def files(folder: Path, *contents: bytes) -> list[Path]:
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def test_any_range_is_read_across_files_empty_ones_included(tmp_path: Path) -> None:
    parts = [b"first", b"", b"second", b"x", b""]
    text, whole = Text(files(tmp_path, *parts)), b"".join(parts)
    assert len(text) == len(whole)
    for start in range(len(whole) + 1):
        for count in range(len(whole) + 2):
            assert text.read(start, count) == whole[start : start + count]


def test_the_default_is_the_first_mebibytes_of_the_standard_library() -> None:
    text = text_of(None)
    assert len(text) == DEFAULT_BYTES
    assert text.digest == text_of(None).digest


def test_long_texts_are_told_apart_by_length_and_by_what_stands_in_their_blocks(tmp_path: Path) -> None:
    size = DIGESTED_BYTES + 5 * BLOCK
    first, second, third = files(tmp_path, b"", b"", b"")
    for path, length in ((first, size), (second, size + 1), (third, size)):
        with path.open("wb") as file:
            file.truncate(length)
    with third.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"x")
    assert len({Text([path]).digest for path in (first, second, third)}) == 3


def test_a_file_that_has_become_shorter_or_is_gone_ends_the_run_with_its_name(tmp_path: Path) -> None:
    paths = files(tmp_path, b"first", b"second")
    text = Text(paths)
    paths[1].write_bytes(b"sec")
    with pytest.raises(RunError, match=r"1\.txt: is 3 bytes shorter than when the run began"):
        text.read(3, 8)
    paths[0].unlink()
    with pytest.raises(RunError, match=r"0\.txt: cannot be read any more"):
        text.read(0, 2)


HERE = threading.main_thread().name


class Recorded(TokenRows):
    """Batches that note who asked for what; iteration 9 cannot be read."""

    digest = "of nothing"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.threads: list[str] = []

    def _rows(self, iteration: int, micro_batch: int) -> torch.Tensor:
        self.asked.append((iteration, micro_batch))
        self.threads.append(threading.current_thread().name)
        if iteration == 9:
            raise RunError("a token is not in the vocabulary")
        return torch.tensor([[iteration, micro_batch, 0]])


def test_batches_are_made_ahead_by_a_thread_and_no_more_than_a_few() -> None:
    batches = Recorded()
    ahead = BatchesAhead(batches, pinned=False)
    keys = [(step, number) for step in (0, 1) for number in (3, 1, 2)]
    ahead.expect(keys)
    for place, key in enumerate(keys):
        tokens, labels = ahead.batch(*key).values()
        assert tokens.tolist() == [list(key)]
        assert labels.tolist() == [[key[1], 0]]
        assert len(batches.asked) <= place + 1 + DEPTH
    assert batches.asked == keys
    assert HERE not in batches.threads


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_worker_computes_on_batches_that_were_made_ahead(recompute: str) -> None:
    of = small_job(1, 1, 3, model={"recompute": recompute, "layers": 1})
    (stage,) = build_pipeline(of)
    batches, threads = stage._data._batches, list[str]()
    rows = batches._rows

    def recorded(iteration: int, micro_batch: int) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return rows(iteration, micro_batch)

    batches._rows = recorded  # type: ignore[method-assign]
    program = one_f_one_b(Shape(1, 1, 3)).program(Worker(0, 0))

    class Nowhere:
        def begin(self, *_: object) -> None:
            return

    interpreter = Interpreter({0: stage}, 1, Nowhere(), lambda _: None)  # type: ignore[arg-type]
    for step in range(2):
        interpreter.begin(program, step)
        for instruction in program[: 2 * 3]:
            interpreter.execute(instruction)
    assert stage.held_micro_batches() == 0
    assert len(threads) >= 2 * 3 * (2 if recompute == "full" else 1)
    assert HERE not in threads
    assert stage.forward(MicroBatch(0, 0), None) is None


def test_stages_in_the_middle_are_built_without_the_data(tmp_path: Path) -> None:
    of = small_job(1, 4, 2, data={"path": str(tmp_path / "missing.txt")})
    assert list(build_stages(of, [1], CPU)) == [1]
    assert list(build_stages(of, [1, 2], CPU)) == [1, 2]
    for ends in ([0], [3], [2, 3]):
        with pytest.raises(JobError, match=r"missing\.txt cannot be read"):
            build_stages(of, ends, CPU)


def test_no_worker_hashes_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def read(text: Text, start: int, count: int) -> bytes:
        asked.append(count)
        return real(text, start, count)

    real = Text.read
    monkeypatch.setattr(Text, "read", read)
    of = small_job()
    batches = load_batches(of)
    build_stages(of, [0, 1], CPU)
    assert asked == []
    batches.batch(0, 0)
    assert asked == [of.model.sequence + 1]
    assert len(batches.digest) == 64
    assert sum(asked[1:]) == 4 << 20
