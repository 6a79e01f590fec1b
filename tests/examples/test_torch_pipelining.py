"""A schedule made here in torch's own pipeline runtime, under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.warm import run_torchrun

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_pipelining" / "train.py"


@pytest.mark.process
def test_torch_runs_an_exported_schedule_to_the_gradients_of_the_unsplit_model() -> None:
    printed = run_torchrun(["--nproc-per-node", "2", str(SCRIPT), "--chunks", "2", "--schedule", "zb-v"], SCRIPT.parent)
    assert re.findall(r"rank \d: gradients of stages \[\d, \d\] are ", printed) == [
        "rank 0: gradients of stages [0, 3] are ",
        "rank 1: gradients of stages [1, 2] are ",
    ]
