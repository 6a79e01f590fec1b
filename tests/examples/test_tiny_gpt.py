"""The demo as a user runs it: two runs, one of them through a killed worker, compared to the last bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def test_the_demo_compares_both_runs_and_writes_the_timeline(tmp_path: Path) -> None:
    command = [sys.executable, "examples/tiny_gpt/demo.py", "--run", str(tmp_path / "demo"), "--steps", "9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "losses identical to the last bit: yes" in done.stdout
    assert "optimizer state of all workers identical to the last bit: yes" in done.stdout
    table = re.findall(r"^ +(\d+)  ([\d.]+) +([\d.]+) +(\d)$", done.stdout, flags=re.MULTILINE)
    assert [int(step) for step, *_ in table] == list(range(9))
    assert all(one == other for _, one, other, _ in table)
    assert [live for *_, live in table] == ["6"] * 3 + ["5"] * 3 + ["6"] * 3
    rows = re.findall(
        r"^  (before|during|after) +(\d) +(\d+) +(\d+) +0\.0% +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE
    )
    assert rows == [
        ("before", "6", "7", "7", "0.78", "1.00"),
        ("during", "5", "9", "9", "1.00", "1.29"),
        ("after", "6", "7", "7", "0.78", "1.00"),
    ]
    page = (tmp_path / "demo" / "timeline.html").read_text()
    assert "failed" in page
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?://', page)
