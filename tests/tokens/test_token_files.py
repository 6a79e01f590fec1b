"""Token files: byte for byte what megatron-core writes, and whole or not there at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from recycle import RecycleError
from recycle.tokens.token_files import UINT16_VOCABULARY, TokenFiles


@pytest.mark.parametrize("vocabulary", [256, UINT16_VOCABULARY - 1, UINT16_VOCABULARY, 128_256])
def test_the_files_are_those_of_megatron_core(tmp_path: Path, vocabulary: int) -> None:
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


def test_many_documents_are_indexed_across_the_parts_that_are_written_at_a_time(tmp_path: Path) -> None:
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


def test_a_document_without_tokens_is_none_and_gets_no_end(tmp_path: Path) -> None:
    with TokenFiles(tmp_path / "few", 256) as files:
        files.end_document((9,))
        files.add([1])
        files.end_document((9,))
        files.end_document((9,))
    assert [list(each) for each in IndexedDataset(str(tmp_path / "few"))] == [[1, 9]]


def test_nothing_is_left_of_files_that_fail(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TokenFiles(tmp_path / "half", 256) as files:
            files.add([1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())
    with pytest.raises(RecycleError, match=r"no/where\.bin: cannot be written \(No such file or directory\)"):
        TokenFiles(tmp_path / "no" / "where", 256)
