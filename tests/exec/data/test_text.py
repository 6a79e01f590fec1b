"""Text of files: read across their borders, of any length, and told from another text."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle import RunError
from recycle.exec.data.batches import BLOCK, DEFAULT_BYTES, DIGESTED_BYTES, Text, text_of


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
