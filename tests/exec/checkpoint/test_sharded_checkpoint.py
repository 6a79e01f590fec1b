"""Checkpoints of shards and of tensor ranks, written once and read into any other shape."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recycle.errors import JobError
from recycle.exec.checkpoint.checkpoint import load, write_stage
from recycle.exec.launch.standalone import LocalRun
from recycle.exec.model.build import build_stages
from recycle.exec.model.state.layouts import Shards
from recycle.exec.model.stored_tensors import StoredTensors, piece_of
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import with_barrier
from recycle.job import PricedJob
from recycle.plans.plan import with_updates_of
from tests.exec.checkpoint.test_checkpoint import store, train
from tests.exec.drive import build_pipeline, differing, small_job
from tests.exec.runs import job
from tests.exec.sharded import joined, names_in, require_equal, sharded, stored
from tests.jobs import varied


def gpt(pipelines: int, ranks: int, micro_batches: int) -> PricedJob:
    # Matrices of several blocks, so that shards end inside of them.
    return job(
        pipelines,
        ranks,
        micro_batches,
        kind="qwen",
        model={"layers": 2, "hidden": 128, "ffn": 256},
        train={"precision": "bf16"},
    )


def trained(job: PricedJob) -> LocalRun:
    run = LocalRun(with_barrier(with_updates_of(one_f_one_b(job.shape), job)), job)
    run.run(1)
    return run


def written(run: LocalRun, folder: Path) -> Path:
    """Write each part of a run's state once."""
    folder.mkdir()
    parts = {
        number: part
        for stages in run.stages.values()
        for stage in stages.values()
        for number, part in stage.stored().items()
    }
    for number, part in parts.items():
        write_stage(folder, number, "here", part.named(part.tensors), 0, part.kind)
    return folder


def read(job: PricedJob, folder: Path) -> dict[str, torch.Tensor]:
    """The state of all stages of a job, read from a checkpoint."""
    stages = build_stages(job, range(job.shape.stages), torch.device("cpu"))
    for stage in stages.values():
        if isinstance(stage.layout, Shards):
            stage.layout.own(stage.layout.all_numbers)
    load(folder, stages.values())
    for stage in stages.values():
        if isinstance(stage.layout, Shards):
            stage.layout.publish()
            assert bool(torch.cat(stage.layout.weights()).any())
    return joined(stage.named_state(stage.state_tensors()) for stage in stages.values())


@pytest.mark.slow
def test_runs_read_checkpoints_of_any_shape(tmp_path):
    plain, other = gpt(5, 2, 1), gpt(3, 1, 1)
    whole = written(trained(plain), tmp_path / "whole")
    parts = written(trained(sharded(plain)), tmp_path / "parts")
    names = {path.name for path in parts.iterdir()}
    assert names == {f"shard-{number:04d}-1-of-1.safetensors" for number in range(10)}
    pieces = [name for path in parts.iterdir() for name in names_in(path) if piece_of(name)]
    assert any(".gate.elements-" in name for name in pieces), "halves of gated layers are cut too"
    wanted = stored(whole)
    require_equal(stored(parts), wanted)
    for folder in (whole, parts):
        for reader in (plain, other, sharded(plain, 3), sharded(other)):
            require_equal(read(reader, folder), wanted)


SMALL = {"layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "ffn": 48}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [{}, {"tied": True}, {"kind": "mixtral", "config": {"num_moe_experts": 4}}], ids=["gpt", "tied", "mixtral"]
)
def test_checkpoint_gives_the_initial_weights_of_any_number_of_stages(model, tmp_path):
    before = small_job(1, 2, 2, model=SMALL | model)
    pipeline = build_pipeline(before)
    train(pipeline, 0)
    folder = store(tmp_path, before, 0, pipeline)
    trained = {name: tensor for stage in pipeline for name, tensor in stage.parameters.items()}
    for ranks in (1, 2, 4):
        after = small_job(1, ranks, 2, model=SMALL | model | {"weights": str(folder), "seed": 5})
        weights = {name: tensor for stage in build_pipeline(after) for name, tensor in stage.parameters.items()}
        assert differing(weights, trained) == []
    fresh = build_pipeline(varied(after, model={"weights": None}))[0].parameters
    assert not torch.equal(fresh["embedding.word_embeddings.weight"], weights["embedding.word_embeddings.weight"])


@pytest.fixture
def parts(tmp_path):
    """Tensors [8, 12]: two cut into four along different dimensions, a whole one, and one in two pieces of a shard."""
    whole = torch.arange(96.0).view(8, 12)
    for rank in range(4):
        tensors = {
            f"{name}.tensor-{rank}-of-4": whole.chunk(4, d)[rank].clone() for name, d in (("rows", 0), ("lines", 1))
        }
        if rank == 0:
            tensors |= {"norm": whole, "pieces.elements-0-40": whole.flatten()[:40].clone()}
        if rank == 1:
            tensors["pieces.elements-40-96"] = whole.flatten()[40:].clone()
        save_file(tensors, tmp_path / f"{rank}.safetensors")
    return StoredTensors(sorted(tmp_path.glob("*.safetensors")), JobError)


@pytest.mark.parametrize("name", ["rows", "lines", "norm", "pieces"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_any_share_of_a_tensor_is_read_from_any_parts(parts, name, dimension):
    whole = torch.arange(96.0).view(8, 12)
    parts.require(name)
    assert torch.equal(parts.whole(name, (8, 12)), whole)
    size = whole.shape[dimension]
    for count in (1, 2, 4):
        for rank, share in enumerate(whole.chunk(count, dimension)):
            start = rank * size // count
            assert torch.equal(parts.rows(name, (8, 12), dimension, start, start + size // count), share)


def test_missing_part_or_other_shape_of_a_tensor_is_named(parts, tmp_path):
    with pytest.raises(JobError, match=r"pieces has 96 elements, and the model's is"):
        parts.whole("pieces", (8, 13))
    with pytest.raises(JobError, match=r"has no tensor gone$"):
        parts.whole("gone", (8, 12))
    with pytest.raises(JobError, match=r"norm is \[8, 12\], and the model's is \[12, 8\]"):
        parts.whole("norm", (12, 8))
    with pytest.raises(JobError, match=r"rows is 4 parts of \[2, 12\], and the model's is \[8, 8\]"):
        parts.whole("rows", (8, 8))
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(JobError, match=r"has no tensor rows.tensor-2-of-4"):
        StoredTensors(sorted(tmp_path.glob("*.safetensors")), JobError).require("rows")
