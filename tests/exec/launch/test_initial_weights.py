"""Runs that start from an imported model, through failures, and what is exported of them."""

import shutil
from pathlib import Path

import pytest
import torch

from recycle import Job, JobError
from recycle.exec import run
from recycle.exec.launch.trackers import Observer
from recycle.hugging_face.conversion import export_model, import_model
from recycle.ir.families import one_f_one_b
from tests.exec.runs import kinds
from tests.hugging_face.written import hub_model, logits_of, our_logits
from tests.tokens.tokenizers import saved_tokenizer

TOKENS = torch.arange(48).reshape(2, 24) * 7 % 256
WITHIN = 1e-5


def imported(name: str, folder: Path) -> Path:
    """A checkpoint with a tokenizer of 300 tokens."""
    hub_model(name, vocab_size=320, num_hidden_layers=2).save_pretrained(folder / "model")
    saved_tokenizer(folder / "model")
    import_model(folder / "model", folder / "weights")
    return folder / "weights"


def job_of(weights: Path, pipelines=1, ranks=1, tensor_parallel=1) -> Job:
    path = weights.parent / "job.toml"
    path.write_text(
        f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = 2\ntensor_parallel = {tensor_parallel}\n"
        f'[memory]\nlimit = {ranks + 1}\n[planner]\nseconds = 1\n[model]\nweights = "{weights}"\nsequence = 24\n'
        "[train]\ncheckpoint_every = 2\nwarmup = 2\n[membership]\ndrift = 0\n"
    )
    return Job.load(path)


def exported_logits_are_ours(checkpoint: Path, folder: Path):
    result = export_model(checkpoint, folder / "exported")
    assert "tokenizer.json" in result.carried
    other = logits_of(folder / "exported", TOKENS)
    own = our_logits(job_of(checkpoint), TOKENS)
    assert float((own - other).abs().max()) <= WITHIN


class Forgetful(Observer):
    """Removes the weights after the first step: no process may need them after the start."""

    def __init__(self, weights: Path):
        self._weights = weights

    def committed(self, line):
        shutil.rmtree(self._weights, ignore_errors=True)


@pytest.mark.parametrize("name", [pytest.param("qwen 3", marks=pytest.mark.soak), "mixtral"])
def test_export_after_a_kill_has_the_logits_of_our_stages(launch, name, tmp_path):
    weights = imported(name, tmp_path)
    job = job_of(weights, 2, 2)
    calm = run(one_f_one_b(job.shape), job, steps=8)
    struck = launch(job, 8, "kill:1.1@2", "rejoin:1.1@4", observer=Forgetful(weights), directory=tmp_path / "run")
    assert kinds(struck).count("rejoined") == 1
    assert struck.losses == calm.losses
    assert struck.losses[-1] < struck.losses[0]
    assert not weights.exists()
    exported_logits_are_ours(tmp_path / "run" / "checkpoints" / "step-00000007", tmp_path)


def test_resumed_run_does_not_need_its_initial_weights(launch, tmp_path):
    weights = imported("qwen 2", tmp_path)
    job = job_of(weights, 1, 2)
    schedule = one_f_one_b(job.shape)
    whole = run(schedule, job, steps=6).losses
    launch(job, 4, schedule=schedule, directory=tmp_path / "run")
    shutil.rmtree(weights)
    resumed = launch(job, 6, schedule=schedule, directory=tmp_path / "run", resume=True)
    assert resumed.losses == whole
    assert Job.of_run(tmp_path / "run").model.weights == str(weights)
    with pytest.raises(JobError, match=r"weights: is not a checkpoint"):
        launch(job, 6, schedule=schedule)


def test_tensor_ranks_start_from_their_parts_and_an_export_joins_them(launch, tmp_path):
    weights = imported("qwen 3", tmp_path)
    alone = run(one_f_one_b(job_of(weights).shape), job_of(weights), steps=2)
    result = launch(job_of(weights, 1, 2, tensor_parallel=2), 2, directory=tmp_path / "run")
    assert result.losses == pytest.approx(alone.losses, rel=1e-6)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert any("t1-" in path.name for path in checkpoint.iterdir())
    exported_logits_are_ours(checkpoint, tmp_path)
    parted = launch(job_of(checkpoint, 1, 1, tensor_parallel=2), 1).losses
    joined = run(one_f_one_b(job_of(checkpoint).shape), job_of(checkpoint), steps=1).losses
    assert parted == pytest.approx(joined, rel=1e-6)
