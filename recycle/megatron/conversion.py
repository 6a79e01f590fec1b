"""Converts checkpoints between recycle and Megatron; the whole model passes through the memory of one process.

Weights are converted in fp32; a run's checkpoint also has Adam's moments and step count.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn import Module

from recycle.errors import JobError, first_line
from recycle.exec.checkpoint.checkpoint import (
    Manifest,
    course,
    folder_of,
    identity,
    verify_files,
    write_manifest,
    write_stage,
    write_untrained,
)
from recycle.exec.data.loading import load_batches
from recycle.exec.model.gpt import build_part
from recycle.exec.model.state.optimizer import COUNTED
from recycle.exec.model.stored_tensors import StoredTensors
from recycle.exec.model.tensor_ranks import ensure_parallel_state
from recycle.exec.model.weights import global_names, named_weights, read_weights
from recycle.exec.protocol import Commit
from recycle.files import require_absent, whole_folder
from recycle.job import Job
from recycle.job.manifest import model_of_checkpoint
from recycle.job.sections import ModelSection, ShapeSection
from recycle.megatron.arguments import EXPORTED, model_arguments, require_arguments
from recycle.megatron.torch_dist import OPTIMIZER_PREFIX, TorchDistCheckpoint, write
from recycle.runs.logs import EVENTS, IMPORTED


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """The outcome of a conversion.

    Attributes:
        iteration: iterations of training, as far as the checkpoint says.
        left_out_rows: padding rows of the vocabulary that an import dropped.
        unstated: "key = value" of the job's model for what an imported checkpoint does not state.
    """

    parameters: int
    iteration: int
    moments: bool = False
    left_out_rows: int = 0
    unstated: tuple[str, ...] = ()


MOMENTS = ("exp_avg.", "exp_avg_sq.")
"""Prefixes of parameter names in recycle's checkpoints."""


def export_model(checkpoint: Path, target: Path) -> ConvertedCheckpoint:
    """Make a `torch_dist` checkpoint from the weights in a checkpoint of recycle.

    Raises:
        JobError: the checkpoint does not exist, or megatron-core cannot build its model.
        RecycleError: the checkpoint is damaged, or the folder exists already or cannot be written.
    """
    model = model_of_checkpoint(checkpoint)
    require_absent(target)
    manifest = verify_files(checkpoint).manifest
    iteration, is_adams = manifest.step + 1, not any("optimizer" in key for key in manifest.identity)
    part = _unsplit_part(model)
    stored = StoredTensors(sorted(checkpoint.glob("*.safetensors")), JobError)
    counted = next((name for name in stored.places if is_adams and name.startswith(COUNTED)), None)
    moments = MOMENTS if counted is not None else ()

    def states() -> Iterator[tuple[str, Module]]:
        for prefix in ("", *moments):
            read_weights(part, checkpoint, 0, 0, 1, prefix)
            yield (f"{OPTIMIZER_PREFIX}{prefix}" if prefix else ""), part

    padding = {"make_vocab_size_divisible_by": 1, "tensor_model_parallel_size": 1}
    further: dict[str, Any] = {EXPORTED: model_arguments(model, part.config) | padding}
    if counted is not None:
        further["optimizer"] = _optimizer(manifest, stored.read(counted)[0])
    with whole_folder(target) as folder:
        write(folder, states(), iteration, further)
    return ConvertedCheckpoint(_size(part), iteration, counted is not None)


def _optimizer(manifest: Manifest, count: torch.Tensor) -> dict[str, Any]:
    train = {key.removeprefix("[train] "): value for key, value in manifest.course.items()}
    group = {
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": train["learning_rate"],
        "min_lr": train["minimum_learning_rate"],
        "lr": train["learning_rate"],
        "betas": (train["beta1"], train["beta2"]),
        "eps": train["epsilon"],
    }
    decays = ({"wd_mult": 1.0, "weight_decay": train["weight_decay"]}, {"wd_mult": 0.0, "weight_decay": 0.0})
    return {"state": {"common_step": count.clone()}, "param_groups": [group | decay for decay in decays]}


def import_model(source: Path, model: ModelSection, target: Path, *, keeps_rows: bool = False) -> ConvertedCheckpoint:
    """Make a checkpoint of recycle from the weights in a `torch_dist` checkpoint.

    Args:
        source: folder of an iteration, or its parent, of a script with any T, P and V.
        model: model of the weights; compared with everything that the checkpoint states about it.
        keeps_rows: take the vocabulary from the checkpoint's embedding instead of `model`.

    Raises:
        JobError: the source is not such a checkpoint, or has another model.
        RecycleError: the folder exists already or cannot be written.
    """
    checkpoint = TorchDistCheckpoint(source)
    require_absent(target)
    if keeps_rows:
        model = msgspec.structs.replace(model, vocabulary=checkpoint.vocabulary)
    part = _unsplit_part(model)
    unstated = require_arguments(checkpoint.folder, checkpoint.arguments, model, part.config)
    checkpoint.read(part)
    with whole_folder(target) as folder:
        files = write_stage(folder, 0, "import", {name: piece.detach() for name, piece in named_weights(part).items()})
        write_untrained(folder, model, files)
    return _outcome(checkpoint, part, model, unstated)


