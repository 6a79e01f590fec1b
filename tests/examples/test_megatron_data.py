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

pytestmark = pytest.mark.process

EXAMPLE = Path("examples/megatron_data")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_example_trains_to_the_same_bits_through_a_failure(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "job.toml", tmp_path)
    train = ("-c", "from recycle.cli import main; main()", "train", str(tmp_path / "job.toml"), "--steps", "6", "--run")
    missing = command(*train, str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "stdlib.idx cannot be read (No such file or directory)" in " ".join(missing.stderr.split())
    assert "Traceback" not in missing.stderr
    made = command(str(EXAMPLE / "write_dataset.py"), "--prefix", str(tmp_path / "stdlib"), "--documents", "5")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("5 documents in ")
    struck = command(*train, str(tmp_path / "struck"), "--fault", "kill:1.1@2", "--fault", "rejoin:1.1@4")
    assert struck.returncode == 0, struck.stderr
    job = Job.load(tmp_path / "job.toml")
    healthy = run(interleaved(job.shape), job, steps=6).losses
    assert losses(tmp_path / "struck") == healthy
    assert healthy[-1] < healthy[0]
