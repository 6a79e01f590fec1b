"""User functions that build the stages' modules, provide the data and compute the loss.

Every process imports them by the names in its job; Python code may pass the functions instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from recycle.errors import JobError, first_line
from recycle.job import Job
from recycle.job.named import function_named, name_of
from recycle.job.sections import DataSection

if TYPE_CHECKING:  # both import torch, which a process that only names functions may lack
    from recycle.exec.data.loading import DataProvider
    from recycle.exec.model.loss import LossFunction

ModelProvider = Callable[..., Any]
"""(job, first_layer, last_layer, pre_process=, post_process=) -> the torch module of a stage, on the CPU.

The module has layers first_layer to last_layer - 1, the embedding if `pre_process`, and the output layer if
`post_process`.
"""
_KEYS = {
    "model": "[model] provider",
    "data": "[data] provider",
    "loss": "[train] loss",
    "evaluation": "[eval] data.provider",
}
_FIELDS = {
    "model": ("model", "provider"),
    "data": ("data", "provider"),
    "loss": ("train", "loss"),
    "evaluation": ("evaluation", "provider"),
}
"""Section and field of the job with the function's name; for evaluations, a field of the section's own data."""


@dataclass(frozen=True)
class Providers:
    """User functions; None selects recycle's own.

    Attributes:
        data: takes the job and returns a source of batches (see `recycle.exec.data.loading`).
        loss: returns sum and count of a micro-batch's losses (see `recycle.exec.model.loss`).
        evaluation: as `data`, for evaluations.
    """

    model: ModelProvider | None = None
    data: DataProvider | None = None
    loss: LossFunction | None = None
    evaluation: DataProvider | None = None

    @classmethod
    def from_job(cls, job: Job) -> Providers:
        """Import the functions that the job names. Raises JobError if an import fails."""
        folders = job.model.import_from or ()
        functions = {}
        for name, key in _KEYS.items():
            text = _stated(job, name)
            functions[name] = None if text is None else function_named(text, key, folders)
        return cls(**functions)

    def evaluation_data(self, job: Job) -> DataProvider | None:
        """The data provider of evaluations; the training data's by default."""
        return self.evaluation or (self.data if job.evaluation.data is None else None)

    def write_names(self, job: Job) -> Job:
        """The job with the names of these functions. Raises JobError if a worker process could not import one."""
        folders = list(job.model.import_from or [])
        for name, key in _KEYS.items():
            function = getattr(self, name)
            if function is None:
                continue
            _require_one(job, name)
            text, folder = name_of(function, key)
            if folder not in folders:
                folders.append(folder)
            job = _stating(job, name, text)
        if folders:
            job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, import_from=folders))
        job.validate()
        return job

    def merged_with(self, job: Job) -> Providers:
        """These functions merged with those that the job names. Raises JobError if both give one."""
        named = Providers.from_job(job)
        for name in _KEYS:
            if getattr(self, name) is not None:
                _require_one(job, name)
        return Providers(**{name: getattr(self, name) or getattr(named, name) for name in _KEYS})

    def build(self, job: Job, index: int) -> Any:
        assert self.model is not None
        layers = job.layers_per_stage()
        first = sum(layers[:index])
        try:
            return self.model(
                job, first, first + layers[index], pre_process=index == 0, post_process=index == len(layers) - 1
            )
        except Exception as error:
            raise JobError(
                f"{self.origin_of(job, index)}: it cannot be built ({type(error).__name__}: {first_line(error)})"
            ) from error

    def origin_of(self, job: Job, index: int) -> str:
        name = job.model.provider or getattr(self.model, "__qualname__", repr(self.model))
        return f"[model] provider: {name}: stage {index}"


def _stated(job: Job, name: str) -> str | None:
    section = job.evaluation.data if name == "evaluation" else getattr(job, _FIELDS[name][0])
    return None if section is None else getattr(section, _FIELDS[name][1])


def _stating(job: Job, name: str, text: str) -> Job:
    replace, (section, field) = msgspec.structs.replace, _FIELDS[name]
    if name == "evaluation":
        data = replace(job.evaluation.data or DataSection(), provider=text)
        return replace(job, evaluation=replace(job.evaluation, data=data))
    return replace(job, **{section: replace(getattr(job, section), **{field: text})})


def _require_one(job: Job, name: str) -> None:
    named = _stated(job, name)
    if named is not None:
        raise JobError(f"{_KEYS[name]}: the job names {named}, and another function is passed; remove one of the two")


NONE = Providers()
"""Recycle's own model, data and loss."""
