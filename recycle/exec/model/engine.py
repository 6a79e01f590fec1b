"""Choice of the layers of a model: Transformer Engine's on a GPU where they pass a test, else megatron-core's own.

Launchers choose once, before any worker starts, because other layers have other bits.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from recycle.errors import first_line
from recycle.exec.model.build import build_stages
from recycle.exec.model.config import TRANSFORMER_ENGINE, transformer_config
from recycle.exec.model.providers import Providers
from recycle.job import Job
from recycle.job.sections import AUTO, ModelSection, ShapeSection, TrainSection
from recycle.job.shape import MicroBatch

KEY = "transformer_impl"
_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Relative difference of gradients between both implementations."""


def choose_layers(job: Job, device: torch.device) -> tuple[str, str]:
    """Return the implementation of a job's layers, and why it is not Transformer Engine's on a GPU.

    Both are empty where there is nothing to choose: on a CPU, for a user's model, or if the job states it.
    """
    model = job.model
    is_open = model.kind != "emulated" and model.provider is None and model.config.get(KEY, AUTO) == AUTO
    if device.type != "cuda" or not is_open:
        return "", ""
    if job.grid.tensor_parallel > 1:
        fault: str | None = "[shape] tensor_parallel is above 1"
    else:
        fault = engine_fault(model.kind, job.train.precision, device)
    return (TRANSFORMER_ENGINE, "") if fault is None else ("local", f"Transformer Engine is not used: {fault}")


def engine_fault(kind: Any, precision: Any, device: torch.device) -> str | None:
    """Train a layer of this family for one micro-batch with both implementations; return what is wrong, or None.

    Delayed weight gradients must have the bits of the whole backward, twice, and differ little from megatron-core's.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products
    try:
        split, whole, again = (
            _gradients(kind, precision, device, TRANSFORMER_ENGINE, half) for half in (True, False, True)
        )
        own = _gradients(kind, precision, device, "local", True)
    except Exception as error:  # a library for another GPU or CUDA raises anything
        return first_line(error) or type(error).__name__
    if not (torch.equal(split, whole) and torch.equal(split, again)):
        return "its weight gradients have other bits in a second run"
    if not (split - own).norm() <= _TOLERANCE[precision] * own.norm():
        return "its gradients differ from megatron-core's"
    return None


def _gradients(kind: Any, precision: Any, device: torch.device, layers: str, is_split: bool) -> torch.Tensor:
    job = Job(
        grid=ShapeSection(1, 1, 1),
        model=ModelSection(kind=kind, layers=1, config={KEY: layers}),
        train=TrainSection(precision=precision),
    )
    transformer_config(job)  # its refusal says how to install
    (stage,) = build_stages(job, [0], device, providers=Providers(data=_tokens)).values()
    micro_batch = MicroBatch(0, 0)
    stage.begin_iteration(0)
    stage.forward(micro_batch, None)
    if is_split:
        stage.backward_input(micro_batch, None)
        stage.backward_weight(micro_batch)
    else:
        stage.backward(micro_batch, None)
    return torch.cat(stage.gradient_buffers())


def _tokens(job: Job) -> Any:
    tokens = torch.arange(job.model.sequence)[None]
    return lambda iteration, micro_batch: {"tokens": tokens, "labels": tokens + 1}
