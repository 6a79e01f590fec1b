"""The example with a model, data and a loss from a file of its own: killed, brought back, and the same to the bit."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

import pytest

from recycle import Job
from recycle.exec import run
from recycle.ir.families import zb_h1
from tests.cli.command import Command
from tests.exec.runs import lines_of
from tests.warm import warm_children

pytestmark = pytest.mark.process

EXAMPLE = Path("examples/own_model")


def test_the_example_trains_to_the_same_bits_through_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ("train", EXAMPLE / "job.toml", "--steps", "8", "--run", tmp_path / "struck")
    with warm_children():
        struck = Command(capsys)(*train, "--fault", "kill:1.1@2", "--fault", "rejoin:1.1@5")
    assert struck.status == 0, struck.err
    lines = lines_of(tmp_path / "struck", "metrics")
    assert [line["live_workers"] for line in lines] == [4, 4, 3, 3, 3, 4, 4, 4]
    job = Job.load(EXAMPLE / "job.toml")
    healthy = run(zb_h1(job.shape), job, steps=8).losses
    assert [line["loss"] for line in lines] == healthy
    assert healthy[-1] < healthy[0] < 4.0


def test_the_same_functions_can_be_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.load(EXAMPLE / "job.toml")
    text = "\n".join(
        line for line in job.to_toml().splitlines() if "reverse:" not in line and not line.startswith("import_from")
    )
    given = Job.from_toml(text)
    assert given.model.provider is None
    specification = util.spec_from_file_location("another_name", EXAMPLE / "reverse.py")
    assert specification is not None
    assert specification.loader is not None
    module = util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "another_name", module)
    specification.loader.exec_module(module)
    schedule = zb_h1(job.shape)
    handed = run(schedule, given, steps=2, model=module.build, data=module.batches, loss=module.loss)
    assert handed.losses == run(schedule, job, steps=2).losses
