"""Which worker processes read the data: those whose stages take tokens in, or compare with labels."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from recycle import JobError
from recycle.exec.data import load_batches
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
    hashed: list[int] = []

    def sha256(content: bytes = b"") -> Any:
        if len(content) > 1 << 20:
            hashed.append(len(content))
        return real(content)

    real = hashlib.sha256
    monkeypatch.setattr("recycle.exec.data.batches.hashlib.sha256", sha256)
    batches = load_batches(small_job())
    build_stages(small_job(), [0, 1], CPU)
    batches.batch(0, 0)
    assert hashed == []
    assert len(batches.digest) == 64
    assert hashed == [4 << 20]
