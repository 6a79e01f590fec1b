"""Token files of Megatron-LM: every row once per epoch, reproducible samples, and clear errors."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from recycle import Job, JobError, RunError
from recycle.exec.data.indexed import IndexedRows, _permuted
from tests.exec.runs import job, require_startable

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
LENGTHS = [5, 0, 17, 1, 40, 3, 31]


def written(prefix: Path, lengths: list[int] = LENGTHS, kind: type = np.uint16, first=0) -> Path:
    """Documents of the given lengths, with the numbers from `first` on as their tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=kind)
    for length in lengths:
        builder.add_item(torch.arange(first, first + length))
        builder.end_document()
        first += length
    builder.finalize(f"{prefix}.idx")
    return prefix


def rows(prefix: Path, sequence=8, micro_batches=4, seed=0, vocabulary=256) -> IndexedRows:
    return IndexedRows(
        job(
            1,
            1,
            micro_batches,
            kind="gpt",
            model={"sequence": sequence, "vocabulary": vocabulary},
            data={"kind": "megatron", "path": str(prefix), "micro_batch_size": 2, "seed": seed},
        )
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return written(tmp_path_factory.mktemp("tokens") / "numbers")


@pytest.mark.parametrize("sequence", [3, 8, 20])
def test_rows_cross_documents_and_labels_are_the_next_tokens(prefix, sequence):
    data = rows(prefix, sequence)
    assert data.rows == (sum(LENGTHS) - 1) // sequence
    for micro_batch in range(4):
        tokens, labels = data.batch(0, micro_batch).values()
        assert tokens.shape == labels.shape == (2, sequence)
        assert tokens.dtype == labels.dtype == torch.int64
        assert labels.equal(tokens + 1)
        for place in range(2):
            assert int(tokens[place, 0]) == sequence * data.row_of(2 * micro_batch + place)


def test_each_epoch_has_every_row_once_in_another_order(prefix):
    data = rows(prefix, 3)
    epochs = [[data.row_of(epoch * data.rows + place) for place in range(data.rows)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(data.rows))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_sample_depends_only_on_seed_and_number(prefix):
    data, same, fewer = rows(prefix, seed=5), rows(prefix, seed=5), rows(prefix, micro_batches=1, seed=5)
    data.batch(0, 0)
    assert all(map(torch.equal, data.batch(7, 3).values(), same.batch(7, 3).values()))
    assert data.digest == same.digest
    # With 4 micro-batches per iteration, the second of iteration 1 is the sixth of the run, in any shape.
    assert all(map(torch.equal, data.batch(1, 1).values(), fewer.batch(5, 0).values()))
    assert [data.row_of(place) for place in range(12)] != [rows(prefix, seed=6).row_of(place) for place in range(12)]
    assert [_permuted(place, 10, "0 0") for place in range(10)] == [2, 6, 5, 8, 7, 4, 0, 3, 1, 9]


def test_file_too_short_for_a_row_is_refused(tmp_path):
    short = written(tmp_path / "short", [4, 4])
    with pytest.raises(JobError, match=r"\[data\] path: .*short.bin holds 8 tokens, but one row needs 9"):
        rows(short)
    assert rows(written(tmp_path / "enough", [4, 5])).rows == 1


def test_missing_or_damaged_files_are_one_clear_line(prefix, tmp_path):
    index, tokens = (Path(f"{prefix}{suffix}").read_bytes() for suffix in (".idx", ".bin"))
    cases = {
        "missing": (None, None, r"bad\.idx cannot be read \(No such file"),
        "no tokens": (index, None, r"bad\.bin cannot be read"),
        "empty": (index, b"", r"bad\.bin is empty"),
        "text": (b"not an index at all", tokens, r"bad\.idx is not a complete index .*MMIDIDX"),
        "cut index": (index[: len(index) // 2], tokens, r"bad\.idx is not a complete index"),
        "version": (index[:9] + b"\x02" + index[10:], tokens, r"bad\.idx is not a complete index .*version 2"),
        "counts": (index[:18] + b"\xff" * 8 + index[26:], tokens, r"bad\.idx is not a complete index .* sequences"),
        "type": (index[:17] + b"\xff" + index[18:], tokens, r"bad\.idx is not a complete index .*type 255"),
        "documents": (index[:-8] + struct.pack("<q", 3), tokens, r"bad\.idx is not a complete index .*sequence 3"),
        "lfs": (POINTER, tokens, r"bad\.idx: .*git lfs pull"),
        "floats": (index[:17] + b"\x07" + index[18:], tokens, r"holds float32 values, not tokens"),
        "cut tokens": (index, tokens[:-3], r"bad\.bin has 191 bytes, its index describes 194"),
        "pointer": (index[:62] + b"\x07" + index[63:], tokens, r"sequences do not follow each other"),
    }
    for name, (idx, binary, message) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        for suffix, content in ((".idx", idx), (".bin", binary)):
            if content is not None:
                (folder / f"bad{suffix}").write_bytes(content)
        with pytest.raises(JobError, match=rf"\[data\] path: .*{message}") as error:
            rows(folder / "bad")
        assert "\n" not in str(error.value)
    with pytest.raises(JobError, match=r"cannot be read .*; give the path without \.bin or \.idx"):
        rows(Path(f"{prefix}.bin"))


def with_file(prefix: Path, ranks=1, **model) -> Job:
    return job(
        1,
        ranks,
        4,
        kind="gpt",
        model={"layers": 2, "sequence": 8, **model},
        data={"kind": "megatron", "path": str(prefix), "micro_batch_size": 2},
    )


def test_token_beyond_the_vocabulary_is_found_before_the_run_or_when_drawn(tmp_path):
    high = written(tmp_path / "high", [20, 20], first=230)
    with pytest.raises(JobError, match=r"\[model\] vocabulary: 256, but token 26 of .*high\.bin is 256"):
        require_startable(with_file(high), 3)
    require_startable(with_file(high, vocabulary=270), 3)
    data = rows(high)
    sample = next(place for place in range(data.rows) if data.row_of(place) == data.rows - 1)
    with pytest.raises(RunError, match=r"high\.bin: iteration 0, micro-batch \d holds token 2\d\d; \[model\] vocab"):
        data.batch(0, sample // 2)
    negative = written(tmp_path / "negative", [20], np.int32, first=-3)
    with pytest.raises(JobError, match=r"token 0 of .*negative\.bin is -3"):
        rows(negative).require_vocabulary()
