"""The example on a token file: written by megatron-core's builder, trained on through a kill and a re-join."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recycle import Job
from recycle.exec import run
from recycle.ir.families import interleaved
from tests.cli.command import Command
from tests.exec.runs import lines_of
from tests.warm import outputs_of_scripts, warm_children

pytestmark = pytest.mark.process

EXAMPLE = Path("examples/megatron_data")


def test_the_example_trains_to_the_same_bits_through_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(EXAMPLE / "job.toml", tmp_path)
    command, train = Command(capsys), ("train", tmp_path / "job.toml", "--steps", "6", "--run")
    missing = command(*train, tmp_path / "none")
    assert missing.refused("stdlib.idx cannot be read (No such file or directory)")
    write = [str(EXAMPLE / "write_dataset.py"), "--prefix", str(tmp_path / "stdlib"), "--documents", "5"]
    assert outputs_of_scripts(write, Path.cwd()).startswith("5 documents in ")
    with warm_children():
        struck = command(*train, tmp_path / "struck", "--fault", "kill:1.1@2", "--fault", "rejoin:1.1@4")
    assert struck.status == 0, struck.err
    job = Job.load(tmp_path / "job.toml")
    healthy = run(interleaved(job.shape), job, steps=6).losses
    assert [line["loss"] for line in lines_of(tmp_path / "struck", "metrics")] == healthy
    assert healthy[-1] < healthy[0]
