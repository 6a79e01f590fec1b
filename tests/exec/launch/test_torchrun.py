"""Schedules without faults under torchrun: real processes, a pair of them started by torch's own launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recycle.exec import run
from recycle.exec.data.batches import Batch
from recycle.exec.launch.torchrun import main
from recycle.exec.model.loss import masked_sum
from recycle.ir.families import zb_h1
from recycle.job import Job
from tests.exec.accelerator.struck import Demanding, named
from tests.warm import run_torchrun

pytestmark = pytest.mark.process
REPLAYED = "pipelines = 2\nranks = 1"

JOB = '[shape]\npipelines = 1\nranks = 2\nmicro_batches = 3\n[model]\nkind = "emulated"\n'
TWO = ["--nproc-per-node", "2", "-m", "recycle.exec.worker"]
GPT = JOB.replace('kind = "emulated"', "layers = 2\nhidden = 32\nheads = 2\nsequence = 16\n[eval]\nevery = 2")


def torchrun(*arguments: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "job.toml").write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", *TWO, str(folder / "job.toml"), *arguments]
    return subprocess.run(
        command,
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path.cwd(),
    )  # fmt: skip


REPLICATED = JOB.replace("pipelines = 1\nranks = 2", REPLAYED)
SHARDED = f"{REPLICATED}[train]\nsharded_optimizer = true\nreduce_buckets = 2\n"


OVER_ACCELERATORS = GPT + f'\n[membership]\ntransport = "{named(Demanding)}"\n'


@pytest.mark.parametrize(
    ("text", "plain"),
    [(GPT, GPT), (SHARDED, REPLICATED), pytest.param(OVER_ACCELERATORS, GPT, marks=pytest.mark.soak)],
)
def test_training_has_the_bits_of_one_process(text, plain, tmp_path):
    metrics, job = tmp_path / "metrics.jsonl", Job.from_toml(plain)
    arguments = ["--schedule", "zb-h1", "--steps", "3", "--metrics", str(metrics)]
    if text is SHARDED:  # its processes import less
        ended = torchrun(*arguments, text=text, folder=tmp_path)
        assert ended.returncode == 0, ended.stderr
    else:
        (tmp_path / "job.toml").write_text(text)
        run_torchrun([*TWO, str(tmp_path / "job.toml"), *arguments], Path.cwd())
    expected, lines = run(zb_h1(job.shape), job, steps=3), metrics.read_text().splitlines()
    for key in ("loss", "grad_norm", "eval_loss"):
        assert [json.loads(line).get(key) for line in lines] == [line.get(key) for line in expected.metrics]
    assert list(expected.evaluations) == ([1, 2] if plain is GPT else [])


@pytest.mark.soak
def test_replays_under_torchrun_end_the_run_on_a_wrong_result(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    loss = f"{stuck_in_one_process.__module__}:{stuck_in_one_process.__name__}"
    text = GPT.replace("pipelines = 1\nranks = 2", REPLAYED) + "[integrity]\nevery = 3\n"
    text += f'[train]\ncheckpoint_every = 0\nloss = "{loss}"\n'
    ended = torchrun("--steps", "4", "--metrics", str(metrics), text=text, folder=tmp_path)
    assert "error: step " in ended.stderr
    assert "computed different results for micro-batch" in ended.stderr
    assert "one of them computes wrong" in ended.stderr
    assert not metrics.exists() or len(metrics.read_text().splitlines()) <= 3


def stuck_in_one_process(losses: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, object]:
    """The loss of a job; too large in the second process that torchrun starts."""
    total, count = masked_sum(losses, batch)
    return total * (1.25 if os.environ["RANK"] == "1" else 1.0), count


def test_start_without_torchrun_names_the_remedy(tmp_path, monkeypatch, capsys):
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "job.toml")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: RANK is not set: start this with torchrun, or train with: recycle train [job-error]\n"
    )
