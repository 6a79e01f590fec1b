"""A job takes its model's shape from the checkpoint of its weights, and may not contradict it."""

import shutil
from pathlib import Path

import msgspec
import pytest

from recycle import Job, JobError
from recycle.exec import run
from recycle.exec.checkpoint import checkpoint
from recycle.exec.checkpoint.checkpoint import Manifest
from recycle.exec.protocol import Commit
from recycle.ir.families import one_f_one_b
from recycle.job.manifest import MODEL, require_model_of_weights
from recycle.job.sections import ModelSection
from tests.exec.runs import require_startable
from tests.jobs import varied

QWEN = ModelSection(
    kind="qwen",
    layers=2,
    hidden=32,
    heads=2,
    ffn=48,
    vocabulary=300,
    sequence=512,
    tied=True,
    rotary_base=5e5,
    dropout=0.1,
    config={"num_query_groups": 1, "layernorm_epsilon": 1e-5, "moe_aux_loss_coeff": 0.5},
)


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "weights", QWEN)


def saved(folder: Path, model: ModelSection) -> Path:
    """A checkpoint without tensors."""
    folder.mkdir(parents=True)
    before, identity = Commit(-1, 0.0, 0.0, None), {MODEL: checkpoint.model_identity(model)}
    checkpoint.write_manifest(folder, Manifest(-1, before, {}, identity, {}, {}))
    return folder


def load(folder: Path, model="", weights="weights") -> Job:
    path = folder / "job.toml"
    path.write_text(f'[shape]\npipelines = 1\nranks = 2\nmicro_batches = 2\n[model]\nweights = "{weights}"\n{model}\n')
    return Job.load(path)


def test_model_keys_come_from_the_checkpoint_and_training_keys_from_the_job(folder):
    job = load(folder.parent, "dropout = 0.2\n[model.config]\nmoe_aux_loss_coeff = 0.0")
    taken = msgspec.structs.replace(
        QWEN, dropout=0.2, sequence=64, weights=str(folder), config=QWEN.config | {"moe_aux_loss_coeff": 0.0}
    )
    assert job.model == taken
    assert load(folder.parent, "layers = 2\nffn = 48\nrotary_base = 500000\nsequence = 64").model.sequence == 64
    assert Job.from_toml(job.to_toml()) == job


def test_learned_positions_fix_the_sequence(tmp_path):
    saved(tmp_path / "weights", ModelSection(sequence=48))
    assert load(tmp_path).model.sequence == 48
    with pytest.raises(JobError, match=r"\[model\] sequence: 32, but the weights in \S+/weights have 48;"):
        load(tmp_path, "sequence = 32")


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ('kind = "llama"', r"\[model\] kind: 'llama', but the weights in \S+ have 'qwen'; leave it out"),
        ("layers = 3", r"\[model\] layers: 3, but the weights in \S+ have 2;"),
        ("heads = 5", r"\[model\] heads: 5, but the weights in \S+ have 2;"),
        ("tied = false", r"\[model\] tied: False, but the weights in \S+ have True;"),
        ("rotary_scaling = 8.0", r"\[model\] rotary_scaling: 8.0, but the weights in \S+ have nothing;"),
        (
            "[model.config]\nnum_query_groups = 2",
            r"\[model.config\] num_query_groups: 2, but the weights in \S+ have 1",
        ),
        ("[model.config]\nkv_channels = 8", r"\[model.config\] kv_channels: 8, but the weights in \S+ have nothing"),
        ("layers = true", r"\[model\] layers: expected `int`, got `bool`"),
        ('provider = "a:b"', r"\[model\] weights: the model of \[model\] provider has its own"),
    ],
)
def test_a_key_that_contradicts_the_weights_is_one_line(folder, model, complaint):
    with pytest.raises(JobError, match=rf"job.toml: {complaint}"):
        load(folder.parent, model)


def test_vocabulary_of_weights_cannot_be_padded(folder):
    model = {"heads": 7, "hidden": 56, "ffn": 49, "config": {}}
    job = varied(load(folder.parent), grid={"tensor_parallel": 7}, model=model)
    with pytest.raises(JobError, match=r"vocabulary: 300 is not divisible by tensor_parallel = 7; its weights"):
        job.validate()


def test_invalid_weights_are_refused(folder):
    root = folder.parent
    with pytest.raises(JobError, match=r"job.toml: \[model\] weights: \S+/none: is not a checkpoint"):
        load(root, weights="none")
    saved(root / "run" / "checkpoints" / "step-00000003", QWEN)
    with pytest.raises(JobError, match=r"run: is not a checkpoint, .*; give one .*, such as \S+/step-0+3"):
        load(root, weights="run")
    saved(root / "emulated", ModelSection(kind="emulated"))
    with pytest.raises(JobError, match=r"\[model\] weights: \S+: is of an emulated model, which has no weights"):
        load(root, weights="emulated")
    saved(root / "provided", ModelSection(provider="own:build"))
    with pytest.raises(JobError, match=r"\[model\] weights: \S+: is of a model that own:build builds"):
        load(root, weights="provided")
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(JobError, match=r"job.toml: \[model\] weights: \S+manifest.json: damaged"):
        load(root)


@pytest.mark.slow
def test_other_model_than_the_weights_is_refused_before_it_runs(folder):
    job = load(folder.parent)
    require_model_of_weights(job.model)
    with pytest.raises(JobError, match=r"\[model\] layers: 4, but the weights in \S+ have 2;"):
        require_startable(varied(job, model={"layers": 4}))
    with pytest.raises(JobError, match=r"has no tensor embedding.word_embeddings.weight"):
        run(one_f_one_b(job.shape), job, steps=1)


def test_resolved_job_does_not_need_the_checkpoint(folder):
    job = load(folder.parent)
    (folder.parent / "run").mkdir()
    (folder.parent / "run" / "job.toml").write_text(job.to_toml())
    shutil.rmtree(folder)
    assert Job.of_run(folder.parent / "run") == job
