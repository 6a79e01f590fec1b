"""The corpus: reproducible micro-batches, made ahead, and one clear line for unreadable data."""

import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recycle import JobError, RunError, Shape, Worker
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
from tests.exec.drive import CPU, build_pipeline, small_job


def corpus(folder: Path, text: bytes, sequence: int, micro_batch_size: int, seed=0) -> Corpus:
    return Corpus(Text(files(folder, text)), sequence, micro_batch_size, seed)


def files(folder: Path, *contents: bytes) -> list[Path]:
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def test_batch_depends_only_on_seed_iteration_and_micro_batch(tmp_path):
    text = bytes(range(256)) * 40
    first, second = (corpus(tmp_path, text, sequence=16, micro_batch_size=3, seed=5) for _ in range(2))
    first.batch(0, 0)
    for wanted in ((0, 0), (3, 7), (100, 11)):
        assert all(map(torch.equal, first.batch(*wanted).values(), second.batch(*wanted).values()))
    others = [first.batch(0, 1), first.batch(1, 0), corpus(tmp_path, text, 16, 3, seed=6).batch(0, 0)]
    assert not any(torch.equal(first.batch(0, 0)["tokens"], other["tokens"]) for other in others)


def test_draw_is_the_same_on_every_machine(tmp_path):
    tokens, _ = corpus(tmp_path, bytes(range(200)), sequence=4, micro_batch_size=2).batch(7, 3).values()
    assert tokens.tolist() == [[88, 89, 90, 91], [109, 110, 111, 112]]


def test_folder_is_read_in_sorted_order_without_binary_files(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, content in (("b", b"second "), ("a", b"first "), ("sub/c", b"third "), ("binary", b"\0\1\2")):
        (tmp_path / name).write_bytes(content)
    assert text_of(str(tmp_path)).digest == hashlib.sha256(b"first second third ").hexdigest()


@pytest.mark.parametrize(
    ("content", "keys", "message"),
    [
        (None, {}, r"\[data\] path: .*cannot be read"),
        (b"", {}, r"\[data\] path: no text in"),
        (b"too short", {}, r"\[data\] path: 9 bytes of text, but one row needs 17"),
        (b"x" * 99, {"vocabulary": 128}, r"\[model\] vocabulary: .* at least 256, got 128"),
    ],
)
def test_unusable_text_is_one_clear_line(tmp_path, content, keys, message):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(JobError, match=message) as error:
        load_corpus(small_job(model={"sequence": 16, **keys}, data={"path": str(tmp_path / "text")}))
    assert "\n" not in str(error.value)


def test_any_range_is_read_across_files(tmp_path):
    parts = [b"first", b"", b"second", b"x", b""]
    text, whole = Text(files(tmp_path, *parts)), b"".join(parts)
    assert len(text) == len(whole)
    for start in range(len(whole) + 1):
        for count in range(len(whole) + 2):
            assert text.read(start, count) == whole[start : start + count]


def test_digest_of_a_long_text_depends_on_length_and_blocks(tmp_path):
    size = DIGESTED_BYTES + 5 * BLOCK
    first, second, third = files(tmp_path, b"", b"", b"")
    for path, length in ((first, size), (second, size + 1), (third, size)):
        with path.open("wb") as file:
            file.truncate(length)
    with third.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"x")
    assert len({Text([path]).digest for path in (first, second, third)}) == 3


def test_shortened_or_removed_file_ends_the_run_with_its_name(tmp_path):
    paths = files(tmp_path, b"first", b"second")
    text = Text(paths)
    paths[1].write_bytes(b"sec")
    with pytest.raises(RunError, match=r"1\.txt: is 3 bytes shorter than when the run began"):
        text.read(3, 8)
    paths[0].unlink()
    with pytest.raises(RunError, match=r"0\.txt: can no longer be read"):
        text.read(0, 2)


HERE = threading.main_thread().name


class Recorded(TokenRows):
    """Batches that record requests and their threads."""

    digest = "of nothing"

    def __init__(self):
        self.asked = []
        self.threads = []

    def _rows(self, iteration: int, micro_batch: int) -> torch.Tensor:
        self.asked.append((iteration, micro_batch))
        self.threads.append(threading.current_thread().name)
        return torch.tensor([[iteration, micro_batch, 0]])


def test_thread_makes_a_few_batches_ahead():
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
def test_interpreter_computes_on_batches_made_ahead(recompute):
    (stage,) = build_pipeline(small_job(1, 1, 3, model={"recompute": recompute, "layers": 1}))
    batches, threads = stage._data._batches, []
    rows = batches._rows

    def record(*key):
        threads.append(threading.current_thread().name)
        return rows(*key)

    batches._rows = record
    program = one_f_one_b(Shape(1, 1, 3)).program(Worker(0, 0))
    transport = SimpleNamespace(begin=lambda *_: None)
    interpreter = Interpreter({0: stage}, 1, transport, lambda _: None)
    for step in range(2):
        interpreter.begin(program, step)
        for instruction in program[: 2 * 3]:
            interpreter.execute(instruction)
    assert len(threads) >= 2 * 3 * (2 if recompute == "full" else 1)
    assert HERE not in threads


def test_stages_in_the_middle_need_no_data(tmp_path):
    missing = small_job(1, 4, 2, data={"path": str(tmp_path / "missing.txt")})
    assert list(build_stages(missing, [1, 2], CPU)) == [1, 2]
    for ends in ([0], [3], [2, 3]):
        with pytest.raises(JobError, match=r"missing\.txt cannot be read"):
            build_stages(missing, ends, CPU)


def test_only_the_digest_reads_all_data(monkeypatch):
    counts, real = [], Text.read

    def read(text, start, count):
        counts.append(count)
        return real(text, start, count)

    monkeypatch.setattr(Text, "read", read)
    small = small_job()
    batches = load_batches(small)
    build_stages(small, [0, 1], CPU)
    assert counts == []
    batches.batch(0, 0)
    assert counts == [small.model.sequence + 1]
    assert len(batches.digest) == 64
    assert sum(counts[1:]) == DEFAULT_BYTES
