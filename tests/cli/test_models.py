"""Models of one's own on the command line: what cannot be used costs one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Command

JOB = """
[shape]
pipelines = 1
ranks = 1
micro_batches = 1
[planner]
seconds = 0.1
[model]
layers = 1
provider = "cli_models:{model}"
[data]
provider = "cli_models:{data}"
[train]
steps = 1
loss = "cli_models:{loss}"
"""
MODULE = """
import torch
def bare(job, first, last, pre_process, post_process):
    return torch.nn.GELU()
def batches(job):
    return 5
def function(job):
    return lambda iteration, micro_batch: {}
"""


@pytest.fixture(autouse=True)
def module() -> None:
    Path("cli_models.py").write_text(MODULE)


@pytest.mark.process
@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ({"model": "biuld"}, '[model] provider: cli_models has no "biuld"; it has bare, batches, function'),
        ({"data": "missing"}, '[data] provider: cli_models has no "missing"'),
        ({"loss": "torch"}, "[train] loss: cli_models:torch is no function but module"),
        ({"data": "batches"}, "[data] provider: cli_models:batches returned int"),
    ],
)
def test_a_wrong_name_is_one_line_before_anything_starts(
    command: Command, names: dict[str, str], complaint: str
) -> None:
    found = {"model": "bare", "data": "function", "loss": "bare"} | names
    Path("job.toml").write_text(JOB.format(**found))
    assert command("train job.toml --run run").refused(f"job.toml: {complaint}")
    assert not Path("run").exists()


@pytest.mark.process
def test_a_module_without_parameters_is_one_line_of_the_worker_that_built_it(command: Command) -> None:
    Path("job.toml").write_text(JOB.format(model="bare", data="function", loss="bare"))
    outcome = command("train job.toml --run run --schedule 1f1b")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    complaint = "[model] provider: cli_models:bare: stage 0: its module has no parameters to train"
    assert outcome.err.startswith(f"recycle: job.toml: {complaint}")


@pytest.mark.process
def test_what_a_loss_of_ones_own_raises_is_in_the_line_that_ends_the_run(command: Command) -> None:
    loss_alone = JOB.format(model="bare", data="function", loss="function").replace('provider = "cli_models', "# = ")
    Path("job.toml").write_text(loss_alone)
    outcome = command("train job.toml --run run --schedule 1f1b")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert "stage 0 has no live host left" in outcome.err
    assert "ended with exit code 1 (TypeError: function() takes 1 positional argument but 2 were given)" in outcome.err
