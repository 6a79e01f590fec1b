"""The short form of benchmarks/soak.py: faults of every kind at random, and nothing of them is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.soak]

SOAK = Path(__file__).parents[3] / "benchmarks" / "soak.py"


def test_sixty_iterations_under_random_faults_change_no_bit_and_leave_nothing_behind() -> None:
    command = [sys.executable, "-W", "ignore", str(SOAK), "--steps", "60", "--kind", "emulated"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses and final states: identical" in done.stdout
    assert "rejoin" in done.stdout.split("asked for:")[1]
