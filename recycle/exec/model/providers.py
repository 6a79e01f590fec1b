"""User functions that build the stages' modules, provide the data and compute the loss.

Every process imports them by the names in its job; Python code may pass the functions instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

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
        named, folders = job.named_functions(), job.model.import_from or ()
        return cls(**{name: function_named(named[key], key, folders) for name, key in _KEYS.items() if key in named})

    def evaluation_data(self, job: Job) -> DataProvider | None:
        """The data provider of evaluations; the training data's by default."""
        return self.evaluation or (self.data if job.evaluation.data is None else None)

    def write_names(self, job: Job) -> Job:
        """The job with the names of these functions. Raises JobError if a worker process could not import one."""
        folders = list(job.model.import_from or [])
        for name, function in self._passed(job).items():
            text, folder = name_of(function, _KEYS[name])
            if folder not in folders:
                folders.append(folder)
            section, change = name, dict[str, Any](provider=text)
            if name == "loss":
                section, change = "train", {"loss": text}
            elif name == "evaluation":
                change = {"data": structs.replace(job.evaluation.data or DataSection(), provider=text)}
            job = structs.replace(job, **{section: structs.replace(getattr(job, section), **change)})
        if folders:
            job = structs.replace(job, model=structs.replace(job.model, import_from=folders))
        job.validate()
        return job

    def merged_with(self, job: Job) -> Providers:
        """These functions merged with those that the job names. Raises JobError if both give one."""
        return replace(Providers.from_job(job), **self._passed(job))

    def _passed(self, job: Job) -> dict[str, Any]:
        named, passed = job.named_functions(), {name: getattr(self, name) for name in _KEYS if getattr(self, name)}
        for key in (_KEYS[name] for name in passed):
            if key in named:
                stated = f"the job names {named[key]}, and another function is passed"
                raise JobError(f"{key}: {stated}; remove one of the two")
        return passed

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
