"""Checkpoints of a sharded optimizer: every shard is written once and read into any other shape, sharded or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

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
from tests.exec.runs import job
from tests.exec.sharded import joined, require_equal, sharded, stored

pytestmark = pytest.mark.slow


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
