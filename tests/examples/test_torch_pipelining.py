"""A schedule made here in torch's own pipeline runtime, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_pipelining" / "train.py"


@pytest.mark.process
def test_torch_runs_an_exported_schedule_to_the_gradients_of_the_unsplit_model() -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *(str(SCRIPT), "--chunks", "2", "--schedule", "zb-v"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    # Both ranks write to one pipe, so that lines may run into each other.
    assert sorted(re.findall(r"rank \d: gradients of stages \[\d, \d\] are ", run.stdout)) == [
        "rank 0: gradients of stages [0, 3] are ",
        "rank 1: gradients of stages [1, 2] are ",
    ]
