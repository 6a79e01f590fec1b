"""Checkpoints in parts: of shards and of tensor ranks, each written once and read into any other shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
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
from tests.exec.drive import build_pipeline, small_job
from tests.exec.runs import job
from tests.exec.sharded import joined, require_equal, sharded, stored


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


def trained(of: PricedJob) -> LocalRun:
    run = LocalRun(with_barrier(with_updates_of(one_f_one_b(of.shape), of)), of)
    run.run(1)
    return run


def written(run: LocalRun, folder: Path) -> Path:
    """The state of a run, each part of it written once."""
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


def read(of: PricedJob, folder: Path) -> dict[str, torch.Tensor]:
    """The state of all stages of a job, read from a checkpoint."""
    stages = build_stages(of, range(of.shape.stages), torch.device("cpu"))
    for stage in stages.values():
        if isinstance(stage.layout, Shards):
            first = stage.index * of.shape.pipelines
            stage.layout.own(range(first, first + of.shape.pipelines))
    load(folder, stages.values())
    for stage in stages.values():
        if isinstance(stage.layout, Shards):
            stage.layout.publish()
            assert bool(torch.cat(stage.layout.weights()).any())
    return joined(stage.named_state(stage.state_tensors()) for stage in stages.values())


def names_in(path: Path) -> list[str]:
    with safe_open(str(path), framework="pt") as file:
        return list(file.keys())


@pytest.mark.slow
def test_runs_read_each_others_checkpoints_in_any_shape(tmp_path: Path) -> None:
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
        for of in (plain, other, sharded(plain, 3), sharded(other)):
            require_equal(read(of, folder), wanted)


@pytest.mark.slow
def test_exports_read_the_pieces_as_the_tensors_that_they_are_of(tmp_path: Path) -> None:
    run = trained(sharded(gpt(5, 1, 1)))
    folder = written(run, tmp_path / "parts")
    kept, wanted = StoredTensors(sorted(folder.iterdir()), JobError), stored(folder)
    (stage,) = next(iter(run.stages.values())).values()
    shapes = {name: tuple(parameter.shape) for name, parameter in stage.parameters.items()}  # type: ignore[attr-defined]
    in_pieces = [name for name in shapes if name in {piece[0] for key in kept.places if (piece := piece_of(key))}]
    assert in_pieces
    for name in in_pieces:
        rows, columns = shapes[name]
        whole = wanted[name].view(rows, columns)
        assert name not in kept.places
        kept.require(name)
        assert torch.equal(kept.whole(name, (rows, columns)), whole)
        assert torch.equal(kept.rows(name, (rows, columns), 0, 10, 20), whole[10:20])
        assert torch.equal(kept.rows(name, (rows, columns), 1, 5, 9), whole[:, 5:9])
        with pytest.raises(JobError, match=rf"{name} has {rows * columns} elements, and the model's is"):
            kept.whole(name, (rows, columns + 1))


SMALL = {"layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "ffn": 48}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [{}, {"tied": True}, {"kind": "mixtral", "config": {"num_moe_experts": 4}}], ids=["gpt", "tied", "mixtral"]
)
def test_a_checkpoint_of_a_run_is_the_beginning_of_another_in_any_number_of_stages(
    model: dict[str, Any], tmp_path: Path
) -> None:
    before = small_job(1, 2, 2, model=SMALL | model)
    pipeline = build_pipeline(before)
    train(pipeline, 0)
    folder = store(tmp_path, before, 0, pipeline)
    trained = {name: tensor for stage in pipeline for name, tensor in stage.parameters.items()}
    for ranks in (1, 2, 4):
        after = small_job(1, ranks, 2, model=SMALL | model | {"weights": str(folder), "seed": 5})
        found = {name: tensor for stage in build_pipeline(after) for name, tensor in stage.parameters.items()}
        assert found.keys() == trained.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    bare = msgspec.structs.replace(after, model=msgspec.structs.replace(after.model, weights=None))
    fresh = build_pipeline(bare)[0].parameters
    assert not torch.equal(fresh["embedding.word_embeddings.weight"], found["embedding.word_embeddings.weight"])


@pytest.fixture
def quarters(tmp_path: Path) -> StoredTensors:
    """Two tensors [8, 12], each cut into four along another dimension, and one that is not cut."""
    whole = torch.arange(96.0).view(8, 12)
    for rank in range(4):
        parts = {
            f"{name}.tensor-{rank}-of-4": whole.chunk(4, d)[rank].clone() for name, d in (("rows", 0), ("lines", 1))
        }
        save_file(parts | ({"norm": whole} if not rank else {}), tmp_path / f"{rank}.safetensors")
    return StoredTensors(sorted(tmp_path.glob("*.safetensors")), JobError)


@pytest.mark.parametrize("name", ["rows", "lines", "norm"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_any_share_of_a_tensor_is_read_however_it_was_cut(quarters: StoredTensors, name: str, dimension: int) -> None:
    whole = torch.arange(96.0).view(8, 12)
    assert torch.equal(quarters.whole(name, (8, 12)), whole)
    size = whole.shape[dimension]
    for count in (1, 2, 4):
        for rank, share in enumerate(whole.chunk(count, dimension)):
            start = rank * size // count
            assert torch.equal(quarters.rows(name, (8, 12), dimension, start, start + size // count), share)


def test_a_tensor_that_is_missing_in_part_or_has_another_shape_is_named(
    quarters: StoredTensors, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=r"has no tensor gone$"):
        quarters.whole("gone", (8, 12))
    with pytest.raises(JobError, match=r"norm is \[8, 12\], and the model's is \[12, 8\]"):
        quarters.whole("norm", (12, 8))
    with pytest.raises(JobError, match=r"rows is 4 parts of \[2, 12\], and the model's is \[8, 8\]"):
        quarters.whole("rows", (8, 8))
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(JobError, match=r"has no tensor rows.tensor-2-of-4"):
        StoredTensors(sorted(tmp_path.glob("*.safetensors")), JobError).require("rows")
