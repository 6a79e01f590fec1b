"""A crash of a test process fails one test, and the run ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PROJECT = """
import os, pathlib, time
import pytest

@pytest.mark.xdist_group("crashing")
@pytest.mark.parametrize("number", range(5))
def test_in_a_group(number):
    if number == 2:
        if pathlib.Path("crashed").exists():
            pytest.fail("begun once more")
        pathlib.Path("crashed").touch()
        time.sleep(float(os.environ["LATE"]))
        os._exit(1)

@pytest.mark.parametrize("number", range(int(os.environ["OTHERS"])))
def test_alone(number):
    time.sleep(0.01)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("others", "late"),
    [(20, "1"), *(pytest.param(others, "0", marks=pytest.mark.soak) for others in (20, 1, 0))],
)
def test_a_test_that_ends_its_process_fails_once_and_all_others_run(tmp_path: Path, others: int, late: str) -> None:
    (tmp_path / "test_project.py").write_text(PROJECT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment |= {"OTHERS": str(others), "LATE": late, "PYTHONPATH": str(Path(__file__).parents[1])}
    options = ("-q", "-n", "2", "--dist", "loadgroup", "-p", "tests.crashes", "-p", "no:cacheprovider")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert re.search(rf"^1 failed, {4 + others} passed", ran.stdout, re.MULTILINE), ran.stdout + ran.stderr
    assert "crashed while running 'test_project.py::test_in_a_group[2]" in ran.stdout
