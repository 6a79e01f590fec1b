"""The demo: two runs, one of them through a killed worker, compared to the last bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.warm import outputs_of_scripts

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def test_the_demo_compares_both_runs_and_writes_the_timeline(tmp_path: Path) -> None:
    command = ["examples/tiny_gpt/demo.py", "--run", str(tmp_path / "demo"), "--steps", "9"]
    printed = outputs_of_scripts(command, ROOT)
    assert "losses identical to the last bit: yes" in printed
    assert "optimizer state of all workers identical to the last bit: yes" in printed
    table = re.findall(r"^ +(\d+)  ([\d.]+) +([\d.]+) +(\d)$", printed, flags=re.MULTILINE)
    assert [int(step) for step, *_ in table] == list(range(9))
    assert all(one == other for _, one, other, _ in table)
    assert [live for *_, live in table] == ["6"] * 3 + ["5"] * 3 + ["6"] * 3
    rows = re.findall(
        r"^  (before|during|after) +(\d) +(\d+) +(\d+) +0\.0% +([\d.]+) +([\d.]+)$", printed, re.MULTILINE
    )
    assert rows == [
        ("before", "6", "7", "7", "0.78", "1.00"),
        ("during", "5", "9", "9", "1.00", "1.29"),
        ("after", "6", "7", "7", "0.78", "1.00"),
    ]
    page = (tmp_path / "demo" / "timeline.html").read_text()
    assert "failed" in page
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?://', page)