def import_run(source: Path, job: Job, target: Path) -> ConvertedCheckpoint:
    """Make a run directory to resume, with weights, moments and step count of a `torch_dist` checkpoint.

    Args:
        source: as in `import_model`, with the state of Adam.
        job: the job that will resume, with the model and batch of the training so far.

    Raises:
        JobError: the source is not such a checkpoint, has another model, or lacks moments.
        RecycleError: the folder exists already or cannot be written.
    """
    checkpoint = TorchDistCheckpoint(source)
    require_absent(target)
    iteration_folder, iteration = checkpoint.folder, _iteration(checkpoint.folder)
    if not checkpoint.has(OPTIMIZER_PREFIX):
        raise JobError(f"{iteration_folder}: has no moments of an optimizer; import the weights alone, without --run")
    if not iteration:
        raise JobError(f"{iteration_folder}: its name does not say how many iterations were done; name it iter_0000012")
    model = job.without_weights().model
    part = _unsplit_part(model)
    named: dict[str, torch.Tensor] = {}
    weights = f"{OPTIMIZER_PREFIX}fp32_param." if checkpoint.has(f"{OPTIMIZER_PREFIX}fp32_param.") else ""
    unstated = require_arguments(checkpoint.folder, checkpoint.arguments, model, part.config)
    checkpoint.read(part)
    for prefix, stored_prefix in (("", weights), *((moment, f"{OPTIMIZER_PREFIX}{moment}") for moment in MOMENTS)):
        if prefix:
            for parameter in part.parameters():
                parameter.detach().zero_()  # moments of the expert bias, which Megatron does not have
        if stored_prefix:
            checkpoint.read(part, stored_prefix)
        named |= {f"{prefix}{name}": piece.detach().clone() for name, piece in named_weights(part).items()}
        if not prefix and job.train.precision == "bf16":
            named |= {f"rounded.{name}": piece.bfloat16() for name, piece in named_weights(part).items()}
    taken = torch.tensor([float(_steps_taken(checkpoint.common, iteration))])
    named |= {f"{COUNTED}{name}": taken.clone() for name in global_names(part, 0)}
    step = iteration - 1
    before = Commit(step=step, loss=0.0, grad_norm=0.0, clip_factor=None)
    with whole_folder(target) as folder:
        (folder / "metrics.jsonl").write_text("")
        imported = {"time": 0.0, "kind": IMPORTED, "step": step, "source": str(iteration_folder)}
        (folder / EVENTS).write_text(json.dumps(imported) + "\n")
        (folder / "job.toml").write_text(job.to_toml())
        kept = folder_of(folder / "checkpoints", step)
        kept.mkdir(parents=True)
        files = write_stage(kept, 0, "import", named)
        settings = course(job, load_batches(job).digest)
        write_manifest(kept, Manifest(step, before, job.shape.to_json(), identity(job), settings, files))
    return replace(_outcome(checkpoint, part, model, unstated), moments=True)


def _outcome(
    checkpoint: TorchDistCheckpoint, part: Module, model: ModelSection, unstated: tuple[str, ...]
) -> ConvertedCheckpoint:
    left_out = checkpoint.vocabulary - model.vocabulary
    return ConvertedCheckpoint(_size(part), _iteration(checkpoint.folder), False, left_out, unstated)


def _steps_taken(common: Mapping[str, Any], iteration: int) -> int:
    try:
        return int(common["optimizer"]["state"]["common_step"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        return iteration


def _iteration(folder: Path) -> int:
    number = folder.name.removeprefix("iter_")
    return int(number) if number.isascii() and number.isdigit() else 0


def _unsplit_part(model: ModelSection) -> Module:
    job = Job(grid=ShapeSection(1, 1, 1), model=model)
    if model.provider is not None or model.kind == "emulated":
        raise JobError("[model]: Megatron's checkpoints are of GPT, Llama, Qwen or Mixtral, built by recycle")
    job.validate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns about every missing optional package
        ensure_parallel_state()
        try:
            part: Module = build_part(job, 0)
            return part
        except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
            raise JobError(f"[model]: megatron-core cannot build it: {first_line(error)}") from error


def _size(part: Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())
