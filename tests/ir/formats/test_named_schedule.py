"""What `--schedule` names: a family first, then a file, else one line that lists the families."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle import JobError, Shape
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.formats import named_schedule

SHAPE = Shape(1, 2, 3)


def test_a_family_is_built_in_the_jobs_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zb-h1").write_text("not a schedule")
    assert named_schedule("zb-h1", SHAPE).text() == zb_h1(SHAPE).text()


def test_a_file_is_read(tmp_path: Path) -> None:
    one_f_one_b(SHAPE).save(tmp_path / "mine.json")
    assert named_schedule(str(tmp_path / "mine.json"), Shape(9, 9, 9)).text() == one_f_one_b(SHAPE).text()


def test_what_is_neither_is_refused_with_the_families() -> None:
    with pytest.raises(JobError, match=r"schedule 1f2b: is neither a file nor a family; families are gpipe, 1f1b"):
        named_schedule("1f2b", SHAPE)
