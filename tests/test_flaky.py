"""A failure that passes alone is named and forgiven once; what fails again, and what is flaky again, fails the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flaky import remembered

ROOT = Path(__file__).parents[1]
SUITE = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("place", ["b@3", "c"])
def test_fails_at_first(place):
    mark = Path(__file__).with_name(place)
    if not mark.exists():
        mark.touch()
        raise AssertionError("beside others")
    mark.unlink()

def test_passes():
    pass
"""


def run(folder: Path, *options: str) -> tuple[int, list[str]]:
    """Exit status and last lines of a run with `--alone`."""
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-n", "1", "--dist", "loadgroup", "--alone"]
    plugins = {
        "PYTHONPATH": str(ROOT),
        "PYTEST_ADDOPTS": "-p tests.cost -p tests.flaky -p no:dash -p no:hypothesispytest",
    }
    done = subprocess.run(
        [*command, *options, str(folder)],
        cwd=folder,
        env=os.environ | plugins,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.soak
@pytest.mark.process
def test_a_failure_that_passes_alone_is_forgiven_once_in_three_runs(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    status, lines = run(tmp_path)
    assert status == 0
    assert [line.partition(":")[0] for line in lines[-3:-1]] == ["FLAKY test_suite.py"] * 2
    assert re.findall(r"\d+ (?:passed|failed|flaky)", lines[-1]) == ["3 passed", "2 flaky"]
    assert sum("failed beside others: test_suite.py::" in line for line in lines) == 2
    assert sum(line.startswith("E  ") for line in lines) == 2
    status, lines = run(tmp_path, "-k", "not b")
    assert status == 1
    assert "as in another of its last 3 runs" in lines[-2]
    assert "1 failed, 1 passed" in lines[-1]


@pytest.mark.soak
@pytest.mark.process
def test_what_fails_again_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text("def test_fails():\n    assert 1 == 2\n")
    status, lines = run(tmp_path)
    assert status == 1
    assert "1 failed" in lines[-1]
    assert not any(line.startswith("FLAKY") for line in lines)


def test_only_runs_that_a_test_took_part_in_count_and_only_the_last_three() -> None:
    history = remembered({}, {"a", "b"}, {"a"})
    assert history == {"a": [True]}
    assert remembered(history, {"b"}, set()) == history
    for _ in range(2):
        history = remembered(history, {"a", "b"}, set())
    assert history == {"a": [True, False, False]}
    assert remembered(history, {"a", "b"}, set()) == {}
    assert remembered(history, {"a", "b"}, {"a"}) == {"a": [False, False, True]}
