"""Builds the stages of a worker process, of the job's kind."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from recycle import megatron_versions
from recycle.errors import JobError, RunError, first_line
from recycle.exec.data.loading import load_batches, load_evaluation
from recycle.exec.emulation import EmulatedStage
from recycle.exec.model.providers import Providers
from recycle.exec.model.stage import PRECISIONS, Stage, StatePiece
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.transport.plugin import gpu_or_cpu
from recycle.job import Job, price
from recycle.job.pricing import profile_of_layout
from recycle.plans.hosting import stage_units


def build_stages(
    job: Job,
    indices: Iterable[int],
    device: torch.device | None = None,
    tensor_group: TensorGroup | None = None,
    providers: Providers | None = None,
    *,
    cut: Sequence[int] = (),
    held: Mapping[int, StatePiece] = MappingProxyType({}),
    is_filled: bool = True,
) -> dict[int, Stage]:
    """Build the stages by index, freshly initialized. Every process gets the same initial bits.

    Prepares this process for stages of a model: megatron-core's process groups, the thread count and, with `exact`
    accumulation, deterministic kernels, which need `CUBLAS_WORKSPACE_CONFIG=:4096:8` on a GPU. Raises JobError if a
    provider fails, and RunError for an unsupported setting, precision or megatron-core.

    Args:
        cut: layers of each stage, if different from the job's split (`Shape.cut`).
        held: existing state of units of the model, which the stages take over.
        is_filled: initialize all other weights; otherwise leave them uninitialized.
    """
    if job.model.kind == "emulated":
        emulated_job, scale = job.with_cut(cut), job.model.seconds_per_unit
        profile = profile_of_layout(job, price(job).prices, emulated_job.shape)
        return {index: EmulatedStage(emulated_job, index, profile, scale, held) for index in indices}
    job = job.with_cut(cut)
    device = device or gpu_or_cpu()
    require_precision(job.train.precision, device)
    torch.set_num_threads(job.train.threads)
    if job.train.accumulation == "exact":
        megatron_versions.use_deterministic_kernels()
        # Filling fresh tensors helps to find bugs and costs time; it changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    indices, ends = list(indices), {0, job.shape.stages - 1}
    providers = providers or Providers.from_job(job)
    # The first stage reads tokens, the last stage labels, and all stages read a mask of documents.
    batches, evaluation = None, None
    if ends.intersection(indices) or job.data.reset_attention or job.evaluation_data.reset_attention:
        batches = load_batches(job, providers.data)
        evaluation = load_evaluation(job, providers.evaluation_data(job)) if job.evaluation.every else None
    stages, tied = dict[int, Stage](), None
    with warnings.catch_warnings():
        # megatron-core warns of every missing optional package in every process.
        warnings.simplefilter("ignore")
        # Imported late because megatron-core takes seconds; emulated stages do not need it.
        from recycle.exec.model.megatron_stage import MegatronStage
        from recycle.exec.model.tensor_ranks import ensure_parallel_state

        ensure_parallel_state(tensor_group)
        rank = 0 if tensor_group is None else tensor_group.rank()
        for index in indices:
            is_new = not held.keys() >= set(range(*stage_units(job.layers_per_stage())[index]))
            with megatron_versions.layers_numbered_from(sum(job.layers_per_stage()[:index])):
                part = build_module(job, index, rank, providers, is_filled and is_new)
            stage = MegatronStage(job, index, device, batches, part, tied, rank, providers, evaluation, held)
            stages[index], tied = stage, tied or stage.tied_sum
    megatron_versions.warn_unsupported_versions()
    return stages


def build_module(job: Job, index: int, tensor_rank: int, providers: Providers, is_filled: bool) -> Any:
    """Build the module of a stage on the current default device. Raises JobError as `build_stages`."""
    if providers.model is None:
        from recycle.exec.model.gpt import build_part

        try:
            return build_part(job, index, tensor_rank, is_filled=is_filled)
        except (AssertionError, IndexError, NotImplementedError, TypeError, ValueError, ZeroDivisionError) as error:
            raise JobError(f"[model]: megatron-core cannot build stage {index} of it: {first_line(error)}") from error
    from recycle.exec.model.part import require_trainable

    with torch.random.fork_rng([]):
        torch.manual_seed(job.model.seed + index)  # the same bits in every process
        module = providers.build(job, index)
    require_trainable(module, job, index, providers.origin_of(job, index))
    return module


def require_precision(precision: str, device: torch.device) -> None:
    """Raise RunError unless the device supports matrix products and layer norm in this precision."""
    try:
        ones = torch.ones(8, 8, dtype=PRECISIONS[precision], device=device)
        torch.nn.functional.layer_norm(ones @ ones, (8,))
    except RuntimeError as error:
        reason = f"{device} cannot compute in {precision} ({first_line(error)})"
        raise RunError(f"[train] precision: {reason}; use fp32") from None
