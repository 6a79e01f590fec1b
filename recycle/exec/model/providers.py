"""What a user brings: functions that build the stages' modules, give the data and compute the loss.

A job names them, so that every process imports them by itself; Python code may hand them in, and where worker processes
are started their names go into the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from recycle.errors import JobError
from recycle.exec.data.provided import DataProvider
from recycle.exec.model.loss import LossFunction
from recycle.job import Job
from recycle.named import function_named, name_of

ModelProvider = Callable[..., Any]
"""(job, first_layer, last_layer, pre_process=, post_process=) -> the torch module of a stage, on the CPU, with layers
first_layer to last_layer - 1; the embedding where `pre_process` is true, the output layer where `post_process` is."""
_KEYS = {"model": ("model", "provider"), "data": ("data", "provider"), "loss": ("train", "loss")}


@dataclass(frozen=True)
class Providers:
    """The functions; None where recycle's own serve.

    Attributes:
        model: builds a stage's module.
        data: takes the job and returns what makes batches (see `recycle.exec.data.provided`).
        loss: gives a micro-batch's sum and count of losses (see `recycle.exec.model.loss`).
    """

    model: ModelProvider | None = None
    data: DataProvider | None = None
    loss: LossFunction | None = None

    @classmethod
    def of(cls, job: Job) -> Providers:
        """Those that the job names. Raises JobError when one cannot be imported."""
        folders = job.model.import_from or ()
        found = {}
        for name, (section, key) in _KEYS.items():
            text = getattr(getattr(job, section), key)
            found[name] = None if text is None else function_named(text, f"[{section}] {key}", folders)
        return cls(**found)

    def named_in(self, job: Job) -> Job:
        """The job with the names of these functions, for worker processes.

        Raises:
            JobError: a worker process could not import one, or the job names it too.
        """
        folders = list(job.model.import_from or [])
        for name, (section, key) in _KEYS.items():
            function = getattr(self, name)
            if function is None:
                continue
            self._require_one(job, section, key)
            text, folder = name_of(function, f"[{section}] {key}")
            if folder not in folders:
                folders.append(folder)
            job = msgspec.structs.replace(
                job, **{section: msgspec.structs.replace(getattr(job, section), **{key: text})}
            )
        if folders:
            job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, import_from=folders))
        job.validate()
        return job

    def over(self, job: Job) -> Providers:
        """These, and those that the job names. Raises JobError when both name one."""
        named = Providers.of(job)
        for name, (section, key) in _KEYS.items():
            if getattr(self, name) is not None:
                self._require_one(job, section, key)
        return Providers(self.model or named.model, self.data or named.data, self.loss or named.loss)

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
                f"{self.whence(job, index)}: it cannot be built ({type(error).__name__}: {error})"
            ) from error

    def whence(self, job: Job, index: int) -> str:
        """Where the module of a stage comes from: the beginning of what is said of it."""
        name = job.model.provider or getattr(self.model, "__qualname__", repr(self.model))
        return f"[model] provider: {name}: stage {index}"

    @staticmethod
    def _require_one(job: Job, section: str, key: str) -> None:
        named = getattr(getattr(job, section), key)
        if named is not None:
            raise JobError(f"[{section}] {key}: the job names {named}, and another function is given; leave out one")


NONE = Providers()
"""Recycle's own model, data and loss."""
