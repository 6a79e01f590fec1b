"""What a user brings: functions that build the stages' modules, give the data and compute the loss.

A job names them, so that every process imports them by itself; Python code may hand them in, and where worker processes
are started their names go into the job.
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

if TYPE_CHECKING:  # both have torch, which the process that names the functions for others lacks
    from recycle.exec.data.loading import DataProvider
    from recycle.exec.model.loss import LossFunction

ModelProvider = Callable[..., Any]
"""(job, first_layer, last_layer, pre_process=, post_process=) -> the torch module of a stage, on the CPU, with layers
first_layer to last_layer - 1; the embedding where `pre_process` is true, the output layer where `post_process` is."""
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
"""Section and field of a job that name it; of evaluations in the section's own data."""


@dataclass(frozen=True)
class Providers:
    """The functions; None where recycle's own serve.

    Attributes:
        model: builds a stage's module.
        data: takes the job and returns what makes batches (see `recycle.exec.data.loading`).
        loss: gives a micro-batch's sum and count of losses (see `recycle.exec.model.loss`).
        evaluation: as `data`, of what evaluations read.
    """

    model: ModelProvider | None = None
    data: DataProvider | None = None
    loss: LossFunction | None = None
    evaluation: DataProvider | None = None

    @classmethod
    def of(cls, job: Job) -> Providers:
        """Those that the job names. Raises JobError when one cannot be imported."""
        folders = job.model.import_from or ()
        found = {}
        for name, key in _KEYS.items():
            text = _stated(job, name)
            found[name] = None if text is None else function_named(text, key, folders)
        return cls(**found)

    def of_evaluation(self, job: Job) -> DataProvider | None:
        """What gives the data of evaluations: that of training where the job says nothing of them."""
        return self.evaluation or (self.data if job.evaluation.data is None else None)

    def named_in(self, job: Job) -> Job:
        """The job with the names of these functions, for worker processes.

        Raises:
            JobError: a worker process could not import one, or the job names it too.
        """
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

    def over(self, job: Job) -> Providers:
        """These, and those that the job names. Raises JobError when both name one."""
        named = Providers.of(job)
        for name in _KEYS:
            if getattr(self, name) is not None:
                _require_one(job, name)
        return Providers(**{name: getattr(self, name) or getattr(named, name) for name in _KEYS})

    def build(self, job: Job, index: int) -> Any:
        """What the model's function gives for a stage. Raises JobError that names the function and the stage."""
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
        """Where the module of a stage comes from: the beginning of what is said of it."""
        name = job.model.provider or getattr(self.model, "__qualname__", repr(self.model))
        return f"[model] provider: {name}: stage {index}"


def _stated(job: Job, name: str) -> str | None:
    """What the job names as this one of `Providers`."""
    section = job.evaluation.data if name == "evaluation" else getattr(job, _FIELDS[name][0])
    return None if section is None else getattr(section, _FIELDS[name][1])


def _stating(job: Job, name: str, text: str) -> Job:
    """The job, naming this one of `Providers`."""
    replace, (section, field) = msgspec.structs.replace, _FIELDS[name]
    if name == "evaluation":
        data = replace(job.evaluation.data or DataSection(), provider=text)
        return replace(job, evaluation=replace(job.evaluation, data=data))
    return replace(job, **{section: replace(getattr(job, section), **{field: text})})


def _require_one(job: Job, name: str) -> None:
    named = _stated(job, name)
    if named is not None:
        raise JobError(f"{_KEYS[name]}: the job names {named}, and another function is given; leave out one")


NONE = Providers()
"""Recycle's own model, data and loss."""
