"""The example on a token file: written by megatron-core's builder, trained on through a kill and a re-join."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recycle import Job
from recycle.exec import run
from recycle.ir.families import interleaved
from tests.cli.command import Command
from tests.warm import warm_children

pytestmark = pytest.mark.process

EXAMPLE = Path("examples/megatron_data")


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_example_trains_to_the_same_bits_through_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(EXAMPLE / "job.toml", tmp_path)
    command, train = Command(capsys), ("train", tmp_path / "job.toml", "--steps", "6", "--run")
    missing = command(*train, tmp_path / "none")
    assert missing.refused("stdlib.idx cannot be read (No such file or directory)")
    write = [sys.executable, EXAMPLE / "write_dataset.py", "--prefix", tmp_path / "stdlib", "--documents", "5"]
    made = subprocess.run(write, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("5 documents in ")
    with warm_children():
        struck = command(*train, tmp_path / "struck", "--fault", "kill:1.1@2", "--fault", "rejoin:1.1@4")
    assert struck.status == 0, struck.err
    job = Job.load(tmp_path / "job.toml")
    healthy = run(interleaved(job.shape), job, steps=6).losses
    assert losses(tmp_path / "struck") == healthy
    assert healthy[-1] < healthy[0]
