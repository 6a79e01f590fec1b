"""Checkpoints of recycle to and from those of Megatron: the whole model passes through the memory of one process.

What is kept are weights, in fp32 as recycle has them; Megatron casts them to the type of its parameters. Moments of the
optimizer stay behind: their place in Megatron's checkpoints depends on which of its optimizers a script uses.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from recycle.errors import JobError, RecycleError
from recycle.exec.checkpoint.checkpoint import Manifest, model_identity, verify_files, write_manifest, write_stage
from recycle.exec.membership.messages import Commit
from recycle.files import whole_folder
from recycle.initial_weights import model_of_checkpoint
from recycle.job import Job
from recycle.manifest import MODEL
from recycle.sections import ModelSection, ShapeSection


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        parameters: entries of all weights.
        iteration: how many iterations they were trained for, as far as the checkpoint says.
    """

    parameters: int
    iteration: int


def export_model(checkpoint: Path, target: Path) -> Converted:
    """Make a `torch_dist` checkpoint of the weights in one of recycle's.

    Args:
        checkpoint: its folder, of any shape of the run that wrote it, or imported.
        target: the folder that is made; `--load` of Megatron-LM takes it.

    Raises:
        JobError: there is no such checkpoint, or megatron-core cannot build its model.
        RecycleError: the checkpoint is damaged, or the folder exists already or cannot be written.
    """
    model = model_of_checkpoint(checkpoint)
    if target.exists():
        raise RecycleError(f"{target}: exists already; remove it, or choose another name with -o")
    iteration = verify_files(checkpoint).manifest.step + 1
    part = _unsplit(model)
    from recycle.exec.model.stored_weights import read_weights
    from recycle.megatron.torch_dist import write

    read_weights(part, checkpoint, 0, 0, 1)
    with whole_folder(target) as folder:
        write(folder, part, iteration)
    return Converted(_size(part), iteration)


def import_model(source: Path, model: ModelSection, target: Path) -> Converted:
    """Make a checkpoint of recycle of the weights in a `torch_dist` checkpoint.

    Args:
        source: folder of an iteration, or the one above it, of a script that ran with any T, P and V.
        model: what the weights are of; the checkpoint does not say it in a form that is safe to read.
        target: the checkpoint, a folder that is made.

    Raises:
        JobError: it is no such checkpoint, or not of this model.
        RecycleError: the folder exists already or cannot be written.
    """
    from recycle.megatron.torch_dist import iteration_folder, read

    inside = iteration_folder(source)
    if target.exists():
        raise RecycleError(f"{target}: exists already; remove it, or choose another name with -o")
    part = _unsplit(model)
    read(inside, part)
    from recycle.exec.model.stored_weights import named_weights

    with whole_folder(target) as folder:
        files = write_stage(folder, 0, "import", {name: piece.detach() for name, piece in named_weights(part).items()})
        before = Commit(step=-1, loss=0.0, grad_norm=0.0, clip_factor=None)
        write_manifest(folder, Manifest(-1, before, {}, {MODEL: model_identity(model)}, {}, files))
    number = inside.name.removeprefix("iter_")
    return Converted(_size(part), int(number) if number.isdigit() else 0)


def _unsplit(model: ModelSection) -> torch.nn.Module:
    """megatron-core's model with all layers. Raises JobError when it cannot be built."""
    job = Job(grid=ShapeSection(1, 1, 1), model=model)
    if model.provider is not None or model.kind == "emulated":
        raise JobError("[model]: Megatron's checkpoints are of GPT, Llama, Qwen or Mixtral, built by recycle")
    job.validate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core tells of every optional package that is missing
        from recycle.exec.model.gpt import build_part
        from recycle.exec.model.parallel_state import ensure_parallel_state

        ensure_parallel_state()
        try:
            part: torch.nn.Module = build_part(job, 0)
            return part
        except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
            raise JobError(f"[model]: megatron-core cannot build it: {error}") from error


def _size(part: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())
