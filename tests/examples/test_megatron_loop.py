"""The training script of Megatron's with one line changed, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "megatron_loop" / "train.py"


def losses(*arguments: str, processes: int = 2) -> list[float]:
    """What the script prints for each step."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
            *("--master-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *(str(SCRIPT), "--steps", "4", "--micro-batches", "4", *arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.soak
@pytest.mark.process
def test_the_changed_line_changes_no_bit_of_the_losses() -> None:
    own = losses()
    assert len(own) == 4
    assert own[3] < own[0]
    assert losses("--schedule", "zb-h1") == own


@pytest.mark.soak
def test_chunks_on_a_v_train_the_same_model() -> None:
    assert losses("--chunks", "2", "--schedule", "zb-v") == pytest.approx(losses("--schedule", "1f1b"), rel=1e-6)
