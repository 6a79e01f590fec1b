"""The training script of Megatron's with one line changed: each command of its docstring, in the shortest form."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.warm import run_torchrun

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "megatron_loop" / "train.py"


def losses(command: str) -> list[float]:
    """What the script prints for each step, in two steps of four micro-batches."""
    printed = run_torchrun([*shlex.split(command, comments=True)[1:], "--steps", "2", "--micro-batches", "4"], ROOT)
    return [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")]


def test_every_schedule_of_the_docstring_trains_the_same_model() -> None:
    commands = re.findall(r"^    (torchrun .*)$", SCRIPT.read_text(), flags=re.MULTILINE)
    zero_bubble, two_replicas, on_a_v, own = map(losses, commands)
    assert len(own) == 2
    assert own[1] < own[0]
    assert zero_bubble == own  # to the bit
    assert on_a_v == pytest.approx(own, rel=1e-6)
    assert len(two_replicas) == 2
    assert two_replicas[1] < two_replicas[0]
