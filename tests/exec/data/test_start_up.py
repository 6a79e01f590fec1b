"""Which worker processes read the data: those whose stages take tokens in, or compare with labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle import JobError
from recycle.exec.data.batches import Text
from recycle.exec.data.loading import load_batches
from recycle.exec.model.build import build_stages
from tests.exec.drive import CPU, small_job


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
