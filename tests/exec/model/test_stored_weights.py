"""Weights read from checkpoints of any split: into stages, and into tensor ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from recycle import JobError
from recycle.exec.model.stored_tensors import StoredTensors
from tests.exec.checkpoint.test_checkpoint import store, train
from tests.exec.drive import build_pipeline, small_job

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
